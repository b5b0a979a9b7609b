"""Means and intervals over seeds, and what the table says of runs that are missing."""

import csv
import io
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nmt.config import format_config
from nmt.extras.sweep.grid import Sweep, read_grid
from nmt.extras.sweep.jobs import RunQueue
from nmt.extras.sweep.result import RunResult, SetScore, write_result
from nmt.extras.sweep.table import (
    compute_mean,
    format_markdown,
    format_mean,
    format_text,
    make_rows,
    make_table,
    read_bleu,
)
from nmt.system.errors import UserError
from nmt.system.files import digest_file, write_folder, write_text
from nmt.system.progress import say_once
from nmt.system.run_folder import MODEL_FILE

GRID = """
base: demo.yaml
seeds: [1, 2, 3]
runs: {base: {}, "deep | wide": {model.n_layers: 4, model.d_ff: 900}}
"""


def make_result(bleu: float, vocab: str = "v") -> RunResult:
    score = SetScore("dev", bleu, "signature")
    return RunResult(None, "w", vocab, 1_500_000, 600, 2.0, 2.0, [score])


@pytest.fixture(name="sweep")
def make_sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "grid.yaml").write_text(GRID)
    sweep = read_grid(str(tmp_path / "grid.yaml"), tmp_path / "out")
    for run, bleu in zip(sweep.runs, (30.0, 31.0, 32.0, 31.0, 33.0), strict=False):
        run.folder.path.mkdir(parents=True)
        write_text(run.folder.config, format_config(run.config))
        write_result(run, make_result(bleu))
    return sweep


def test_an_interval_is_that_of_students_t() -> None:
    mean = compute_mean([1.0, 2.0, 3.0])
    assert mean is not None and mean.plus_minus is not None
    assert mean.value == 2.0
    assert mean.plus_minus == pytest.approx(4.302653 / 3**0.5)  # any table of t, 2 degrees
    assert format_mean(mean, 2) == "2.00 ± 2.48"
    assert format_mean(compute_mean([5.0]), 1) == "5.0"
    assert compute_mean([]) is None


def test_runs_of_different_precisions_are_named(sweep: Sweep) -> None:
    assert "different precisions" not in format_text(sweep, make_rows(sweep, {}))
    config = sweep.runs[3].folder.config
    config.write_text(config.read_text().replace("precision: fp32", "precision: bf16", 1))
    text = format_text(sweep, make_rows(sweep, {}))
    assert "different precisions (base: fp32; deep | wide: bf16, fp32)" in text


def test_rows_have_means_differences_and_what_is_missing(sweep: Sweep) -> None:
    rows = make_rows(sweep, {"deep-wide-seed3": "boom (exit code 1)"})
    assert rows[0].settings == ""
    assert rows[1].settings == "model.d_ff=900 model.n_layers=4"
    read = partial(read_bleu, "dev")
    score, difference = rows[1].average(read), rows[1].difference(rows[0], read)
    assert score is not None and score.value == 32.0
    assert difference is not None and difference.value == 1.5  # of seeds 1 and 2: 1 and 2
    text = format_text(sweep, rows)
    assert "2/3" in text and "deep | wide, seed 3: boom (exit code 1)" in text
    assert "30.00" not in text and "31.00 ± 2.48" in text and "+1.50 ± 6.35" in text
    assert "not compare" not in text


def test_markdown_and_csv_have_the_same_rows(sweep: Sweep) -> None:
    rows = make_rows(sweep, {})
    assert "| deep \\| wide | model.d_ff=900 model.n_layers=4 | 2/3 | 1.50M | 600 |" in (
        format_markdown(sweep, rows)
    )
    first, second = csv.DictReader(io.StringIO(make_table(sweep, rows).to_csv()))
    assert (first["run"], first["dev BLEU"], first["dev NLL"]) == (
        "base",
        "31.00 ± 2.48",
        "2.0000 ± 0.0000",
    )
    assert second["seeds"] == "2/3"
    assert (first["difference"], second["difference"]) == ("", "+1.50 ± 6.35")


def test_other_vocabularies_are_mentioned(sweep: Sweep) -> None:
    write_result(sweep.runs[0], make_result(30.0, "another"))
    assert "do not compare" in format_text(sweep, make_rows(sweep, {}))


def test_results_of_another_average_do_not_count(sweep: Sweep) -> None:
    other = Sweep(sweep.folder, 5, sweep.score, sweep.runs)
    assert [len(row.finished) for row in make_rows(other, {})] == [0, 0]
    assert "not finished" in format_text(other, make_rows(other, {}))


def test_exchanged_weights_are_scored_again(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def count_finished() -> int:
        say_once.cache_clear()
        return len(make_rows(sweep, {})[0].finished)

    assert count_finished() == 3
    weights = sweep.runs[1].folder.checkpoint(600)
    write_folder(weights, lambda folder: write_text(folder / MODEL_FILE, "as scored"))
    digest = digest_file(weights / MODEL_FILE)
    write_result(sweep.runs[1], replace(make_result(31.0), weights_sha256=digest))
    assert count_finished() == 3
    write_folder(weights, lambda folder: write_text(folder / MODEL_FILE, "others"))
    assert count_finished() == 2
    assert "are not the weights that were scored" in capsys.readouterr().err


def test_names_of_strangers_only_appear(sweep: Sweep) -> None:
    result = make_result(30.0)
    score = replace(result.scores[0], signature="<script>\x1b[31m\n# x")
    write_result(sweep.runs[0], replace(result, scores=[score]))
    for show in (format_text, format_markdown):
        text = show(sweep, make_rows(sweep, {}))
        assert "\x1b" not in text and "\n# x" not in text
    assert r"\<script>" in text


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_is_not_written_through_a_link(sweep: Sweep, kind: str, tmp_path: Path) -> None:
    log, theirs = sweep.log_path(sweep.runs[0]), tmp_path / "theirs"
    log.parent.mkdir()
    theirs.write_text("precious")
    log.symlink_to(theirs) if kind == "link" else os.mkfifo(log)
    with pytest.raises(UserError, match=str(log)):
        RunQueue(sweep, sweep.runs, 1).start(sweep.runs[0])
    assert theirs.read_text() == "precious"
