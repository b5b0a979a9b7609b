"""A run as one page: the curves of metrics.jsonl and the settings of config.yaml in a self-contained report.html.

The curves are SVG written by hand and the page holds no script and no link, so that it opens anywhere, for ever, also
from an e-mail. It is well-formed XML. Whatever of metrics.jsonl can be read is shown; a line cut off by a crash is
counted and skipped, never a reason to fail.
"""

import html
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.system.errors import UserError
from nmt.system.files import write_text
from nmt.system.progress import format_duration
from nmt.system.run_folder import RunFolder
from nmt.system.strict_yaml import parse_yaml

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 28  # margins
DOTS = 60  # a longer curve is drawn as a line only

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
p.note, td.name { color: var(--soft); } table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid var(--line); padding: .15rem .5rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Curve:
    name: str
    colour: str  # a class of STYLE
    points: list[tuple[int, float]]  # (update, value)


def write_report(run: Path) -> Path:
    """Write run/report.html and say where it is."""
    folder = RunFolder(run)
    try:
        settings = parse_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config)).values
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{folder.config}: cannot be read; give the folder of a run") from None
    lines, n_damaged = read_metrics(folder.metrics)
    report = folder.report
    write_text(report, page(settings, lines, n_damaged))
    return report


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The readable lines of metrics.jsonl, and how many are not."""
    rows = [row for row in path.read_bytes().split(b"\n") if row.strip()] if path.exists() else []
    lines = []
    for row in rows:
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines, len(rows) - len(lines)


def page(settings: dict[str, Any], lines: list[dict[str, Any]], n_damaged: int) -> str:
    name = str(settings.get("name", "run"))
    bleu = points(lines, "valid", "bleu")
    parts = [
        f"<h1>{shown(name)}</h1>",
        table(summary(lines)),
        *chart(
            "Loss in nats per target piece, without smoothing",
            [
                Curve("training", "a", points(lines, "train", "nll")),
                Curve("dev", "b", points(lines, "valid", "nll")),
            ],
        ),
        *chart("Dev BLEU", [Curve("BLEU", "a", bleu)], from_zero=True),
        *chart(
            "Target tokens per second",
            [Curve("tokens/s", "a", points(lines, "train", "tgt_tokens_per_s"))],
            from_zero=True,
        ),
    ]
    if n_damaged:
        parts.append(
            f'<p class="note">{n_damaged} line(s) of metrics.jsonl cannot be read and are left out.</p>'
        )
    parts += ["<h2>Settings</h2>", table(flat(settings))]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{shown(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def points(lines: list[dict[str, Any]], kind: str, key: str) -> list[tuple[int, float]]:
    found = [(line["step"], line.get(key)) for line in lines if line.get("kind") == kind]
    return [
        (step, float(value))
        for step, value in found
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def summary(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What one wants to know first: how far, how good, and by which measure."""
    rows = []
    if lines:
        rows.append(("updates", f"{lines[-1]['step']:,}"))
        elapsed = lines[-1].get("elapsed_s")
        if isinstance(elapsed, int | float):
            rows.append(("time", format_duration(elapsed)))
    scores = points(lines, "valid", "bleu")
    if scores:
        step, best = max(scores, key=lambda point: point[1])
        signature = next(
            line.get("signature")
            for line in lines
            if line["step"] == step and line.get("kind") == "valid" and line.get("bleu") == best
        )
        rows += [("best dev BLEU", f"{best:.2f} at update {step:,}"), ("signature", str(signature))]
    losses = points(lines, "valid", "nll")
    if losses:
        step, best = min(losses, key=lambda point: point[1])
        rows.append(
            (
                "lowest dev loss",
                f"{best:.4f} at update {step:,}, perplexity {math.exp(min(best, 50)):.2f}",
            )
        )
    return rows or [("updates", "none logged yet")]


def chart(title: str, curves: list[Curve], from_zero: bool = False) -> list[str]:
    """A heading and an SVG; nothing where there is nothing to draw."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return []
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    across = ticks(min(0, *steps), max(steps))
    upward = ticks(min(0.0, *values) if from_zero else min(values), max(values))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - across[0]) / (across[-1] - across[0])

    def y(value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (HEIGHT - TOP - BOTTOM) * (value - upward[0]) / (upward[-1] - upward[0])
        )

    parts = [
        f"<h2>{shown(title)}</h2>",
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(title)} against updates">',
    ]
    for value in upward:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="y" x="{LEFT - 8}" y="{y(value) + 4:.1f}">{value:,.10g}</text>'
        )
    parts += [
        f'<text class="x" x="{x(step):.1f}" y="{HEIGHT - 8}">{step:,.10g}</text>' for step in across
    ]
    for curve in curves:
        places = [(x(step), y(value)) for step, value in curve.points]
        path = " ".join(f"{cx:.1f},{cy:.1f}" for cx, cy in places)
        parts.append(f'<g class="{curve.colour}"><polyline class="curve" points="{path}"/>')
        if len(places) <= DOTS:
            parts += [
                f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3">'
                f"<title>{shown(curve.name)}, update {step:,}: {value:,.6g}</title></circle>"
                for (cx, cy), (step, value) in zip(places, curve.points, strict=True)
            ]
        parts.append("</g>")
    for i, curve in enumerate(curves if len(curves) > 1 else []):  # the legend
        left, height = WIDTH - 100, TOP + 10 + 18 * i
        parts.append(
            f'<g class="{curve.colour}"><path class="curve" d="M{left},{height} h20"/>'
            f'<text stroke="none" x="{left + 26}" y="{height + 4}">{shown(curve.name)}</text></g>'
        )
    return [*parts, "</svg>"]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, some five of them, from at most `low` to at least `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    unit = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(
        unit * factor for factor in (1, 2, 5, 10) if unit * factor >= (high - low) / 5 * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def flat(value: Any, key: str = "") -> list[tuple[str, str]]:
    """The settings as rows (section.key, value)."""
    if isinstance(value, dict) and value:
        return [
            row
            for name, inner in value.items()
            for row in flat(inner, f"{key}.{name}" if key else name)
        ]
    if isinstance(value, list) and value:
        return [row for i, inner in enumerate(value) for row in flat(inner, f"{key}[{i}]")]
    return [(key, value if isinstance(value, str) else json.dumps(value))]


def table(rows: list[tuple[str, str]]) -> str:
    return (
        "<table>\n"
        + "".join(
            f'<tr><td class="name">{shown(name)}</td><td>{shown(value)}</td></tr>\n'
            for name, value in rows
        )
        + "</table>"
    )


def shown(text: str) -> str:
    """Text that is safe in HTML and in XML, which knows no control characters."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))
