"""The table of a sweep: a row for each name in the grid, with means over its seeds.

± is the half-width of the 95 % confidence interval of the mean (Student's t), as in nmt-eval: the
mean over very many seeds is expected to be inside it. Differences from the first row are taken seed
by seed. All numbers are read from RUN/sweep.json, so the table can be made at any time. The screen,
table.md and table.csv have the same cells.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from nmt.config import load_recorded_config, tabulate_differences
from nmt.extras.sweep.grid import PlannedRun, Sweep, format_setting_value
from nmt.extras.sweep.result import RunResult, read_result
from nmt.score.score import compute_perplexity
from nmt.score.significance import student_t
from nmt.system.escapes import escape_line, escape_markdown
from nmt.system.files import write_text
from nmt.system.tables import Table

ReadFigure = Callable[[RunResult], float | None]
NOT_SETTINGS = ("name", "out", "seed", "data.store", "data.workers")


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and its uncertainty, which is unknown for a single seed."""

    value: float
    plus_minus: float | None = None  # half-width of the 95 % confidence interval


@dataclass(frozen=True)
class Row:
    name: str
    settings: str  # in which it differs from the first row
    n_seeds: int
    finished: list[tuple[PlannedRun, RunResult]]
    problems: list[str]  # why the other seeds have no result

    def list_values(self, read: ReadFigure) -> dict[int, float]:
        """Return a figure of the finished seeds, where it is known."""
        found = {run.config.seed: read(result) for run, result in self.finished}
        return {seed: value for seed, value in found.items() if value is not None}

    def average(self, read: ReadFigure) -> Mean | None:
        return compute_mean(list(self.list_values(read).values()))

    def difference(self, first: "Row", read: ReadFigure) -> Mean | None:
        """Return how much a figure differs from the first row's, over the seeds that both have; None
        for the first row itself.
        """
        if self is first:
            return None
        ours, theirs = self.list_values(read), first.list_values(read)
        return compute_mean([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def compute_mean(values: Sequence[float]) -> Mean | None:
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Mean(mean)
    deviation = statistics.stdev(values)
    return Mean(mean, student_t(len(values) - 1) * deviation / math.sqrt(len(values)))


def make_rows(sweep: Sweep, failures: dict[str, str]) -> list[Row]:
    """Read the results of all finished runs."""
    by_name: dict[str, list[PlannedRun]] = {}
    for run in sweep.runs:
        by_name.setdefault(run.name, []).append(run)
    settings = describe_settings([runs[0] for runs in by_name.values()])
    rows = []
    for (name, runs), text in zip(by_name.items(), settings, strict=True):
        row = Row(name, text, len(runs), finished=[], problems=[])
        for run in runs:
            result = read_result(sweep, run)
            if result is not None:
                row.finished.append((run, result))
            else:
                problem = failures.get(run.label, "not finished")
                row.problems.append(f"seed {run.config.seed}: {problem}")
        rows.append(row)
    return rows


def describe_settings(runs: Sequence[PlannedRun]) -> list[str]:
    """Say for each run in which settings it differs from the first."""
    table = tabulate_differences([run.config for run in runs], NOT_SETTINGS)
    texts = []
    for i in range(len(runs)):
        words = []
        for key, values in table.items():
            if values[i] != values[0]:
                words.append(f"{key}={format_setting_value(values[i])}")
        texts.append(" ".join(words))
    return texts


# ---- as text -------------------------------------------------------------------------------------


def make_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    head = ["run", "settings", "seeds", "parameters", "updates", "minutes", "dev NLL", "ppl"]
    for name in sweep.score:
        head += [f"{name} BLEU", "difference"]
    lines = []
    for row in rows:
        parameters = row.average(attrgetter("parameters"))
        nll = row.average(attrgetter("nll"))
        line = [
            row.name,
            row.settings,
            f"{len(row.finished)}/{row.n_seeds}" if row.problems else f"{row.n_seeds}",
            "" if parameters is None else f"{parameters.value / 1e6:.2f}M",
            format_mean(row.average(attrgetter("updates")), 0, has_interval=False),
            format_mean(row.average(attrgetter("minutes")), 1, has_interval=False),
            format_mean(nll, 4),
            "" if nll is None else f"{compute_perplexity(nll.value):.3f}",
        ]
        for name in sweep.score:
            read = partial(read_bleu, name)
            line.append(format_mean(row.average(read), 2))
            line.append(format_mean(row.difference(rows[0], read), 2, "+"))
        lines.append(line)
    return Table(head, lines)


def read_bleu(name: str, result: RunResult) -> float | None:
    return next((score.bleu for score in result.scores if score.set == name), None)


def format_mean(mean: Mean | None, digits: int, sign: str = "", has_interval: bool = True) -> str:
    if mean is None:
        return ""
    text = f"{mean.value:{sign},.{digits}f}"
    if has_interval and mean.plus_minus is not None:
        text += f" ± {mean.plus_minus:.{digits}f}"
    return text


def list_notes(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Say how the numbers were made, and what is missing."""
    weights = "the last checkpoint"
    if sweep.average is not None:
        weights = f"the mean of the last {sweep.average} planned checkpoints"
    notes = [f"scored: {weights}; NLL and perplexity are per piece, without label smoothing"]

    finished = [pair for row in rows for pair in row.finished]
    results = [result for _, result in finished]
    if len({result.vocab_sha256 for result in results}) > 1:
        notes.append("the runs have different vocabularies, so their NLL and ppl do not compare")
    precisions = {row.name: list_precisions(row) for row in rows}
    if len(set().union(*precisions.values())) > 1:
        by_row = "; ".join(f"{name}: {', '.join(used)}" for name, used in precisions.items())
        notes.append(
            f"the runs were trained in different precisions ({by_row}); set training.precision"
        )
    if any(len(row.finished) > 1 for row in rows):
        notes.append(
            "±: 95 % interval of the mean over seeds (Student's t); differences seed by seed"
        )
    signatures = {(score.set, score.signature) for result in results for score in result.scores}
    for name, signature in sorted(signatures):
        if name in sweep.score:
            notes.append(f"{name} BLEU: {signature}")
    notes += [f"{row.name}, {problem}" for row in rows for problem in row.problems]
    return notes


def list_precisions(row: Row) -> list[str]:
    """Return the precisions in which the finished runs trained."""
    configs = [load_recorded_config(run.folder.config) for run, _ in row.finished]
    return sorted({config.training.precision for config in configs})


def format_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    notes = map(escape_line, list_notes(sweep, rows))
    return "\n".join([make_table(sweep, rows).to_text(), "", *notes])


def format_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    notes = [f"- {escape_markdown(note)}" for note in list_notes(sweep, rows)]
    return "\n".join([make_table(sweep, rows).to_markdown(), "", *notes, ""])


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    write_text(sweep.folder / "table.md", format_markdown(sweep, rows))
    write_text(sweep.folder / "table.csv", make_table(sweep, rows).to_csv())
