"""A report says what the run's files say, holds together in one file, shows no markup of its input,
and survives what a crash leaves.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from pytest import mark, raises
from sacrebleu import sentence_chrf
from support.browser import open_page
from support.golden import check_golden
from support.needs import needs_chromium, needs_package
from support.recipes import list_recipes
from support.recorded_result import RESULT
from support.untrained import make_vocab

from nmt.config import RunConfig
from nmt.config_files import format_config, to_plain_values
from nmt.corpus.ledger import BpeAccount, CorpusAccount, Ledger
from nmt.evaluate.scored_texts import ScoredTexts
from nmt.extras.report.facts import RunFacts, read_run
from nmt.extras.report.markup import read_page_file
from nmt.extras.report.page import render_page, write_page, write_report
from nmt.extras.report.sentences import rank_lines, score_lines
from nmt.system.errors import UserError
from nmt.system.strict_json import Fields

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
SCRIPT = "window.vegaEmbed = null;"  # in place of the real one


def make_metrics() -> list[Fields]:
    lines: list[Fields] = []
    for step, loss in ((100, 8.25), (200, 6.5), (300, 5.0)):
        speed, memory = 5_000.0 + step, 3 * 2**29
        train = {"kind": "train", "step": step, "loss": loss + 0.5, "nll": loss, "lr": 1e-6 * step}
        train |= {"tgt_tokens_per_s": speed, "memory_bytes": memory, "grad_norm": 1.5}
        lines.append(train | {"elapsed_s": step / 10})
    for step, loss, bleu in ((200, 6.0, 3.25), (300, 4.5, 17.5), (400, 4.75, None)):
        valid = {"kind": "valid", "step": step, "nll": loss, "bleu": bleu, "signature": SIGNATURE}
        lines.append(valid | {"elapsed_s": 3_725.0})
    for step, text in ((200, "ein roter Hund"), (300, "der rote Hund")):
        sample = {"kind": "sample", "step": step, "line": 7, "source": "the red dog"}
        lines.append(sample | {"reference": "der rote Hund", "translation": text})
    return lines


def to_jsonl(lines: list[Fields]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


METRICS = to_jsonl(make_metrics())


def write_run(folder: Path, metrics: bytes = METRICS) -> RunFacts:
    (folder / "config.yaml").write_text(format_config(RunConfig(name="demo run")))
    (folder / "metrics.jsonl").write_bytes(metrics)
    return read_run(folder)


def test_golden_pages(tmp_path: Path) -> None:
    """The figures of charts are in the page; what draws them, and its style, are files of their own."""
    warning = {"kind": "warning", "step": 300, "unigram_nll": 5.25, "message": "learned <nothing>"}
    lines = make_metrics()
    again = lines[-1] | {"step": 400}  # the same translation
    write_run(tmp_path, to_jsonl([*lines, again, warning]))
    older = replace(RESULT, step=90, checkpoint="step-0000090", scores=RESULT.scores[1:])
    texts = make_texts(["a b", "c d"], {"ein Hund": "ein Hund", "zwei Tage": "x"})
    accounts = [
        CorpusAccount("a.en + a.de", "train", [], 9_000, 8_990, [1_234, 5_678], {"empty": 10}, {}),
        CorpusAccount("b.en + b.de", "valid", [], 20, 20, [200, 210], {}, {}),
    ]
    bpe = BpeAccount("", 80, 9_000, 99, None)
    ledger = Ledger({"data": {"src": "en", "tgt": "de"}}, accounts, None, bpe, {}, "", {}, "")
    run = replace(
        read_run(tmp_path),
        vocab=make_vocab(tmp_path),
        results=(older, RESULT),
        texts=texts,
        ledger=ledger,
        n_damaged=2,
        notes=("ledger.json: cannot be read",),
    )
    unscored = RunFacts("unscored", {}, texts=make_texts([], {"ein Hund": ""}))

    def configure(config: RunConfig) -> RunFacts:
        return replace(run, config=config, settings=to_plain_values(config))

    pages = {}
    for name in ("base", "base: model.norm=pre", "base: model.norm=pre; optimizer.eps=1e-8"):
        pages[name] = render_page([configure(list_recipes()[name])], None)
    run = configure(list_recipes()["base"])
    pages["base: with charts"] = render_page([run], SCRIPT)
    pages["base: not scored"] = render_page([replace(run, results=())], None)
    pages["base: nothing logged"] = render_page([replace(run, results=(), events=())], None)
    run = replace(run, settings={})
    other = replace(run, name="other", config=list_recipes()["base-enfr"], ledger=None)
    pages["two runs"] = render_page([run, other], None)
    pages["two runs: of one recipe"] = render_page([run] * 2, None)
    pages["two runs: with charts, and a third of little"] = render_page(
        [run, other, unscored], SCRIPT
    )
    pages["nine runs"] = render_page([replace(other, events=())] * 9, None)
    check_golden("report.txt", {name: hide_scripts(page) for name, page in pages.items()})


def hide_scripts(page: str) -> str:
    for name in ("page.css", "charts.js"):
        page = page.replace(read_page_file(name), f"({name})")
    page = re.sub(r"'sha256-[^']*'", "'sha256-...'", page)
    return re.sub('(?={"spec":|"layer":|"series":)', "\n", page)


@mark.parametrize(
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


@mark.parametrize("name", ["results.json", "translations.json", "vocab.model"])
def test_a_damaged_file_is_a_note_on_the_page(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff{")
    page = render_page([write_run(tmp_path)], None)
    assert re.search(rf'<p class="note">[^<]*{name}', page)
    assert "17.50 at update 300" in page


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with raises(UserError, match=r"config\.yaml: cannot be read \(.+\); give a run folder"):
        write_report(tmp_path)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = render_page([write_run(tmp_path)], SCRIPT)
    assert not re.search(r'<link|<img|src="|href="[^#]|@import|url\(|style="|\son\w+=', page)
    assert "prefers-color-scheme: dark" in page
    assert "unsafe" not in page.partition("</head>")[0]


def test_many_runs_fit_into_one_page(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "nll": 5 / step} for step in range(1, 1_000)]
    run = write_run(tmp_path, to_jsonl(lines))
    page = render_page([run] * 50, SCRIPT)
    (data,) = re.findall(r'<script type="application/json" id="report-charts">(.*?)</script>', page)
    (chart,) = json.loads(data)["charts"]
    assert len(chart["series"]) == 50
    assert sum(len(series["x"]) for series in chart["series"]) <= 3_000
    assert len(page) < 1_000_000


def make_texts(sources: list[str], pairs: dict[str, str]) -> ScoredTexts:
    return ScoredTexts("average", "test", "en-de", "0" * 64, sources, [*pairs], [*pairs.values()])


def test_lines_are_ranked_by_sacrebleus_chrf() -> None:
    pairs = {"ein Hund": "ein Hund", "eine Katze": "x", "Tag": "Tage"}
    scores = score_lines(make_texts(["a", "b", "c"], pairs))
    assert scores == [sentence_chrf(text, [reference]).score for reference, text in pairs.items()]
    assert rank_lines(scores) == [1, 2, 0]


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
