"""A table, and the ways to show it: in a terminal, in Markdown, in HTML, in CSV.

Cells may come from strangers' files: what people read shows their text and does nothing else. CSV
is for programs, and has the text unchanged. Formatted numbers are cells like others; `None` is an empty cell.
"""

import csv
import io
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from nmt.system.escapes import escape_html, escape_line, escape_markdown

GAP = "  "  # between the columns of a table in a terminal


@dataclass(frozen=True)
class Code:
    """A cell in a fixed-width font, if the format has one: a digest, a signature."""

    text: str


@dataclass(frozen=True)
class Html:
    """A cell that is markup already; only for `Table.to_html`."""

    text: str


Cell = str | float | Code | Html | None
Rows = list[list[Cell]]


@dataclass(frozen=True)
class Table:
    """A head, and rows that have as many cells."""

    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]

    @property
    def _head_and_rows(self) -> Sequence[Sequence[Cell]]:
        return (self.head, *self.rows)

    def to_lines(self, numbers: Container[int] = ()) -> list[str]:
        """Return the table as lines with aligned columns. Those whose indices are in `numbers` are
        aligned at their right ends.
        """
        texts = [[escape_line(_read_text(cell)) for cell in row] for row in self._head_and_rows]
        columns = []
        for i, column in enumerate(zip(*texts, strict=True)):
            align = str.rjust if i in numbers else str.ljust
            width = max(map(len, column))
            columns.append([align(text, width) for text in column])
        return [GAP.join(row).rstrip() for row in zip(*columns, strict=True)]

    def to_markdown(self) -> str:
        lines = []
        for row in self._head_and_rows:
            cells = " | ".join(map(_render_markdown, row))
            lines.append(f"| {cells} |")
        lines.insert(1, "|" + "---|" * len(self.head))  # the rule below the head
        return "\n".join(lines)

    def to_html(self, caption: str = "", label: str = "table", is_stacked: bool = False) -> str:
        """Return the table as HTML.

        If it is too wide for the screen it scrolls by itself or, if stacked, shows each cell below
        the name of its column.
        """
        kind = "wide stacked" if is_stacked else "wide"
        label = escape_html(caption or label)
        lines = [f'<div class="{kind}" role="region" tabindex="0" aria-label="{label}">', "<table>"]
        if caption:
            lines.append(f"<caption>{label}</caption>")
        names = [render_html(cell) for cell in self.head]
        head = "".join(f'<th scope="col">{name}</th>' for name in names)
        lines += [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
        for row in self.rows:
            cells = []
            for name, cell in zip(names, row, strict=True):
                attribute = f' data-label="{name}"' if is_stacked else ""
                cells.append(f"<td{attribute}>{render_html(cell)}</td>")
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</tbody>", "</table>", "</div>"])

    def to_csv(self) -> str:
        """Return the table for programs: numbers that are not formatted have all their digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in self._head_and_rows:
            writer.writerow([cell.text if isinstance(cell, Code | Html) else cell for cell in row])
        return text.getvalue()


def format_interval(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def render_html(cell: Cell) -> str:
    if isinstance(cell, Html):
        return cell.text
    text = escape_html(_read_text(cell))
    return f"<code>{text}</code>" if isinstance(cell, Code) else text


def _render_markdown(cell: Cell) -> str:
    if not isinstance(cell, Code):
        return escape_markdown(_read_text(cell))
    text = escape_line(cell.text)
    if re.search(r"[`\\]", text):  # they would end or confuse a code span
        return escape_markdown(text)
    return "`" + text.replace("|", r"\|") + "`"


def _read_text(cell: Cell) -> str:
    if isinstance(cell, Code | Html):
        return cell.text
    return "" if cell is None else str(cell)
