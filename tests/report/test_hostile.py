"""Reports of hostile runs: whatever stands in names, paths, corpora, texts, ledgers, results and
metrics is shown and does nothing, in Chromium and on a terminal.
"""

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest import MonkeyPatch
from support.browser import open_page
from support.capture import Capture
from support.hostile_text import OBEYED, PAYLOADS, check_together
from support.in_process import succeed
from support.needs import needs_chromium, needs_package
from support.page_elements import Elements

from nmt.commands.report import main as nmt_report
from nmt.config import RunConfig
from nmt.config_files import format_config, override_config
from nmt.corpus.ledger import BpeAccount, CorpusAccount, Ledger, SourceFile
from nmt.evaluate.results import DecodingSetting, Result, ScoredTestSet, add_result
from nmt.evaluate.scored_texts import ScoredTexts, write_scored_texts
from nmt.extras.report.facts import read_run
from nmt.extras.report.page import render_page
from nmt.score.score import Score
from nmt.system.escapes import escape_line
from nmt.system.strict_yaml import format_yaml

SCRIPTS = [
    *PAYLOADS,
    "</script><script>document.title='stolen'</script>",
    "<!--<script>",
    "'] + alert(1) + ['",
    "datum.x; alert(1)",
    "<style>*{display:none}</style>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<base href=http://evil.example/>",
    "<form action=http://evil.example><input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<math><a xlink:href=javascript:alert(1)>x",
    "${alert(1)}",
    "__proto__",
]  # fmt: skip
ALL_DRAWN = (
    "() => [...document.querySelectorAll('figure')].every((one) => one.querySelector('svg'))"
)
CENSUS = """() => {
  const own = [...document.querySelectorAll("*")].filter((one) => !one.closest(".plot > *"));
  return {
    tags: [...new Set(own.map((one) => one.tagName))].sort(),
    scripts: document.scripts.length,
    handlers: own.filter((one) => one.getAttributeNames().some((name) => name.startsWith("on"))).length,
    links: [...document.querySelectorAll("a")].filter((one) => !one.getAttribute("href").startsWith("#")).length,
    title: document.title,
    drawn: document.querySelectorAll("figure svg").length,
    figures: document.querySelectorAll("figure").length,
    text: document.body.textContent,
  };
}"""


def write_hostile_run(folder: Path, texts: Sequence[str]) -> Path:
    """Write a run in which these texts are wherever a stranger could write one, all in a row where there
    is one of its kind.
    """
    folder.mkdir(parents=True)
    texts = [text.replace("\0", "") for text in texts]  # which names cannot hold
    row = " ".join(texts)
    store = folder / "store"
    store.mkdir()
    config = override_config(RunConfig(), ["data.src=en", "data.tgt=de"])
    data = replace(config.data, store=str(store))
    (folder / "config.yaml").write_text(format_config(replace(config, name=row, data=data)))

    lines = []
    for i, text in enumerate(texts):
        sample = {"source": text, "reference": text, "translation": text}
        lines += [
            {"kind": "train", "step": i, "nll": 5.0 - i / 99, "lr": 0.1, text: text},
            {"kind": "valid", "step": i, "nll": 5.0, "bleu": i / 9, "signature": text},
            {"kind": "warning", "step": i, "message": text},
            {"kind": "sample", "step": i, "line": i, **sample},
        ]
    data_lines = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "metrics.jsonl").write_bytes(data_lines)

    write_hostile_results(folder, texts)
    others = [f"{text} of another kind" for text in texts]
    scored = ScoredTexts(row, row, row, row, texts, others, texts[::-1])
    write_scored_texts(folder, scored)
    write_hostile_ledger(store, texts)
    return folder


def write_hostile_results(folder: Path, texts: Sequence[str]) -> None:
    """Write a result with each text in all places of its texts."""
    for text in texts:
        test_set = ScoredTestSet(text, 1, "c" * 64, "d" * 64)
        score = Score(text, 1.0, text)
        digests = ("a" * 64, "b" * 64, test_set, text, "e" * 64)
        search: dict[str, DecodingSetting] = {"beam": text}
        ends = (text, [score], {text: text}, 1.0)
        add_result(folder, Result("now", text, 1, [text], *digests, search, *ends))


def write_hostile_ledger(store: Path, texts: Sequence[str]) -> None:
    corpora = []
    for text in texts:
        files = [SourceFile(text, 1, text, 1)]
        samples = {text: [[text, text]]}
        corpora.append(CorpusAccount(text, text, files, 2, 1, [1, 1], {text: 1}, samples))
    row = " ".join(texts)
    bpe = BpeAccount(row, 5, 5, 5, None)
    ledger = Ledger(
        {"data": {"src": row, "tgt": row}}, corpora, None, bpe, {row: row}, row, {}, row
    )
    (store / "ledger.json").write_text(json.dumps(ledger.to_plain()))


def read_hostile_page(folder: Path, texts: Sequence[str]) -> tuple[str, Elements]:
    """Read a page about a run with readable settings, and with others that this version refuses."""
    runs = [read_run(write_hostile_run(folder, texts))]
    row = " ".join(texts).replace("\0", "")
    settings = {"name": row, "out": row, "data": {"train": [{"src": row}, row]}}
    (folder / "config.yaml").write_text(format_yaml(settings), encoding="utf-8")
    page = render_page([*runs, read_run(folder)], "window.vegaEmbed = null;")
    return page, Elements(page)


def test_nothing_of_a_strangers_run_is_markup(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The tags and attributes are those of any page, and the texts show as they are."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for limit in ("sections.RESULTS_SHOWN", "sentences.LINES_SHOWN"):
        monkeypatch.setattr(f"nmt.extras.report.{limit}", len(PAYLOADS))
    folders = (tmp_path / str(number) for number in itertools.count())

    def check(texts: Sequence[str]) -> None:
        page, found = read_hostile_page(next(folders), texts)
        numbered = [f"harmless {i:02}" for i in range(len(texts))]
        _, harmless = read_hostile_page(next(folders), numbered)
        assert [tag for tag, _ in found.tags] == [tag for tag, _ in harmless.tags]
        for (_, attrs), (_, expected) in zip(found.tags, harmless.tags, strict=True):
            assert [name for name, _ in attrs] == [name for name, _ in expected]
        assert OBEYED.isdisjoint(page.replace("\n", ""))
        for text in texts:
            assert found.text.count(escape_line(text.replace("\0", ""))) >= 30, text

    check_together(PAYLOADS, check)


@needs_chromium()
@needs_package("vl_convert", "report")
def test_nothing_of_hostile_runs_is_executed(
    tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the power does not fail here
    one = write_hostile_run(tmp_path / "one", SCRIPTS)
    groups = [SCRIPTS[i::10] for i in range(10)]
    many = [write_hostile_run(tmp_path / f"run{i}", texts) for i, texts in enumerate(groups)]
    folder = "\x1b[31m<img src=x onerror=alert(1)>\x07".replace("/", "")
    shutil.copytree(one, tmp_path / folder)
    pages = [tmp_path / folder / "report.html", tmp_path / "many.html"]
    succeed(nmt_report, tmp_path / folder)
    succeed(nmt_report, *many, "-o", pages[1])
    assert not OBEYED & set("".join(capsys.readouterr())) - {"\n"}

    for page in pages:
        with open_page(page.as_uri()) as opened:
            opened.page.evaluate(
                "dispatchEvent(new Event('beforeprint'))"
            )  # which draws all charts
            opened.page.wait_for_function(ALL_DRAWN)
            found = opened.page.evaluate(CENSUS)
        assert opened.faults == []
        unwanted = {"IMG", "IFRAME", "FORM", "OBJECT", "BASE", "LINK", "MATH"}
        assert unwanted.isdisjoint(found["tags"]), sorted(unwanted & set(found["tags"]))
        assert (found["handlers"], found["links"]) == (0, 0)
        assert found["drawn"] >= found["figures"] > 2
        assert found["title"] != "stolen"
        for text in SCRIPTS[30:]:
            assert escape_line(text) in found["text"]
