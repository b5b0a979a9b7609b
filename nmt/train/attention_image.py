"""Draws the attention of a sample line of metrics.jsonl: what each piece of the translation attends
to in the source.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CELL = 0.24  # inches
MARGIN = 1.2  # inches, for the pieces
DPI = 100


@dataclass(frozen=True)
class Drawing:
    png: bytes
    width: int  # pixels
    height: int


def draw_attention(attention: Any) -> Drawing | None:
    """Draw the attention of a sample; return None if it has none, or not as training writes it."""
    try:
        source, target = attention["source"], attention["target"]
        cells = base64.b64decode(attention["attention"]["memory"][0][0], validate=True)
        weights = np.frombuffer(cells, np.uint8).reshape(len(target), len(source))
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    size = (MARGIN + CELL * len(source), MARGIN + CELL * len(target))
    figure = Figure(size, dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(source)), map(str, source), rotation=90, parse_math=False)
    axes.set_yticks(range(len(target)), map(str, target), parse_math=False)
    axes.tick_params(length=0)
    file = io.BytesIO()
    canvas.print_png(file)
    width, height = canvas.get_width_height()
    return Drawing(file.getvalue(), width, height)
