"""Means and intervals over seeds, and what the table says of runs that are missing."""

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

from pytest import fixture, mark, raises

from nmt.config_files import format_config
from nmt.extras.sweep.grid import Sweep, read_grid
from nmt.extras.sweep.jobs import RunQueue
from nmt.extras.sweep.result import RunResult, SetScore, write_result
from nmt.extras.sweep.table import (
    format_estimate,
    format_markdown,
    format_text,
    make_rows,
    make_table,
)
from nmt.system.errors import UserError
from nmt.system.files import write_text

GRID = """
base: demo.yaml
seeds: [1, 2, 3]
runs: {base: {}, "deep | wide": {model.n_layers: 4, model.d_ff: 900}}
"""


def make_result(bleu: float) -> RunResult:
    score = SetScore(bleu, "signature")
    return RunResult(None, 1_500_000, 600, 2.0, 2.0, {"dev": score})


@fixture(name="sweep")
def make_sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "grid.yaml").write_text(GRID)
    sweep = read_grid(str(tmp_path / "grid.yaml"), tmp_path / "out")
    for run, bleu in zip(sweep.runs, (30.0, 31.0, 32.0, 31.0, 33.0), strict=False):
        run.folder.path.mkdir(parents=True)
        write_text(run.folder.config, format_config(run.config))
        write_result(run, make_result(bleu))
    return sweep


def test_an_interval_is_that_of_students_t() -> None:
    # any table of t, 2 degrees: 4.302653 / 3 ** 0.5
    assert format_estimate([1.0, 2.0, 3.0], ".6f") == "2.000000 ± 2.484138"
    assert format_estimate([1.0, 2.0, 3.0], "+.2f") == "+2.00 ± 2.48"
    assert format_estimate([5.0], ".1f") == "5.0"
    assert format_estimate([], ".1f") == ""


def test_rows_have_means_differences_and_what_is_missing(sweep: Sweep) -> None:
    rows = make_rows(sweep, {"deep-wide-seed3": "boom (exit code 1)"})
    assert rows[0].settings == ""
    assert rows[1].settings == "model.d_ff=900 model.n_layers=4"
    assert {seed: score.bleu for seed, score in rows[1].list_scores("dev").items()} == {
        1: 31.0,
        2: 33.0,
    }
    text = format_text(sweep, rows)
    assert "deep | wide, seed 3: boom (exit code 1)" in text
    assert (
        "30.00" not in text and "31.00 ± 2.48" in text and "+1.50 ± 6.35" in text
    )  # of seeds 1 and 2: 1 and 2


def test_there_is_no_difference_between_scores_of_different_sets(sweep: Sweep) -> None:
    other = replace(make_result(31.0), scores={"dev": SetScore(31.0, "another signature")})
    for run in sweep.runs[3:5]:
        write_result(run, other)
    _, second = csv.DictReader(io.StringIO(make_table(sweep, make_rows(sweep, {})).to_csv()))
    assert (second["dev BLEU"], second["difference"]) == ("31.00 ± 0.00", "")


def test_markdown_and_csv_have_the_same_rows(sweep: Sweep) -> None:
    write_result(sweep.runs[3], replace(make_result(31.0), nll=60.0))  # it blew up
    rows = make_rows(sweep, {})
    assert "| deep \\| wide | model.d_ff=900 model.n_layers=4 | 2 | 1.50M | 600 |" in (
        format_markdown(sweep, rows)
    )
    first, second = csv.DictReader(io.StringIO(make_table(sweep, rows).to_csv()))
    assert (first["run"], first["dev BLEU"], first["dev NLL"]) == (
        "base",
        "31.00 ± 2.48",
        "2.0000 ± 0.0000",
    )
    assert (first["ppl"], second["ppl"], second["seeds"]) == ("7.389", "inf", "2")
    assert (first["difference"], second["difference"]) == ("", "+1.50 ± 6.35")


def test_results_of_another_average_do_not_count(sweep: Sweep) -> None:
    other = Sweep(sweep.folder, 5, sweep.score, sweep.runs)
    assert [len(row.results) for row in make_rows(other, {})] == [0, 0]
    assert "not finished" in format_text(other, make_rows(other, {}))


def test_names_of_strangers_only_appear(sweep: Sweep) -> None:
    result = make_result(30.0)
    score = replace(result.scores["dev"], signature="<script>\x1b[31m\n# x")
    write_result(sweep.runs[0], replace(result, scores={"dev": score}))
    for show in (format_text, format_markdown):
        text = show(sweep, make_rows(sweep, {}))
        assert "\x1b" not in text and "\n# x" not in text
    assert r"\<script>" in text


@mark.parametrize("kind", ["link", "pipe"])
def test_a_log_is_not_written_through_a_link(sweep: Sweep, kind: str, tmp_path: Path) -> None:
    log, theirs = sweep.log_path(sweep.runs[0]), tmp_path / "theirs"
    log.parent.mkdir()
    theirs.write_text("precious")
    log.symlink_to(theirs) if kind == "link" else os.mkfifo(log)
    with raises(UserError, match=str(log)):
        RunQueue(sweep, sweep.runs, 1).start(sweep.runs[0])
    assert theirs.read_text() == "precious"
