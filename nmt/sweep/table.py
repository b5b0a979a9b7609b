"""The table of a sweep: a row for each name in the grid, with means over its seeds.

± is the half-width of the 95 % confidence interval of the mean (Student's t), as in nmt-eval: the
mean over very many seeds is expected to lie inside it. Differences from the first row are taken seed
by seed. All numbers are read from RUN/sweep.json, so the table can be made at any time.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import load_recorded_config, tabulate_differences
from nmt.report.facts import read_machine
from nmt.score.significance import student_t
from nmt.sweep.grid import PlannedRun, Sweep, format_setting_value
from nmt.sweep.result import RunResult, read_result
from nmt.system.files import write_text
from nmt.system.tables import Cell, Table

TABLE_FILES = ("table.md", "table.csv")
# The figures that every row has, whatever it was scored on.
COMMON_FIGURES = ("parameters", "updates", "minutes", "dev_nll")
NOT_SETTINGS = ("name", "out", "seed", "data.store", "data.workers")


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and how sure it is, which a single seed does not tell."""

    value: float
    plus_minus: float | None  # half-width of the 95 % confidence interval
    deviation: float | None  # sample standard deviation


@dataclass(frozen=True)
class Row:
    name: str
    settings: str  # in which it differs from the first row
    results: dict[int, RunResult]  # by seed, of finished runs
    n_seeds: int  # also of the others
    problems: tuple[str, ...]  # what became of the others
    machines: frozenset[str]  # on which finished runs trained
    precisions: frozenset[str]  # in which they trained

    def average(self, figure: str) -> Mean | None:
        """Return the mean of a figure (`list_figures`) over the finished seeds."""
        return compute_mean([list_figures(result).get(figure) for result in self.results.values()])

    def difference(self, first: "Row", figure: str) -> Mean | None:
        """Return how much a figure differs from the first row's, over the seeds that both have; None
        for the first row itself.
        """
        if self is first:
            return None
        differences = []
        for seed in sorted(self.results.keys() & first.results.keys()):
            value = list_figures(self.results[seed]).get(figure)
            first_value = list_figures(first.results[seed]).get(figure)
            if value is not None and first_value is not None:
                differences.append(value - first_value)
        return compute_mean(differences)


def list_figures(result: RunResult) -> dict[str, float | None]:
    """Name the figures of a run as the columns of table.csv."""
    figures: dict[str, float | None] = {
        "parameters": result.parameters,
        "updates": result.updates,
        "minutes": result.minutes,
        "dev_nll": result.nll,
    }
    for score in result.scores:
        figures[f"{score.set}_bleu"] = score.bleu
        figures[f"{score.set}_ece"] = score.calibration_error
    return figures


def compute_mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Mean(mean, None, None)
    deviation = statistics.stdev(known)
    return Mean(mean, student_t(len(known) - 1) * deviation / math.sqrt(len(known)), deviation)


def make_rows(sweep: Sweep, failures: dict[str, str]) -> list[Row]:
    """Read the results of all finished runs."""
    by_name: dict[str, list[PlannedRun]] = {}
    for run in sweep.runs:
        by_name.setdefault(run.name, []).append(run)
    settings = describe_settings([runs[0] for runs in by_name.values()])
    rows = []
    for (name, runs), text in zip(by_name.items(), settings, strict=True):
        results = {}
        problems = []
        machines = set()
        precisions = set()
        for run in runs:
            result = read_result(sweep, run)
            if result is not None:
                results[run.config.seed] = result
                machines.add(read_machine(run.folder))
                precisions.add(load_recorded_config(run.folder.config).training.precision)
            elif run.label in failures:
                problems.append(f"seed {run.config.seed}: {failures[run.label]}")
            else:
                problems.append(f"seed {run.config.seed}: not finished")
        rows.append(
            Row(
                name,
                text,
                results,
                n_seeds=len(runs),
                problems=tuple(problems),
                machines=frozenset(machines),
                precisions=frozenset(precisions),
            )
        )
    return rows


def describe_settings(runs: Sequence[PlannedRun]) -> list[str]:
    """Say for each run in which settings it differs from the first."""
    configs = [run.config for run in runs]
    table = tabulate_differences(configs, NOT_SETTINGS)
    texts = []
    for i in range(len(runs)):
        words = []
        for key, values in table.items():
            if values[i] != values[0]:
                words.append(f"{key}={format_setting_value(shorten_path_values(values[i]))}")
        texts.append(" ".join(words))
    return texts


def shorten_path_values(values: Any) -> Any:
    """Replace each string in a tree of plain values that is an absolute path by its last name."""
    if isinstance(values, dict):
        return {key: shorten_path_values(value) for key, value in values.items()}
    if isinstance(values, list):
        return [shorten_path_values(value) for value in values]
    if isinstance(values, str) and Path(values).is_absolute():
        return Path(values).name
    return values


# ---- as text -------------------------------------------------------------------------------------


def list_cells(sweep: Sweep, rows: Sequence[Row]) -> list[list[str]]:
    """Return the table for people: its head, and a line of cells for each row."""
    head = ["run", "settings", "seeds", "parameters", "updates", "minutes", "dev NLL", "ppl"]
    for name in sweep.score:
        head += [f"{name} BLEU", "difference", f"{name} ECE"]
    cells = [head]
    for row in rows:
        parameters, updates, minutes, nll = map(row.average, COMMON_FIGURES)
        n_seeds = f"{len(row.results)}/{row.n_seeds}" if row.problems else f"{row.n_seeds}"
        line = [
            row.name,
            row.settings,
            n_seeds,
            "" if parameters is None else f"{parameters.value / 1e6:.2f}M",
            "" if updates is None else f"{updates.value:,.0f}",
            "" if minutes is None else f"{minutes.value:,.1f}",
            format_mean(nll, 4),
            "" if nll is None else f"{math.exp(min(nll.value, 50.0)):.3f}",
        ]
        for name in sweep.score:
            line.append(format_mean(row.average(f"{name}_bleu"), 2))
            line.append(format_mean(row.difference(rows[0], f"{name}_bleu"), 2, "+"))
            line.append(format_mean(row.average(f"{name}_ece"), 2, unit=" %"))
        cells.append(line)
    return cells


def format_mean(mean: Mean | None, digits: int, sign: str = "", unit: str = "") -> str:
    if mean is None:
        return ""
    text = f"{mean.value:{sign}.{digits}f}"
    if mean.plus_minus is not None:
        text += f" ± {mean.plus_minus:.{digits}f}"
    return text + unit


def list_notes(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Say how the numbers were made, and what is missing."""
    weights = "the last checkpoint"
    if sweep.average is not None:
        weights = f"the mean of the last {sweep.average} planned checkpoints"
    notes = [
        f"scored: {weights}; NLL and perplexity are per piece, without label smoothing",
        "ECE: expected calibration error of the pieces of the reference (nmt-eval --calibration)",
    ]

    vocabs: set[str] = set()
    machines: set[str] = set()
    precisions: set[str] = set()
    signatures: set[tuple[str, str]] = set()  # of a set's BLEU
    has_intervals = False
    for row in rows:
        has_intervals |= len(row.results) > 1
        machines |= row.machines
        precisions |= row.precisions
        for result in row.results.values():
            vocabs.add(result.vocab_sha256)
            for score in result.scores:
                if score.set in sweep.score:
                    signatures.add((score.set, score.signature))
    if len(vocabs) > 1:
        notes.append("the runs have different vocabularies, so their NLL and ppl do not compare")
    if len(precisions) > 1:
        chosen = "; ".join(f"{row.name}: {', '.join(sorted(row.precisions))}" for row in rows)
        notes.append(
            f"the runs were trained in different precisions ({chosen}); set training.precision"
        )
    if has_intervals:
        notes.append(
            "±: 95 % interval of the mean over seeds (Student's t); differences seed by seed"
        )
    for name, signature in sorted(signatures):
        notes.append(f"{name} BLEU: {signature}")
    known_machines = sorted(machines - {""})
    if known_machines:
        notes.append(f"minutes: on {', '.join(known_machines)}")
    for row in rows:
        for problem in row.problems:
            notes.append(f"{row.name}, {problem}")
    return notes


def format_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    head, *lines = list_cells(sweep, rows)
    return "\n".join([Table(head, lines).to_text(), "", *list_notes(sweep, rows)])


def format_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    head, *lines = list_cells(sweep, rows)
    notes = [f"- {note}" for note in list_notes(sweep, rows)]
    return "\n".join([Table(head, lines).to_markdown(), "", *notes]) + "\n"


def format_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the table for programs: all digits, and an empty cell for what is not known."""
    head = ["run", "settings", "seeds", "finished", *COMMON_FIGURES]
    head += name_spread("dev_nll")
    for name in sweep.score:
        for figure in (f"{name}_bleu", f"{name}_difference", f"{name}_ece"):
            head += [figure, *name_spread(figure)]
    lines = []
    for row in rows:
        line: list[Cell] = [row.name, row.settings, row.n_seeds, len(row.results)]
        for figure in COMMON_FIGURES:
            line.append(list_numbers(row.average(figure))[0])
        line += list_numbers(row.average("dev_nll"))[1:]
        for name in sweep.score:
            line += list_numbers(row.average(f"{name}_bleu"))
            line += list_numbers(row.difference(rows[0], f"{name}_bleu"))
            line += list_numbers(row.average(f"{name}_ece"))
        lines.append(line)
    return Table(head, lines).to_csv()


def name_spread(figure: str) -> list[str]:
    return [f"{figure}_plus_minus", f"{figure}_deviation"]


def list_numbers(mean: Mean | None) -> list[float | None]:
    """Return the value and its spread, as `name_spread` names it."""
    if mean is None:
        return [None, None, None]
    return [mean.value, mean.plus_minus, mean.deviation]


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    markdown, values = TABLE_FILES
    write_text(sweep.folder / markdown, format_markdown(sweep, rows))
    write_text(sweep.folder / values, format_csv(sweep, rows))
