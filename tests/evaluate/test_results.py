"""results.json loses no record, keeps one for each thing scored, and says in one line where it is
damaged.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, mark, raises
from support.checkout import TESTS
from support.recorded_result import RESULT

from nmt.evaluate.results import add_result, find_run, read_results
from nmt.score.score import Score
from nmt.system.errors import UserError
from nmt.system.files import lock
from nmt.system.run_folder import RESULTS_FILE
from nmt.system.strict_json import Fields


def test_what_is_added_is_read(tmp_path: Path) -> None:
    assert read_results(tmp_path) == []
    other = replace(RESULT, decoding=RESULT.decoding | {"beam": 1}, seconds=3.0)
    add_result(tmp_path, RESULT)
    add_result(tmp_path, other)
    assert read_results(tmp_path) == [RESULT, other]
    assert {path.name for path in tmp_path.iterdir()} == {RESULTS_FILE}


@mark.parametrize(
    "change, n",
    [
        ({"when": "2027-01-01T00:00:00Z", "seconds": 1.0, "scores": [], "checkpoint": "copy"}, 1),
        ({"weights_sha256": "0" * 64}, 2),
        ({"engine": "ctranslate2 4.5 int8"}, 2),
        ({"test_set": replace(RESULT.test_set, ref_sha256="0" * 64)}, 2),
        ({"decoding": {"beam": 4}}, 2),
        ({"vocab_sha256": "0" * 64}, 2),
        ({"pair": "de-en"}, 2),
    ],
)
def test_the_same_again_replaces_its_record(change: Fields, n: int, tmp_path: Path) -> None:
    add_result(tmp_path, RESULT)
    again = replace(RESULT, hypotheses_sha256="0", **change)
    add_result(tmp_path, again)
    assert read_results(tmp_path) == [RESULT, again][-n:]


def test_scores_that_were_not_asked_for_again_stay(tmp_path: Path) -> None:
    """Scores of all metrics are not lost to a plain rescoring, as long as the text is the same."""
    kept = Score("TER", 50.0, "ter")
    again = [replace(RESULT.scores[0], low=None, high=None), Score("chrF2", 56.0, "chrf")]
    add_result(tmp_path, replace(RESULT, scores=[RESULT.scores[0], kept]))
    add_result(tmp_path, replace(RESULT, when="later", scores=again))
    assert read_results(tmp_path) == [replace(RESULT, when="later", scores=[*again, kept])]
    add_result(tmp_path, replace(RESULT, hypotheses_sha256="0" * 64, scores=again))
    assert read_results(tmp_path)[-1].scores == again  # of other text they would be wrong


ADDING = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from support.recorded_result import RESULT
from nmt.evaluate.results import add_result
for n in range(8):
    add_result(Path(sys.argv[1]), replace(RESULT, engine=f"{sys.argv[2]} {n}"))
"""


def test_many_at_a_time_lose_nothing(tmp_path: Path) -> None:
    """And a run in training, which holds its folder, hinders nobody."""
    with lock(tmp_path, "training"):
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    ADDING,
                    str(tmp_path),
                    str(n),
                    str(TESTS),
                ]
            )
            for n in range(2)
        ]
        assert [process.wait(100) for process in processes] == [0, 0]
    assert sorted(record.engine for record in read_results(tmp_path)) == [
        f"{n} {i}" for n in range(2) for i in range(8)
    ]


def test_one_who_never_lets_go(tmp_path: Path) -> None:
    with (
        lock(tmp_path / RESULTS_FILE, "nmt-eval", ".results.lock"),
        raises(UserError, match="in use by nmt-eval"),
    ):
        add_result(tmp_path, RESULT, patience_s=0.1)


def changed(**change: Any) -> bytes:
    record = asdict(RESULT)
    return json.dumps([record, record | change]).encode()


DAMAGE: dict[str, tuple[bytes, str]] = {
    "cut off": (changed()[:-9], "not JSON"),
    "a mapping": (b"{}", "not a list"),
    "numbers": (b"[1]", "record 1"),
    "nested": (b"[" * 100_000, "nested more than 50 levels deep"),
    "a key too many": (changed(note="x"), "record 2: note: unknown key"),
    "a key too few": (b'[{"when": "x"}]', "record 1: checkpoint: is missing"),
    "a number in words": (changed(step="ten"), "record 2: step: 'ten' is not an integer"),
    "true for a number": (changed(step=True), "record 2: step: True is not an integer"),
    "NaN": (changed(seconds=float("nan")), "NaN is not a number in JSON"),
    "a score of nothing": (
        changed(scores=[{"name": "BLEU"}]),
        "record 2: scores[0].value: is missing",
    ),
    "a list for a setting": (
        changed(decoding={"beam": [4]}),
        "record 2: decoding.beam: [4] is not a string or an integer",
    ),
    "a terminal's codes": (changed(engine=["\x1b[2J\n"]), "record 2: engine: ["),
}


@mark.parametrize("case", DAMAGE)
def test_damage_is_told_in_one_line_and_kept(case: str, tmp_path: Path) -> None:
    data, message = DAMAGE[case]
    (tmp_path / RESULTS_FILE).write_bytes(data)
    for attempt in (lambda: read_results(tmp_path), lambda: add_result(tmp_path, RESULT)):
        with raises(UserError) as caught:
            attempt()
        assert message in str(caught.value) and str(tmp_path / RESULTS_FILE) in str(caught.value)
        assert str(caught.value).isprintable()
    assert (tmp_path / RESULTS_FILE).read_bytes() == data


@mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_file_is_refused_unopened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / RESULTS_FILE
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
        (tmp_path / "elsewhere").write_text("[]")
    for attempt in (lambda: read_results(tmp_path), lambda: add_result(tmp_path, RESULT)):
        with raises(UserError, match=f"results.json: is a {kind}"):
            attempt()


@mark.parametrize("fault", ["a folder for a lock", "nowhere"])
def test_a_place_that_takes_no_file_is_the_callers_to_tell(fault: str, tmp_path: Path) -> None:
    if fault == "nowhere":
        tmp_path = tmp_path / "gone"
    else:
        (tmp_path / ".results.lock").mkdir()
    with raises((OSError, UserError), match=r"No such file|\.results\.lock: is a folder"):
        add_result(tmp_path, RESULT)  # at once: only a lock that another holds is waited for
    assert not (tmp_path / RESULTS_FILE).exists()


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with raises(UserError, match="seconds: nan is not a finite number"):
        add_result(tmp_path, replace(RESULT, seconds=float("nan")))
    assert not (tmp_path / RESULTS_FILE).exists()


def test_the_run_of_a_checkpoint(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-0000010"
    for place in (run / "average", step, tmp_path / "alone"):
        place.mkdir(parents=True)
    (run / "config.yaml").touch()
    (tmp_path / "linked").symlink_to(run / "average")
    for inside in (run, run / "average", step, tmp_path / "linked"):
        assert find_run(inside) == run
    for outside in (tmp_path / "alone", tmp_path, tmp_path / "nowhere", step / "x"):
        assert find_run(outside) is None
    monkeypatch.chdir(run)
    assert find_run(Path("average")) == run and find_run(Path(".")) == run
