"""The report holds the run's points, parses as XML, shows no markup of its input, and survives what
a crash leaves.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hostile_text import OBEYED, PAYLOADS
from untrained import make_vocab

from nmt.config import RunConfig, format_config, load_config, override_config
from nmt.report.page import choose_ticks, write_report
from nmt.system.errors import UserError
from nmt.system.strict_yaml import format_yaml

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
METRICS: list[dict[str, Any]] = [
    {
        "kind": "train",
        "step": 100,
        "loss": 8.5,
        "nll": 8.25,
        "lr": 1e-4,
        "tgt_tokens_per_s": 5000.0,
        "elapsed_s": 12.3,
    },
    {
        "kind": "train",
        "step": 200,
        "loss": 6.5,
        "nll": 6.5,
        "lr": 2e-4,
        "tgt_tokens_per_s": 5250.0,
        "elapsed_s": 24.1,
    },
    {
        "kind": "valid",
        "step": 200,
        "nll": 6.0,
        "ppl": 403.4,
        "bleu": 3.25,
        "signature": SIGNATURE,
        "elapsed_s": 30.0,
    },
    {
        "kind": "train",
        "step": 300,
        "loss": 5.5,
        "nll": 5.0,
        "lr": 3e-4,
        "tgt_tokens_per_s": 4800.0,
        "elapsed_s": 42.0,
    },
    {
        "kind": "valid",
        "step": 300,
        "nll": 4.5,
        "ppl": 90.0,
        "bleu": 17.5,
        "signature": SIGNATURE,
        "elapsed_s": 50.0,
    },
    {
        "kind": "valid",
        "step": 400,
        "nll": 4.75,
        "ppl": 115.6,
        "bleu": None,
        "signature": None,
        "elapsed_s": 3725.0,
    },
]


def report(
    tmp_path: Path, metrics: bytes | None, *overrides: str
) -> tuple[str, ElementTree.Element]:
    """Write the page; return it as text and as XML."""
    config = override_config(RunConfig(name="demo run"), overrides)
    (tmp_path / "config.yaml").write_text(format_config(config))
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, ElementTree.fromstring(text)


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def find(root: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return list(root.iter(f"{{http://www.w3.org/1999/xhtml}}{tag}"))


def list_curves(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Read the points of each curve, in SVG's coordinates."""
    curves = []
    for line in find(root, "polyline"):
        points = []
        for pair in (line.get("points") or "").split():
            x, y = pair.split(",")
            points.append((float(x), float(y)))
        curves.append(points)
    return curves


def read_rows(root: ElementTree.Element) -> dict[str, str]:
    return {(row[0].text or ""): (row[1].text or "") for row in find(root, "tr")}


def test_every_point_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    _, root = report(tmp_path, jsonl(METRICS))
    training, dev, bleu, speed = list_curves(root)
    assert [len(curve) for curve in (training, dev, bleu, speed)] == [3, 3, 2, 3]
    # updates 200 and 300, one axis for both
    assert [x for x, _ in dev[:2]] == [x for x, _ in training[1:]]
    scale = (training[1][1] - training[0][1]) / (6.5 - 8.25)  # upwards is down in SVG
    assert scale < 0
    for (_, y), nll in zip(training + dev, (8.25, 6.5, 5.0, 6.0, 4.5, 4.75), strict=True):
        assert y == pytest.approx(training[0][1] + scale * (nll - 8.25), abs=0.2)
    titles = [element.text for element in find(root, "title")]
    assert {
        "training, update 100: 8.25",
        "dev, update 400: 4.75",
        "BLEU, update 300: 17.5",
        "tokens/s, update 200: 5,250",
    } <= set(titles)


def test_the_summary_names_the_best_score_and_its_signature(tmp_path: Path) -> None:
    _, root = report(tmp_path, jsonl(METRICS), "model.d_model=64")
    rows = read_rows(root)
    assert rows["best dev BLEU"] == "17.50 at update 300"
    assert rows["signature"] == SIGNATURE
    assert rows["lowest dev loss"] == "4.5000 at update 300, perplexity 90.02"
    assert (rows["updates"], rows["time"]) == ("400", "1:02:05")
    assert (rows["model.d_model"], rows["optimizer.eps"], rows["data.valid"]) == (
        "64",
        "1e-09",
        "null",
    )


def test_the_papers_scores_and_the_floor_of_the_loss_are_dashed_lines(tmp_path: Path) -> None:
    (tmp_path / "vocab.model").write_bytes(make_vocab(tmp_path).model)
    (tmp_path / "metrics.jsonl").write_bytes(jsonl(METRICS))
    (tmp_path / "config.yaml").write_text(format_config(load_config("base.yaml")))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    training, dev, smoothed, bleu, _ = list_curves(root)
    paper_nll, floor, paper_bleu = [
        float(line.get("y1") or "") for line in find(root, "line") if line.get("class") == "mark"
    ]
    assert "perplexity 4.92 of its own pieces" in text and "tokenised BLEU 25.8" in text
    assert "no smoothed loss is below 0.76" in text  # 0.9 ln(1/0.9) + 0.1 ln(79/0.1)
    # A lower loss is further down, a better BLEU further up.
    assert paper_nll > max(y for _, y in training + dev)
    assert floor > max(y for _, y in smoothed)
    assert paper_bleu < min(y for _, y in bleu)


def test_a_warning_is_shown_with_its_yardstick(tmp_path: Path) -> None:
    warning = {
        "kind": "warning",
        "step": 300,
        "problem": "stalled",
        "unigram_nll": 5.25,
        "message": "has learned <nothing>",
    }
    text, root = report(tmp_path, jsonl([*METRICS, warning]))
    assert read_rows(root)["warning"] == "has learned <nothing>"
    assert [line.get("class") for line in find(root, "line")].count("mark") == 1
    assert "frequencies of the pieces alone" in text


@pytest.mark.parametrize(
    "metrics, n_curves, note",
    [
        (None, 0, None),
        (b"", 0, None),
        (b"\n\n", 0, None),
        (jsonl(METRICS) + b'{"kind": "tr', 4, "1 line(s)"),
        (b"\xff\n[1]\n5\n{}\n" + jsonl(METRICS[:1]), 2, "4 line(s)"),
        (jsonl(METRICS[:1]), 2, None),
        (
            jsonl([{"kind": "train", "step": 1, "nll": "nan", "tgt_tokens_per_s": "fast"}]),
            0,
            None,
        ),
        (jsonl([{"kind": "valid", "step": 0, "nll": 0.0, "bleu": 0.0}]), 2, None),
    ],
)
def test_damaged_metrics_are_no_reason_to_fail(
    tmp_path: Path, metrics: bytes | None, n_curves: int, note: str | None
) -> None:
    text, root = report(tmp_path, metrics)
    assert len(list_curves(root)) == n_curves
    assert ("cannot be read" in text) == bool(note)
    assert (note or "") in text
    assert "demo run" in text


def test_input_cannot_become_markup(tmp_path: Path) -> None:
    evil = {
        "kind": "valid",
        "step": 1,
        "bleu": 1.0,
        "signature": "<script>alert('x')</script>\x01\ud800",
    }
    text, root = report(tmp_path, jsonl([evil]), "name='</title><b>&\"'", 'out="a\\u2028\\x07b"')
    assert not find(root, "script") and not find(root, "b")
    assert find(root, "h1")[0].text == '</title><b>&"'
    assert read_rows(root)["signature"].startswith("<script>alert('x')</script>")
    assert "\x01" not in text


class Elements(HTMLParser):
    """The tags and attributes of a page, as a browser takes them, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_data(self, data: str) -> None:
        self.text += data


def read_elements(tmp_path: Path, text: str) -> Elements:
    """Read a page in which `text` is wherever the files of a stranger's run have text."""
    kinds = [{"kind": "warning", "step": 1, "message": text}, {"kind": text, "step": 2, text: text}]
    valid = {"kind": "valid", "step": 3, "bleu": 1.0, "nll": 2.0, "signature": text}
    (tmp_path / "metrics.jsonl").write_bytes(jsonl([*kinds, valid]) + text.encode() + b"\n")
    settings = {"name": text, "out": text, "data": {"train": [{"src": text}, text]}}
    (tmp_path / "config.yaml").write_text(format_yaml(settings), encoding="utf-8")
    found = Elements()
    page = write_report(tmp_path).read_bytes().decode()
    ElementTree.fromstring(page)
    found.feed(page)
    return found


@pytest.mark.parametrize("text", PAYLOADS, ids=ascii)
def test_nothing_of_a_strangers_run_is_markup(tmp_path: Path, text: str) -> None:
    """The tags and attributes are those of any page, and the text shows as it is."""
    text = text.replace("\0", "")  # configs refuse it
    found = read_elements(tmp_path, text)
    assert found.tags == read_elements(tmp_path, "harmless").tags
    assert OBEYED.isdisjoint(found.text)
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    assert found.text.count(shown) >= 7


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    text, _ = report(tmp_path, jsonl(METRICS))
    assert not re.search(r"<script|<link|<img|src=|href=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_a_long_run_is_a_line_without_dots(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 100 * i, "nll": 5 / i} for i in range(1, 3001)]
    text, root = report(tmp_path, jsonl(lines))
    assert [len(curve) for curve in list_curves(root)] == [3000]
    assert not find(root, "circle")
    assert len(text) < 100_000


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read \(.+\); give a run folder"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0, 17.5, [0, 5, 10, 15, 20]),
        (4.5, 8.25, [4, 5, 6, 7, 8, 9]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
        (0, 300_000, [0, 100_000, 200_000, 300_000]),
    ],
)
def test_ticks_are_round_and_hold_the_data(low: float, high: float, expected: list[float]) -> None:
    found = choose_ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9
    assert found == pytest.approx(expected)
