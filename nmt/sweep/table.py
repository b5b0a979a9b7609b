"""The table of a sweep: a row for each name in the grid, with means over its seeds.

An interval is the mean plus or minus the half-width of the 95 % interval of the mean by Student's t,
as nmt-eval gives it: where the mean of ever more seeds would lie. Differences from the first row are
taken seed by seed. The figures are those of RUN/sweep.json, so the table can be made at any time.
"""

import csv
import io
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import tabulate_differences
from nmt.report.facts import read_machine
from nmt.score.significance import student_t
from nmt.sweep.figures import RunFigures, read_figures
from nmt.sweep.grid import PlannedRun, ScoredSet, Sweep, format_setting_value
from nmt.system.files import write_text

TABLE_FILES = ("table.md", "table.csv")
NOT_SETTINGS = ("name", "out", "seed", "data.store", "data.workers")


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and the half-width of its 95 % interval; None for a single seed."""

    value: float
    plus_minus: float | None
    deviation: float | None  # of the seeds, over n - 1

    def format(self, digits: int, sign: str = "") -> str:
        text = f"{self.value:{sign}.{digits}f}"
        return text if self.plus_minus is None else f"{text} ± {self.plus_minus:.{digits}f}"


@dataclass(frozen=True)
class Row:
    name: str
    settings: str  # in which it differs from the first row
    figures: dict[int, RunFigures]  # by seed, of finished runs
    n_seeds: int  # also of the others
    problems: tuple[str, ...]  # what became of the others

    def average(self, read: Callable[[RunFigures], float | None]) -> Mean | None:
        return compute_mean([read(one) for one in self.figures.values()])

    def score(self, name: ScoredSet) -> Mean | None:
        return self.average(lambda one: get_bleu(one, name))

    def calibration_error(self, name: ScoredSet) -> Mean | None:
        return self.average(lambda one: get_calibration_error(one, name))

    def difference(self, first: "Row", name: ScoredSet) -> Mean | None:
        """The difference in BLEU from the first row, over the seeds that both have."""
        differences = []
        for seed, one in self.figures.items():
            other = first.figures.get(seed)
            own = get_bleu(one, name)
            others = None if other is None else get_bleu(other, name)
            if own is not None and others is not None:
                differences.append(own - others)
        return compute_mean(differences)


def get_bleu(figures: RunFigures, name: ScoredSet) -> float | None:
    score = figures.get_score(name)
    return None if score is None else score.bleu


def get_calibration_error(figures: RunFigures, name: ScoredSet) -> float | None:
    score = figures.get_score(name)
    return None if score is None else score.calibration_error


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
    """Read the figures of all finished runs."""
    by_name: dict[str, list[PlannedRun]] = {}
    for run in sweep.runs:
        by_name.setdefault(run.name, []).append(run)
    settings = describe_settings([runs[0] for runs in by_name.values()])
    rows = []
    for (name, runs), text in zip(by_name.items(), settings, strict=True):
        figures = {}
        problems = []
        for run in runs:
            found = read_figures(sweep, run)
            if found is not None:
                figures[run.config.seed] = found
            elif run.label in failures:
                problems.append(f"seed {run.config.seed}: {failures[run.label]}")
            else:
                problems.append(f"seed {run.config.seed}: not finished")
        rows.append(Row(name, text, figures, len(runs), tuple(problems)))
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
                words.append(f"{key}={format_setting_value(hide_places(values[i]))}")
        texts.append(" ".join(words))
    return texts


def hide_places(values: Any) -> Any:
    """Replace each absolute path in a tree of plain values by its last name."""
    if isinstance(values, dict):
        return {key: hide_places(value) for key, value in values.items()}
    if isinstance(values, list):
        return [hide_places(value) for value in values]
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
        nll = row.average(lambda one: one.nll)
        line = [
            row.name,
            row.settings,
            f"{len(row.figures)}/{row.n_seeds}" if row.problems else str(row.n_seeds),
            format_mean(row.average(lambda one: one.parameters / 1e6), "{:.2f}M"),
            format_mean(row.average(lambda one: one.updates), "{:,.0f}"),
            format_mean(row.average(lambda one: one.minutes), "{:.1f}"),
            "" if nll is None else nll.format(4),
            "" if nll is None else f"{math.exp(min(nll.value, 50.0)):.3f}",
        ]
        for name in sweep.score:
            bleu, difference = row.score(name), row.difference(rows[0], name)
            line.append("" if bleu is None else bleu.format(2))
            is_first = row is rows[0]
            line.append("" if difference is None or is_first else difference.format(2, "+"))
            error = row.calibration_error(name)
            line.append("" if error is None else f"{error.format(2)} %")
        cells.append(line)
    return cells


def format_mean(mean: Mean | None, style: str) -> str:
    return "" if mean is None else style.format(mean.value)


def list_notes(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Say how the figures were counted, and what is missing."""
    notes = []
    all_figures = [one for row in rows for one in row.figures.values()]
    weights = "the last checkpoint"
    if sweep.average is not None:
        weights = f"the mean of the last {sweep.average} planned checkpoints"
    notes.append(f"scored: {weights}; NLL and perplexity are per piece, without label smoothing")
    notes.append(
        "ECE: expected calibration error of the pieces of the reference (nmt-eval --calibration)"
    )
    if len({one.vocab_sha256 for one in all_figures}) > 1:
        notes.append("the runs have different vocabularies, so their NLL and ppl do not compare")
    if any(len(row.figures) > 1 for row in rows):
        notes.append(
            "±: 95 % interval of the mean over seeds (Student's t); differences seed by seed"
        )
    for name in sweep.score:
        signatures = {s.signature for one in all_figures if (s := one.get_score(name))}
        for signature in sorted(signatures):
            notes.append(f"{name} BLEU: {signature}")
    finished = [run for run in sweep.runs if read_figures(sweep, run) is not None]
    machines = {read_machine(run.folder) for run in finished} - {""}
    if machines:
        notes.append(f"minutes: on {', '.join(sorted(machines))}")
    for row in rows:
        for problem in row.problems:
            notes.append(f"{row.name}, {problem}")
    return notes


def format_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    cells = list_cells(sweep, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, "", *list_notes(sweep, rows)])


def format_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    head, *lines = list_cells(sweep, rows)
    table = [head, ["---"] * len(head), *lines]
    text = []
    for line in table:
        escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in line]
        text.append(f"| {' | '.join(escaped)} |")
    notes = [f"- {note}" for note in list_notes(sweep, rows)]
    return "\n".join([*text, "", *notes]) + "\n"


def format_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the table for programs: all digits, and an empty cell for what is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["run", "settings", "seeds", "finished", "parameters", "updates", "minutes"]
    kinds = ("", "_plus_minus", "_deviation")
    head += [f"dev_nll{kind}" for kind in kinds]
    for name in sweep.score:
        head += [f"{name}_bleu{kind}" for kind in kinds]
        head += [f"{name}_difference{kind}" for kind in kinds]
        head += [f"{name}_ece{kind}" for kind in kinds]
    writer.writerow(head)
    for row in rows:
        line: list[Any] = [row.name, row.settings, row.n_seeds, len(row.figures)]
        for read in (lambda one: one.parameters, lambda one: one.updates, lambda one: one.minutes):
            mean = row.average(read)
            line.append(None if mean is None else mean.value)
        means = [row.average(lambda one: one.nll)]
        for name in sweep.score:
            means += [row.score(name), row.difference(rows[0], name), row.calibration_error(name)]
        for mean in means:
            line += [None] * 3 if mean is None else [mean.value, mean.plus_minus, mean.deviation]
        writer.writerow(line)
    return text.getvalue()


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    for name, text in zip(TABLE_FILES, (format_markdown, format_csv), strict=True):
        write_text(sweep.folder / name, text(sweep, rows))
