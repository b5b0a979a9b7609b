"""A report says what the run's files say, holds together in one file, shows no markup of its input,
and survives what a crash leaves.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sacrebleu import sentence_chrf
from support.browser import open_page
from support.needs import needs_chromium, needs_package
from support.page_elements import Elements

from nmt.config import RunConfig
from nmt.config_files import format_config, load_config, override_config
from nmt.evaluate.scored_texts import ScoredTexts
from nmt.extras.report.facts import RunFacts, read_run
from nmt.extras.report.page import render_page, write_page, write_report
from nmt.extras.report.sentences import rank_lines, score_lines
from nmt.system.errors import UserError

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
SCRIPT = "window.vegaEmbed = null;"  # in place of the real one


def make_metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step, loss in ((100, 8.25), (200, 6.5), (300, 5.0)):
        speed = 5_000.0 + step
        train = {"kind": "train", "step": step, "loss": loss + 0.5, "nll": loss, "lr": 1e-6 * step}
        lines.append(train | {"tgt_tokens_per_s": speed, "elapsed_s": step / 10, "grad_norm": 1.5})
    for step, loss, bleu in ((200, 6.0, 3.25), (300, 4.5, 17.5), (400, 4.75, None)):
        valid = {"kind": "valid", "step": step, "nll": loss, "bleu": bleu, "signature": SIGNATURE}
        lines.append(valid | {"elapsed_s": 3_725.0})
    for step, text in ((200, "ein roter Hund"), (300, "der rote Hund")):
        sample = {"kind": "sample", "step": step, "line": 7, "source": "the red dog"}
        lines.append(sample | {"reference": "der rote Hund", "translation": text})
    return lines


def to_jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


METRICS = to_jsonl(make_metrics())


def write_run(folder: Path, metrics: bytes = METRICS, *overrides: str) -> RunFacts:
    config = override_config(RunConfig(name="demo run"), overrides)
    (folder / "config.yaml").write_text(format_config(config))
    (folder / "metrics.jsonl").write_bytes(metrics)
    return read_run(folder)


def read_charts(page: str) -> dict[str, Any]:
    """Return the data of the charts by title, as charts.js reads them."""
    (text,) = re.findall(r'<script type="application/json" id="report-charts">(.*?)</script>', page)
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    return dict(zip(titles, json.loads(text)["charts"], strict=True))


def test_every_point_is_in_its_chart(tmp_path: Path) -> None:
    charts = read_charts(render_page([write_run(tmp_path)], SCRIPT))
    curves = {title: [(one["x"], one["y"]) for one in c["series"]] for title, c in charts.items()}
    assert curves["Loss in nats per target piece, without smoothing"] == [
        ([100, 200, 300], [8.25, 6.5, 5.0]),
        ([200, 300, 400], [6.0, 4.5, 4.75]),
    ]
    assert curves["Dev BLEU"] == [([200, 300], [3.25, 17.5])]
    assert {"Learning rate", "Norm of the gradient", "Target tokens per second"} <= charts.keys()


def test_the_summary_names_the_best_score_and_its_signature(tmp_path: Path) -> None:
    run = write_run(tmp_path, METRICS, "model.d_model=64")
    page = render_page([run], None)
    assert '<p class="lead">en to de · 300 updates</p>' in page
    assert Elements(page).rows.items() >= {
        ("best dev BLEU", "17.50 at update 300"),
        ("signature", SIGNATURE),
        ("lowest dev loss", "4.5000 at update 300, perplexity 90.02"),
        ("time", "1:02:05"),
        ("model.d_model", "64"),
        ("optimizer.eps", "1e-09"),
        ("data.valid", "null"),
    }


def test_the_papers_scores_are_in_the_charts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(METRICS)
    (tmp_path / "config.yaml").write_text(format_config(load_config("base.yaml")))
    charts = read_charts(render_page([read_run(tmp_path)], SCRIPT))
    for title, words in (
        ("Loss in nats per target piece, without smoothing", "perplexity 4.92 of its own pieces"),
        ("Loss in nats per target piece, without smoothing", "1.59331"),
        ("Dev BLEU", "tokenised BLEU 25.8"),
    ):
        assert words in json.dumps(charts[title]["spec"])


def test_a_warning_is_shown_with_its_yardstick(tmp_path: Path) -> None:
    warning = {"kind": "warning", "step": 300, "unigram_nll": 5.25, "message": "learned <nothing>"}
    page = render_page([write_run(tmp_path, to_jsonl([*make_metrics(), warning]))], SCRIPT)
    assert Elements(page).rows["warning"] == "learned <nothing>"
    assert "frequencies of the pieces alone" in json.dumps(read_charts(page))


def test_the_history_of_a_dev_sentence_has_each_translation_once(tmp_path: Path) -> None:
    lines = make_metrics()
    lines.append(lines[-1] | {"step": 400})
    page = render_page([write_run(tmp_path, to_jsonl(lines))], None)
    assert page.count("ein roter Hund") == 1
    assert page.count("der rote Hund") == 2  # also the reference


@pytest.mark.parametrize(
    "metrics, has_curves, note",
    [
        (b"", False, None),
        (b"\n\n", False, None),
        (METRICS + b'{"kind": "tr', True, "1 line(s)"),
        (b"\xff\n[1]\n5\n{}\n" + to_jsonl(make_metrics()[:1]), True, "4 line(s)"),
        (to_jsonl([{"kind": "train", "step": 1, "nll": "nan", "lr": "fast"}]), False, None),
        (to_jsonl([{"kind": "valid", "step": 0, "nll": 0.0, "bleu": 0.0}]), True, None),
        (to_jsonl([{"kind": "sample", "step": 1, "line": 1e99, "translation": "a"}]), False, None),
    ],
)
def test_damaged_metrics_are_no_reason_to_fail(
    tmp_path: Path, metrics: bytes, has_curves: bool, note: str | None
) -> None:
    page = render_page([write_run(tmp_path, metrics)], SCRIPT)
    assert ("<figure" in page) == has_curves
    assert ("are left out" in page) == bool(note)
    assert (note or "") in page and "demo run" in page


@pytest.mark.parametrize("name", ["results.json", "translations.json", "vocab.model"])
def test_a_damaged_file_is_a_note_on_the_page(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff{")
    page = render_page([write_run(tmp_path)], None)
    assert re.search(rf'<p class="note">[^<]*{name}', page)
    assert "17.50 at update 300" in page


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read \(.+\); give a run folder"):
        write_report(tmp_path)


def test_without_vl_convert_there_are_tables_and_no_script(tmp_path: Path) -> None:
    page = render_page([write_run(tmp_path)], None)
    assert "<script" not in page and "script-src 'none'" in page
    assert "pip install" in page
    found = Elements(page)
    assert found.count("figure") == 5 and ">17.5</td>" in page


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = render_page([write_run(tmp_path)], SCRIPT)
    assert not re.search(r'<link|<img|src="|href="[^#]|@import|url\(|style="|\son\w+=', page)
    assert "prefers-color-scheme: dark" in page
    assert (
        """http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-"""
        in page
    )
    assert "unsafe" not in page.partition("</head>")[0]


def test_many_runs_fit_into_one_page(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "nll": 5 / step} for step in range(1, 1_000)]
    run = write_run(tmp_path, to_jsonl(lines))
    page = render_page([run] * 50, SCRIPT)
    (chart,) = read_charts(page).values()
    assert len(chart["series"]) == 50
    assert sum(len(series["x"]) for series in chart["series"]) <= 3_000
    assert len(page) < 1_000_000


def make_scored_run(name: str, sources: list[str], pairs: dict[str, str]) -> RunFacts:
    texts = ScoredTexts(
        "average", "test", "en-de", "0" * 64, sources, list(pairs), [*pairs.values()]
    )
    return RunFacts(name, {}, texts=texts)


def test_lines_are_ranked_by_sacrebleus_chrf() -> None:
    pairs = {"ein Hund": "ein Hund", "eine Katze": "x", "Tag": "Tage"}
    texts = make_scored_run("one", ["a", "b", "c"], pairs).texts
    assert texts is not None
    scores = score_lines(texts)
    assert scores == [sentence_chrf(text, [reference]).score for reference, text in pairs.items()]
    assert rank_lines(scores) == [1, 2, 0]


def test_the_lines_of_several_systems_are_shown_with_and_without_sources() -> None:
    whole = make_scored_run("whole", ["a b", "c d"], {"ein Hund": "ein Hund", "zwei Tage": "x"})
    bare = make_scored_run("bare", [], {"ein Hund": ""})
    page = render_page([whole, bare], None)
    assert page.count("Worst lines") == page.count("Best lines") == 2
    worst = page.index(">zwei Tage</span>")
    assert worst < page.index(">ein Hund</span>") < page.index("Best lines")


@needs_chromium()
@needs_package("vl_convert", "report")
def test_a_reader_zooms_hides_runs_and_reads_points_by_keys(tmp_path: Path) -> None:
    runs = [write_run(tmp_path)] * 2
    path = tmp_path / "page.html"
    write_page(runs, path)
    with open_page(path.as_uri(), width=390) as opened:
        page = opened.page
        page.wait_for_selector("figure svg")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.focus(".plot")
        page.keyboard.press("ArrowRight")
        readout = page.locator(".readout").first
        assert readout.inner_text().startswith("update 100") and "8.25" in readout.inner_text()
        page.keyboard.press("Escape")
        assert not readout.is_visible()

        plot = page.locator(".plot").first.bounding_box()
        page.mouse.move(plot["x"] + plot["width"] / 2, plot["y"] + 100)
        page.mouse.down()
        page.mouse.move(plot["x"] + plot["width"] - 10, plot["y"] + 100, steps=4)
        page.mouse.up()
        page.wait_for_function("Number(document.getElementById('updates-from').value) > 200")
        page.click("#updates-all")
        assert page.input_value("#updates-from") == "100"

        page.uncheck("input[data-run='0']")
        page.focus(".plot")
        page.keyboard.press("ArrowRight")
        assert readout.inner_text().count("training") == 1
        assert opened.faults == []
