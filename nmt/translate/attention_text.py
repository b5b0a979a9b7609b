"""A map of attention as lines of a terminal: a row for each piece of the translation, a shade for each
piece of the source, and in words the source piece that it is linked to.

Shades are the mean of the alignment layer's heads. No line is wider than it may be: of a long source
as many shades are drawn as there is room for, and an ellipsis says that there are more.
"""

import unicodedata

from nmt.system.escapes import escape_line
from nmt.translate.attention_maps import AttentionMap

SHADES = " ░▒▓█"
MAX_PIECE = 16  # columns


def format_attention(one: AttentionMap, width: int) -> str:
    weights = one.average_alignment_layer().memory[0, 0]
    levels = (weights / weights.max() * (len(SHADES) - 1)).round().astype(int)
    sources = [_fit(piece) for piece in one.source]
    targets = [_fit(piece) for piece in one.target]
    left = max(map(_measure, targets))
    right = max(map(_measure, sources)) + len(" 100 %")
    room = max(1, width - left - right - len("  "))
    rows = []
    for row, target in enumerate(targets):
        shades = "".join(SHADES[level] for level in levels[row])
        if len(shades) > room:
            shades = shades[: room - 1] + "…"
        link = ""
        if row < len(one.alignment):
            column = one.alignment[row]
            link = f"{sources[column]} {weights[row, column]:.0%}"
        rows.append(f"{' ' * (left - _measure(target))}{target} {shades} {link}".rstrip() + "\n")
    return "".join(rows)


def _measure(text: str) -> int:
    """The columns that a terminal takes for a text."""
    columns = 0
    for character in text:
        is_wide = unicodedata.east_asian_width(character) in "WF"
        is_mark = unicodedata.category(character) in ("Mn", "Me", "Cf")
        columns += 0 if is_mark else 1 + is_wide
    return columns


def _fit(piece: str) -> str:
    """Write a piece out, cut to MAX_PIECE columns."""
    text = escape_line(piece).replace("\t", " ")
    if _measure(text) <= MAX_PIECE:
        return text
    while _measure(text) >= MAX_PIECE:
        text = text[:-1]
    return text + "…"
