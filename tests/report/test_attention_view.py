"""The view of attention in a browser: what it shows, by pointer and by keys, and that pieces are text."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from pytest import approx
from support.browser import open_page
from support.hostile_text import OBEYED, PAYLOADS
from support.needs import needs_chromium
from support.page_elements import Elements

from nmt.extras.maps.attention_maps import AttentionMap
from nmt.extras.report.attention_view import render_attention_page
from nmt.extras.report.markup import read_page_file


def make_map(source: list[str], target: list[str], layers: int = 3, heads: int = 2) -> AttentionMap:
    n, m = len(source), len(target)
    rng = np.random.default_rng(1)

    def draw(rows: int, columns: int) -> np.ndarray:
        weights = rng.random((layers, heads, rows, columns), np.float32) ** 3
        return weights / weights.sum(-1, keepdims=True)

    links = [row % n for row in range(m - 1)]
    return AttentionMap(
        source, target, links, {"memory": draw(m, n), "encoder": draw(n, n), "decoder": draw(m, m)}
    )


PLAIN = make_map(["▁the", "▁dog", "</s>"], ["▁der", "▁H", "und", "</s>"])


def test_every_page_has_the_same_elements() -> None:
    """Whatever the pieces and the title are, no handler and no element comes from them."""
    pages = []
    for pieces, title in ((["a", "b"], "plain"), (PAYLOADS, "</title><script>alert(1)</script>")):
        one = make_map([*pieces, "</s>"], [*pieces, "</s>"], layers=1, heads=1)
        text = render_attention_page([one, one], title, note=title)
        assert not OBEYED & set(text) - {"\n"}
        tags = Elements(text).tags
        assert json.loads(re.findall(r"/json\">(.*?)</script>", text)[0]) == one.to_json()
        pages.append([(tag, [name for name, _ in attributes]) for tag, attributes in tags])
    assert pages[0] == pages[1]


def test_script_has_no_way_to_markup() -> None:
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|setAttribute\(.(style|on)"
    )
    assert not re.search(banned, read_page_file("attention_view.js"))


@needs_chromium()
def test_hostile_pieces_in_a_browser(tmp_path: Path) -> None:
    one = make_map([*PAYLOADS, "\u202egnp", "</s>"], ["\u05e9\u05dc\u05d5\u05dd", "</s>"])
    path = tmp_path / "page.html"
    path.write_text(render_attention_page([one], PAYLOADS[-3]), encoding="utf-8")
    with open_page(path.as_uri(), width=390, scheme="dark") as opened:
        page = opened.page
        shown = page.eval_on_selector_all(
            ".attention-columns bdi", "all => all.map(one => one.textContent)"
        )
        assert len(shown) == len(PAYLOADS) + 2
        assert not OBEYED & set("".join(shown))
        assert "<script>alert(1)</script>" in shown
        assert "<U+202E>gnp" in shown
        for tag in ("img", "svg", "iframe", "a", "h2"):
            assert page.locator(tag).count() == 0
        page.locator(".attention-table summary").click()
        page.locator("tbody tr").nth(1).wait_for()  # the table is made when it is opened
        rows = page.locator("tbody th bdi").all_text_contents()
        assert rows == ["\u05e9\u05dc\u05d5\u05dd", "</s>"]
        # only the map scrolls, not the page
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.faults == []


def read_cell(page: Any) -> tuple[str, str, float]:
    row, column = page.locator(".attention-readout bdi").all_text_contents()
    weight = page.locator(".attention-readout b").text_content()
    return row, column, float(weight.removesuffix(" %"))


@needs_chromium()
def test_view_by_keys_and_pointer(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_attention_page([PLAIN], "a page"), encoding="utf-8")
    memory, decoder = PLAIN.kinds["memory"], PLAIN.kinds["decoder"]
    with open_page(path.as_uri()) as opened:
        page = opened.page
        selects = page.locator(".attention-controls select")
        assert selects.evaluate_all("all => all.map(one => one.value)") == ["memory", "1", "mean"]

        # keys, from the address bar on: the summary, three choices, the box, the map
        for _ in range(6):
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "attention-map"
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
        row, column, weight = read_cell(page)
        assert (row, column) == ("▁H", "▁dog")
        assert weight == approx(100 * memory[1].mean(0)[1, 1], abs=0.3)
        page.keyboard.press("End")
        page.keyboard.press("PageDown")
        page.keyboard.press("ArrowDown")  # stays
        assert read_cell(page)[:2] == ("</s>", "</s>")

        # the mean of all, then one head of one layer of the decoder
        selects.nth(1).select_option(value="mean")
        assert read_cell(page)[2] == approx(100 * memory.mean((0, 1))[3, 2], abs=0.3)
        selects.nth(0).select_option(value="decoder")
        selects.nth(1).select_option(index=2)
        selects.nth(2).select_option(index=2)  # below the mean
        page.locator(".attention-plot").hover(position={"x": 30, "y": 50})  # row 2, column 1
        row, column, weight = read_cell(page)
        assert (row, column) == ("und", "▁der")  # what the decoder has read is one piece behind
        assert weight == approx(100 * decoder[2, 1, 2, 1], abs=0.3)

        # the table has the same numbers
        page.locator(".attention-table summary").click()
        page.locator("tbody tr").nth(2).wait_for()
        cells = page.locator("tbody tr").nth(2).locator("td").all_text_contents()
        assert [float(cell) for cell in cells] == approx(100 * decoder[2, 1, 2], abs=0.3)

        # hard alignment
        selects.nth(0).select_option(value="memory")
        page.locator(".attention-controls input").check()
        places = page.locator(".attention-link").evaluate_all(
            "all => all.map(one => one.style.getPropertyValue('--column'))"
        )
        assert list(map(int, places)) == PLAIN.alignment
        assert opened.faults == []


@needs_chromium()
def test_what_is_no_map_is_said(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_attention_page([PLAIN], "a page"), encoding="utf-8")
    with open_page(path.as_uri()) as opened:
        for value in (
            {},
            {"source": ["a"], "target": ["b"], "attention": {"memory": [["AAAA"]]}},
            {"source": ["a"], "target": ["b"], "attention": {}},
            {"source": [], "target": [], "attention": {"memory": [[""]]}},
        ):
            opened.page.evaluate(
                "value => nmtAttention.show(document.querySelector('h1'), value)", value
            )
            text = opened.page.locator("h1 .attention-readout").text_content()
            assert "cannot be shown" in text or "no attention" in text
        assert opened.faults == []
