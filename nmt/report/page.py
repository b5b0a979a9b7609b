"""Draws a run as one page: report.html has the curves of metrics.jsonl and the settings of
config.yaml.

The curves are plain SVG, and the page has no script and no link, so it opens anywhere, even from an
e-mail. It is well-formed XML. All readable lines of metrics.jsonl are shown: a line that a crash cut
off or a stranger wrote is counted and skipped, never a reason to fail.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import load_recorded_config
from nmt.data.vocab import load_vocab
from nmt.paper import find_dev_reference
from nmt.system.errors import UserError
from nmt.system.files import read_bytes, write_text
from nmt.system.progress import format_duration
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import parse_yaml
from nmt.train.metrics_log import MetricsLine, read_metrics
from nmt.train.on_track import smoothed_loss_floor

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 28  # margins
MAX_DOTS = 60  # a longer curve is drawn without dots

Metrics = list[MetricsLine]

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d1d1b; --soft: #6b6a66; --line: #e3e2de;
        --a: #2a78d6; --b: #c2501f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #1a1a19; --ink: #ecebe7; --soft: #a09f9a; --line: #383835; --a: #5b9ff0; --b: #ee7d4d; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 760px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } .x { text-anchor: middle; } .y { text-anchor: end; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.a { stroke: var(--a); color: var(--a); } .b { stroke: var(--b); color: var(--b); } circle { fill: currentColor; }
.mark { stroke: var(--soft); stroke-dasharray: 5 4; }
p.note, td.name { color: var(--soft); } table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid var(--line); padding: .15rem .5rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Curve:
    name: str
    colour: str  # a class of STYLE
    points: list[tuple[int, float]]  # (update, value)


@dataclass(frozen=True)
class ReferenceLine:
    """A value that a chart's curves are compared with, drawn as a dashed line with its name."""

    name: str
    value: float


@dataclass(frozen=True)
class References:
    """The reference lines that apply to a run, by chart."""

    nll: tuple[ReferenceLine, ...] = ()
    smoothed_loss: tuple[ReferenceLine, ...] = ()
    bleu: tuple[ReferenceLine, ...] = ()


def write_report(run: Path) -> Path:
    """Write run/report.html and return its path."""
    folder = RunFolder(run)
    try:
        text = read_bytes(folder.config).decode()
        settings = parse_yaml(text, str(folder.config)).values
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{folder.config}: cannot be read ({reason}); give a run folder") from None
    metrics, n_damaged = read_metrics(folder.metrics)
    report = folder.report
    references = find_references(folder)
    write_text(report, render_page(settings, metrics, n_damaged, references))
    return report


def find_references(folder: RunFolder) -> References:
    """Return the lowest smoothed loss that is possible, and the paper's dev scores where this is the
    paper's model. A config or a vocabulary that cannot be read is a page without them.
    """
    try:
        config = load_recorded_config(folder.config)
        n_vocab = config.model.count_rows(load_vocab(folder.path).tgt.size)
    except UserError:
        return References()
    floor = smoothed_loss_floor(config.training.label_smoothing, n_vocab)
    smoothed_loss: tuple[ReferenceLine, ...] = ()
    if floor:  # else the loss is the NLL, which has a chart
        smoothed_loss = (ReferenceLine(f"no smoothed loss is below {floor:.3f}", floor),)
    paper = find_dev_reference(config)
    if paper is None:
        return References(smoothed_loss=smoothed_loss)
    where = f"the paper's {paper.model}, dev, update {paper.step:,}"
    perplexity = f"{where}: perplexity {paper.perplexity} of its own pieces"
    return References(
        nll=(ReferenceLine(perplexity, math.log(paper.perplexity)),),
        smoothed_loss=smoothed_loss,
        bleu=(ReferenceLine(f"{where}: tokenised BLEU {paper.bleu}", paper.bleu),),
    )


def render_page(
    settings: dict[str, Any], metrics: Metrics, n_damaged: int, references: References
) -> str:
    name = str(settings.get("name", "run"))
    losses = [
        Curve("training", "a", collect_points(metrics, "train", "nll")),
        Curve("dev", "b", collect_points(metrics, "valid", "nll")),
    ]
    smoothed = []
    if references.smoothed_loss:  # without its floor it says no more than the NLL
        smoothed = [Curve("training", "a", collect_points(metrics, "train", "loss"))]
    bleu = Curve("BLEU", "a", collect_points(metrics, "valid", "bleu"))
    speed = Curve("tokens/s", "a", collect_points(metrics, "train", "tgt_tokens_per_s"))
    parts = [
        f"<h1>{escape_text(name)}</h1>",
        render_table(summarize(metrics)),
        *draw_chart(
            "Loss in nats per target piece, without smoothing",
            losses,
            [*references.nll, *find_unigram_line(metrics)],
        ),
        *draw_chart(
            "Training loss in nats per target piece, as smoothed",
            smoothed,
            references.smoothed_loss,
        ),
        *draw_chart("Dev BLEU", [bleu], references.bleu, from_zero=True),
        *draw_chart("Target tokens per second", [speed], from_zero=True),
    ]
    if n_damaged:
        parts.append(
            f'<p class="note">{n_damaged} line(s) of metrics.jsonl cannot be read and are left out.</p>'
        )
    parts += ["<h2>Settings</h2>", render_table(flatten_settings(settings))]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape_text(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


# ---- what the page says --------------------------------------------------------------------------------------------


def collect_points(metrics: Metrics, kind: str, key: str) -> list[tuple[int, float]]:
    """Return (update, value) of each line of this kind that has a number under `key`."""
    points = []
    for line in metrics:
        if line.kind == kind and key in line.numbers:
            points.append((line.step, line.numbers[key]))
    return points


def find_unigram_line(metrics: Metrics) -> list[ReferenceLine]:
    """Return the unigram entropy of the target text, if the run was ever warned that it is there."""
    points = collect_points(metrics, "warning", "unigram_nll")
    return [ReferenceLine("frequencies of the pieces alone", nll) for _, nll in points[-1:]]


def summarize(metrics: Metrics) -> list[tuple[str, str]]:
    """Return what a reader wants to know first: how far the run is, how good it is, and by which
    measure.
    """
    if not metrics:
        return [("updates", "none logged yet")]

    # how far
    rows = [("updates", f"{metrics[-1].step:,}")]
    times = [line.numbers["elapsed_s"] for line in metrics if "elapsed_s" in line.numbers]
    if times:
        rows.append(("time", format_duration(times[-1])))

    # what went wrong
    for line in metrics:
        if line.kind == "warning":
            rows.append(("warning", line.texts.get("message", "")))

    # how good
    scores = collect_points(metrics, "valid", "bleu")
    if scores:
        step, best = max(scores, key=lambda point: point[1])
        rows.append(("best dev BLEU", f"{best:.2f} at update {step:,}"))
        rows.append(("signature", _find_signature(metrics, step, best)))
    losses = collect_points(metrics, "valid", "nll")
    if losses:
        step, lowest = min(losses, key=lambda point: point[1])
        perplexity = math.exp(min(lowest, 50))  # a diverged loss would overflow
        loss = f"{lowest:.4f} at update {step:,}, perplexity {perplexity:.2f}"
        rows.append(("lowest dev loss", loss))
    return rows


def _find_signature(metrics: Metrics, step: int, bleu: float) -> str:
    """Return the signature of the validation that scored `bleu` at this update."""
    for line in metrics:
        if line.kind == "valid" and (line.step, line.numbers.get("bleu")) == (step, bleu):
            return line.texts.get("signature", "")
    raise AssertionError("every score comes from a line")


def flatten_settings(value: Any, key: str = "") -> list[tuple[str, str]]:
    """List the settings as rows (section.key, value)."""
    rows: list[tuple[str, str]] = []
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            rows += flatten_settings(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            rows += flatten_settings(inner, f"{key}[{i}]")
    else:
        rows.append((key, value if isinstance(value, str) else json.dumps(value)))
    return rows


# ---- charts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The scales of a chart; each axis reaches from its first tick to its last."""

    across: list[float]  # ticks in updates
    upward: list[float]  # ticks in values

    def x(self, step: float) -> float:
        """Return where SVG draws this update."""
        first, last = self.across[0], self.across[-1]
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)

    def y(self, value: float) -> float:
        """Return where SVG draws this value; its y points down."""
        first, last = self.upward[0], self.upward[-1]
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - first) / (last - first)


def draw_chart(
    title: str,
    curves: list[Curve],
    references: Sequence[ReferenceLine] = (),
    from_zero: bool = False,
) -> list[str]:
    """Return a heading and an SVG, or nothing if no curve has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return []
    points = [point for curve in curves for point in curve.points]
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    values += [reference.value for reference in references]
    lowest = min(0.0, *values) if from_zero else min(values)
    axes = Axes(choose_ticks(min(0, *steps), max(steps)), choose_ticks(lowest, max(values)))

    label = escape_text(title)
    parts = [
        f"<h2>{label}</h2>",
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} against updates">',
        *_draw_grid(axes),
    ]
    for reference in references:
        parts.append(_draw_reference(reference, axes))
    for curve in curves:
        parts += _draw_curve(curve, axes)
    if len(curves) > 1:
        parts += _draw_legend(curves)
    return [*parts, "</svg>"]


def _draw_grid(axes: Axes) -> list[str]:
    parts = []
    for value in axes.upward:
        y = axes.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="y" x="{LEFT - 8}" y="{y + 4:.1f}">{value:,.10g}</text>'
        )
    for step in axes.across:
        x = axes.x(step)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 8}">{step:,.10g}</text>')
    return parts


def _draw_reference(reference: ReferenceLine, axes: Axes) -> str:
    y = axes.y(reference.value)
    return (
        f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT + 6}" y="{y - 5:.1f}">{escape_text(reference.name)}</text>'
    )


def _draw_curve(curve: Curve, axes: Axes) -> list[str]:
    """Draw a line through the points, and for a short curve a dot with a tooltip on each."""
    corners, dots = [], []
    for step, value in curve.points:
        x, y = f"{axes.x(step):.1f}", f"{axes.y(value):.1f}"
        corners.append(f"{x},{y}")
        dots.append(
            f'<circle cx="{x}" cy="{y}" r="3">'
            f"<title>{escape_text(curve.name)}, update {step:,}: {value:,.6g}</title></circle>"
        )
    line = f'<g class="{curve.colour}"><polyline class="curve" points="{" ".join(corners)}"/>'
    if len(dots) > MAX_DOTS:
        return [line, "</g>"]
    return [line, *dots, "</g>"]


def _draw_legend(curves: list[Curve]) -> list[str]:
    parts = []
    left = WIDTH - 100
    for i, curve in enumerate(curves):
        height = TOP + 10 + 18 * i
        parts.append(
            f'<g class="{curve.colour}"><path class="curve" d="M{left},{height} h20"/>'
            f'<text stroke="none" x="{left + 26}" y="{height + 4}">{escape_text(curve.name)}</text></g>'
        )
    return parts


def choose_ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers, from at most `low` to at least `high`."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, 1e-99):  # equal, as far as ticks can tell
        high = low + (largest if largest > 1e-99 else 1.0)
    least = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(least))
    # 1, 2, 5 or 10 units, with some room for the rounding of the quotients
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


# ---- HTML ----------------------------------------------------------------------------------------------------------


def render_table(rows: list[tuple[str, str]]) -> str:
    lines = ["<table>"]
    for name, value in rows:
        name, value = escape_text(name), escape_text(value)
        lines.append(f'<tr><td class="name">{name}</td><td>{value}</td></tr>')
    return "\n".join([*lines, "</table>"])


def escape_text(text: str) -> str:
    """Make text safe in HTML and in XML, which knows no control characters."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return html.escape(printable)
