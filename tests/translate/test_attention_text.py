"""Attention on a terminal: shades against the weights, and lines that fit."""

import unicodedata

import numpy as np
from support.hostile_text import OBEYED, PAYLOADS

from nmt.translate.attention_maps import AttentionMap
from nmt.translate.attention_text import format_attention

SOURCE, TARGET = ["▁the", "▁dog", "</s>"], ["▁der", "▁Hund", "</s>"]


def make_map(source: list[str], target: list[str], weights: np.ndarray) -> AttentionMap:
    layers = np.zeros((2, 2, len(target), len(source)), np.float32)
    layers[0] = weights  # of two layers the first is the alignment layer
    links = weights[:-1, :-1].argmax(1).tolist()
    return AttentionMap(source, target, links, layers)


def test_shades_and_links() -> None:
    weights = np.array([[0.8, 0.2, 0.0], [0.0, 0.6, 0.4], [0.4, 0.2, 0.4]])
    assert format_attention(make_map(SOURCE, TARGET, weights), 80) == (
        " ▁der █░  ▁the 80%\n▁Hund  ▓▒ ▁dog 60%\n </s> ▒░▒\n"
    )


def test_no_line_is_wider_than_the_terminal() -> None:
    source = [f"▁{place}" for place in range(100)] + ["犬" * 30, "</s>"]
    target = ["犬" * 30, "a\u0301" * 40, *PAYLOADS, "</s>"]
    weights = np.random.default_rng(1).dirichlet(np.ones(len(source)), len(target))
    text = format_attention(make_map(source, target, weights), 60)
    rows = text.split("\n")[:-1]
    assert len(rows) == len(target) and not OBEYED & set("".join(rows))
    for row in rows:
        wide = sum(unicodedata.east_asian_width(c) in "WF" for c in row)
        marks = row.count("\u0301")
        assert len(row) + wide - marks <= 60
    assert all("…" in row for row in rows)
