"""The table of a sweep: a row for each name in the grid, with means over its seeds.

± is the half-width of the 95 % confidence interval of the mean (Student's t), as in nmt-eval: the
mean over very many seeds is expected to be inside it. Differences from the first row are taken seed
by seed. All numbers are read from RUN/sweep.json, so the table can be made at any time. The screen,
table.md and table.csv have the same cells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nmt.config_files import format_setting, tabulate_differences
from nmt.extras.sweep.grid import PlannedRun, Sweep
from nmt.extras.sweep.result import RunResult, SetScore, read_result
from nmt.score.score import LARGEST_NLL, compute_perplexity
from nmt.score.significance import find_half_width
from nmt.system.escapes import escape_line, escape_markdown
from nmt.system.files import write_text
from nmt.system.tables import Cell, Table

NOT_SETTINGS = ("name", "out", "seed", "data.store", "data.workers")


@dataclass(frozen=True)
class Row:
    name: str
    settings: str  # in which it differs from the first row
    results: dict[int, RunResult]  # of the finished runs, by seed
    problems: list[str]  # why the other seeds have no result

    def list_scores(self, name: str) -> dict[int, SetScore]:
        """Return the score of each seed on the dev or the test set."""
        return {seed: result.scores[name] for seed, result in self.results.items()}


def make_rows(sweep: Sweep, failures: dict[str, str]) -> list[Row]:
    """Read the results of all finished runs."""
    rows: dict[str, Row] = {}
    for run in sweep.runs:
        if run.name not in rows:
            rows[run.name] = Row(run.name, describe_settings(sweep.runs[0], run), {}, [])
        row, seed = rows[run.name], run.config.seed
        result = read_result(sweep, run)
        if result is not None:
            row.results[seed] = result
        else:
            row.problems.append(f"seed {seed}: {failures.get(run.label, 'not finished')}")
    return list(rows.values())


def describe_settings(first: PlannedRun, run: PlannedRun) -> str:
    """Say in which settings a run differs from the first."""
    table = tabulate_differences([first.config, run.config], NOT_SETTINGS)
    return " ".join(f"{key}={format_setting(own)}" for key, (_, own) in table.items())


# ---- as text -------------------------------------------------------------------------------------


def make_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    head = ["run", "settings", "seeds", "parameters", "updates", "minutes", "dev NLL", "ppl"]
    for name in sweep.score:
        head += [f"{name} BLEU", "difference"]
    return Table(head, [make_cells(row, rows[0], sweep) for row in rows])


def make_cells(row: Row, first: Row, sweep: Sweep) -> list[Cell]:
    results = row.results.values()
    nlls = [result.nll for result in results if result.nll is not None]
    perplexities = [compute_perplexity(nll) if nll < LARGEST_NLL else math.inf for nll in nlls]
    cells: list[Cell] = [
        row.name,
        row.settings,
        len(results),
        format_mean([result.parameters / 1e6 for result in results], ".2f", "M"),
        format_mean([result.updates for result in results], ",.0f"),
        format_mean([result.minutes for result in results], ".1f"),
        format_estimate(nlls, ".4f"),
        format_mean(perplexities, ".3f"),
    ]
    for name in sweep.score:
        scores, of_first = row.list_scores(name), first.list_scores(name)
        differences = []
        for seed, score in scores.items():
            # scores of different signatures are different scales
            if seed in of_first and score.signature == of_first[seed].signature:
                differences.append(score.bleu - of_first[seed].bleu)
        cells.append(format_estimate([score.bleu for score in scores.values()], ".2f"))
        cells.append("" if row is first else format_estimate(differences, "+.2f"))
    return cells


def format_mean(values: Sequence[float], style: str, unit: str = "") -> str:
    return f"{fmean(values):{style}}{unit}" if values else ""


def format_estimate(values: Sequence[float], style: str) -> str:
    """Return the mean, and the half-width of its interval, which is unknown for a single seed."""
    text = format_mean(values, style)
    if len(values) > 1:
        text += f" ± {find_half_width(values):{style.lstrip('+')}}"
    return text


def list_notes(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Say how the numbers were made, and what is missing."""
    weights = "the last checkpoint"
    if sweep.average is not None:
        weights = f"the mean of the last {sweep.average} planned checkpoints"
    notes = [
        f"scored: {weights}; NLL and perplexity are per piece, without label smoothing, and compare "
        "only between runs of the same vocabulary",
        "±: 95 % interval of the mean over seeds (Student's t); differences seed by seed",
    ]
    for name in sweep.score:
        signatures = {
            result.scores[name].signature for row in rows for result in row.results.values()
        }
        notes += [f"{name} BLEU: {signature}" for signature in sorted(signatures)]
    notes += [f"{row.name}, {problem}" for row in rows for problem in row.problems]
    return notes


def format_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    notes = map(escape_line, list_notes(sweep, rows))
    return "\n".join([*make_table(sweep, rows).to_lines(), "", *notes])


def format_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    notes = [f"- {escape_markdown(note)}" for note in list_notes(sweep, rows)]
    return "\n".join([make_table(sweep, rows).to_markdown(), "", *notes, ""])


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    write_text(sweep.folder / "table.md", format_markdown(sweep, rows))
    write_text(sweep.folder / "table.csv", make_table(sweep, rows).to_csv())
