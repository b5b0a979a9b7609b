"""metrics.jsonl: the form of each line, a disk that is full for a while, and a crash."""

import json
from pathlib import Path

from pytest import mark, raises
from support.capture import Capture, read_stderr
from support.small_disk import SmallDisk
from support.text_lines import read_text_lines

from nmt.train.events import SkippedEvent, parse_event, read_events
from nmt.train.run_log import MetricsLog

# One line of each kind, as the first version with all of them wrote it.
LINES = """\
{"kind": "train", "step": 4, "epoch": 0, "loss": 3.5, "nll": 3.25, "ppl": 25.79, "lr": 0.001, "grad_norm": "nan", \
"src_tokens_per_s": 10.5, "tgt_tokens_per_s": 11.0, "updates_per_s": 0.5, "waited_s": 0.01, "memory_bytes": 4096, \
"elapsed_s": 8.1}
{"kind": "sample", "step": 4, "line": 2, "source": "a", "reference": "b", "translation": "\\u00fc"}
{"kind": "valid", "step": 4, "nll": 3.0, "ppl": 20.086, "bleu": null, "signature": null, "chrf": null, \
"elapsed_s": 8.1}
{"kind": "valid", "step": 8, "nll": 3.0, "ppl": 20.086, "bleu": 1.5, "signature": "nrefs:1", "chrf": 12.5, \
"elapsed_s": 16.2}
{"kind": "skipped", "step": 9, "loss": "inf", "grad_norm": "12.5"}
{"kind": "warning", "step": 9, "problem": "stalled", "nll": 5.5, "unigram_nll": 5.25, "message": "raise it"}
{"kind": "warning", "step": 9, "problem": "mirror", "message": "cannot be reached"}
"""


@mark.parametrize("row", LINES.splitlines())
def test_a_line_is_read_and_written_as_it_was(row: str) -> None:
    event = parse_event(row.encode())
    assert event is not None
    assert json.dumps(event.to_line()) == row


@mark.parametrize(
    "row, step, figures",
    [
        ('{"kind": "train", "step": 3, "nll": 2.5, "lr": "fast", "epoch": true}', 3, {"nll": 2.5}),
        ('{"kind": "valid", "step": 3, "bleu": "nan", "chrf": [1], "nll": 1}', 3, {"nll": 1.0}),
        ('{"kind": "sample", "step": 3, "line": "?", "attention": 5}', 3, {}),
    ],
)
def test_values_that_are_missing_or_damaged_are_not_among_the_figures(
    row: str, step: int, figures: dict[str, float]
) -> None:
    event = parse_event(row.encode())
    assert event is not None and event.step == step
    assert event.figures == figures


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        "[]",
        "?",
        '{"kind": "train"}',
        '{"kind": "train", "step": -1}',
        '{"kind": "x", "step": 1}',
    ]
    path.write_text("\n".join([*rows, LINES]))
    events, n_damaged = read_events(path)
    assert len(events) == len(LINES.splitlines()) and n_damaged == len(rows)


# ---- writing -------------------------------------------------------------------------------------


def make_event(step: int, text: str = "") -> SkippedEvent:
    return SkippedEvent(step=step, loss=text, grad_norm="")


def list_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in read_text_lines(path)]


def test_lines_that_cannot_be_written_wait(small_disk: SmallDisk, capsys: Capture) -> None:
    path = small_disk.path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write(make_event(0))
    ballast = small_disk.fill(0)
    for n in (1, 2):
        log.write(make_event(n, "x" * 5_000))
    assert read_stderr(capsys).count("warning") == 1
    with raises(OSError, match="No space left"):
        log.sync()
    ballast.unlink()
    log.write(make_event(3))
    assert list_steps(path) == [0, 1, 2, 3]
    assert log.sync() == path.stat().st_size


def test_the_log_continues_where_its_checkpoint_ended(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"step"')
    MetricsLog(path, 12).write(make_event(5))
    assert list_steps(path) == [0, 5]
    assert not read_stderr(capsys)
    n_bytes = path.stat().st_size
    MetricsLog(path, 1_000).write(make_event(6))  # someone has shortened the file
    assert list_steps(path) == [0, 5, 6]
    assert f"{n_bytes} of 1000 bytes" in read_stderr(capsys)
