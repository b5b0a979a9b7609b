"""The look into a store: every figure equals one counted by hand from the texts, and no text acts
on the terminal.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_text import OBEYED, PAYLOADS
from support.soaking import counted
from support.toy_corpus import sentences

from nmt.commands.prepare import main
from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig
from nmt.corpus import inspection
from nmt.corpus.inspection import (
    escape_invisible,
    format_report,
    inspect_store,
    spread_evenly,
    truncate,
)
from nmt.corpus.ledger import Ledger, format_ledger
from nmt.corpus.prepare import prepare
from nmt.data.store import open_store
from nmt.system.files import read_json, seal, write_json
from nmt.system.records import RecordReader

EVIL = "a\x1b[31mred\u202edcba\u200b\x9b2J"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def make_store(tmp_path: Path) -> Path:
    """One line holds characters too rare for the BPE, which are <unk>; one dev line is empty."""
    pairs = sentences(300, 5) + [
        ("\u0416\u0417 dog", "hund \u0429"),
        ("red " * 60, "rot " * 59),
        ("cat", " "),
    ]
    for i, side in enumerate(("en", "de")):
        (tmp_path / f"train.{side}").write_text("".join(pair[i] + "\n" for pair in pairs))
        (tmp_path / f"valid.{side}").write_text("red dog\n\nblue cat\n")
    data = DataConfig(
        root=str(tmp_path),
        store=str(tmp_path / "store"),
        clean=CleanConfig(max_words=80),
        train=(CorpusConfig(src="train.en", tgt="train.de"),),
        valid=CorpusConfig(src="valid.en", tgt="valid.de"),
    )
    prepare(data, VocabConfig(size=70, character_coverage=0.9995), 1)
    return tmp_path / "store"


def with_ledger(store: Path, **more: Any) -> Path:
    """The store as one whose first corpus has `more` in its ledger."""
    ledger = read_json(store / "ledger.json")
    for key in ("samples", "duplicates", "held_out"):
        ledger["corpora"][0].pop(key, None)
    ledger["corpora"][0] |= more
    write_json(store / "ledger.json", ledger)
    seal(store)
    return store


# ---- the figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_every_figure_equals_one_counted_by_hand(
    store: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "CHUNK", chunk)
    report = inspect_store(store).to_plain()
    for split in ("train", "valid"):
        opened = open_store(store, split)
        for name, language, side in (("src", "en", opened.src), ("tgt", "de", opened.tgt)):
            texts = (
                (store.parent / f"{split}.{language}")
                .read_text()
                .split("\n")[: 303 - (split == "train")]
            )
            ids = [side.ids[m:n].tolist() for m, n in pairwise(side.offsets)]
            lengths, found = [len(line) for line in ids], report["splits"][split][name]
            assert found["sentences"] == len(ids) == (302 if split == "train" else 3)
            assert found["pieces"] == sum(lengths) and found["longest"] == max(lengths)
            assert found["mean"] == pytest.approx(np.mean(lengths))
            assert [found[key] for key in ("median", "p90", "p99")] == [
                np.percentile(lengths, q, method="inverted_cdf") for q in (50, 90, 99)
            ]
            assert dict(found["lengths"]) == {n: lengths.count(n) for n in lengths}
            assert found["words"] == sum(len(text.split()) for text in texts)
            assert found["unk"] == sum(line.count(1) for line in ids)
            assert found["unk_share"] == pytest.approx(found["unk"] / sum(lengths))
    # One piece for two in a row
    assert [report["splits"]["train"][name]["unk"] for name in ("src", "tgt")] == [1, 1]


# ---- what is shown ----------------------------------------------------------------------------------------------


def test_the_pairs_stand_evenly_and_decode_to_their_text(store: Path) -> None:
    pairs = inspect_store(store).to_plain()["pairs"]
    assert [pair["number"] for pair in pairs] == [31, 91, 152, 212, 272]  # of 302
    lines = [
        (store.parent / f"train.{language}").read_text().split("\n") for language in ("en", "de")
    ]
    for pair in pairs:
        i = (pair["number"] - 1) % 302
        assert [pair["src"]["text"], pair["tgt"]["text"]] == [lines[0][i], lines[1][i]]
        assert "".join(pair["src"]["pieces"]).replace("\u2581", " ").strip() == pair["src"]["text"]
    assert spread_evenly(3, 5) == [0, 1, 2] and spread_evenly(0, 5) == []


def test_samples_duplicates_and_held_out_pairs_are_shown(store: Path) -> None:
    rule = next(iter(read_json(store / "ledger.json")["corpora"][0]["dropped"]))
    with_ledger(
        store,
        duplicates=1234,
        held_out={"dev": [1, 22, 333], "test": [0, 0, 4]},
        dropped={rule: 9, "unreadable": 1},
        samples={
            rule: [[EVIL, "\u05e9\u05dc\u05d5\u05dd"], ["one", "zwei"]],
            "unreadable": [["x.en:7: bad", ""]],
        },
    )
    text = format_report(inspect_store(store), 100)
    assert "1,234 pairs" in text and "22 sources and 333 targets" in text
    assert "unreadable; for example\n  x.en:7: bad\n" in text
    assert (
        f": 9 dropped, {rule}; for example\n  en  a<U+001B>[31mred<U+202E>dcba<U+200B><U+009B>2J\n  de  "
        in text
    )
    assert "  en  one\n  de  zwei\n" in text


def test_stores_of_older_versions_have_none_of_these(store: Path) -> None:
    text = format_report(inspect_store(with_ledger(store)), 100)
    assert "for example" not in text and "earlier one" not in text and "train.en + train.de" in text


@pytest.mark.parametrize("width", [40, 80, 100])
def test_no_line_but_of_the_tables_is_wider_than_the_terminal(store: Path, width: int) -> None:
    _, *blocks = format_report(inspect_store(store), width).split("\n\n")
    lines = [
        line for block in blocks if not block.startswith(" " * 9) for line in block.split("\n")
    ]
    assert len(lines) > 20 and max(map(len, lines)) <= width


# what st.text() draws, which first tries for seconds what UTF-8 can write
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, st.integers(4, 60))
def test_cut_text_is_harmless_and_fits(text: str, width: int) -> None:
    shown = truncate(text, width)
    assert shown.isprintable() and len(shown) <= width
    assert shown == escape_invisible(text) or (
        shown.endswith("\u2026") and escape_invisible(text).startswith(shown[:-1])
    )


def test_wide_characters_take_two_columns() -> None:
    assert (
        truncate("\u65e5\u672c\u8a9e", 6) == "\u65e5\u672c\u8a9e"
        and truncate("\u65e5\u672c\u8a9e", 5) == "\u65e5\u672c\u2026"
    )
    assert truncate("abcdef", 6) == "abcdef" and truncate("abcdefg", 6) == "abcde\u2026"


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", PAYLOADS, ids=ascii)
def test_no_name_in_a_strangers_ledger_acts(ledger: Any, text: str) -> None:
    """The same lines as of a harmless one, whatever the names hold."""
    reader = RecordReader(str, takes_any_text=True)
    shown = format_ledger(reader.read(Ledger, rename_all(ledger, text)))
    assert OBEYED.isdisjoint(shown)
    assert shown.count("\n") == format_ledger(reader.read(Ledger, ledger)).count("\n")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = make_store(tmp_path_factory.mktemp("ledger"))
    return read_json(with_ledger(store, held_out={"dev": [1, 2, 3]}, duplicates=4) / "ledger.json")


def rename_all(value: Any, text: str) -> Any:
    """A copy whose every string is `text`, and so is the name of each rule and set."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [rename_all(item, text) for item in value]
    if isinstance(value, dict):
        named = {}
        for key, item in value.items():
            is_name = isinstance(item, int | list) and key in ("dev", "empty side")
            named[text if is_name else key] = rename_all(item, text)
        return named
    return value


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as error:  # as argparse ends
        code = int(error.code or 0)
    return code, *capsys.readouterr()


def test_the_command_shows_the_same_as_text_and_as_json(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    before = {path: path.read_bytes() for path in store.iterdir()}
    code, out, err = run(capsys, "--inspect", str(store), "--json")
    assert (code, err) == (0, "") and json.loads(out) == json.loads(
        json.dumps(inspect_store(store).to_plain())
    )
    code, out, err = run(capsys, "--inspect", str(store))
    assert (code, err) == (0, "") and out.rstrip("\n") == format_report(inspect_store(store), 100)
    assert {path: path.read_bytes() for path in store.iterdir()} == before


def test_it_needs_neither_corpora_nor_torch(store: Path) -> None:
    for side in ("en", "de"):
        (store.parent / f"train.{side}").unlink()
    program = (
        "import sys; sys.modules['torch'] = None; from nmt.commands.prepare import main; "
        f"sys.exit(main(['--inspect', {str(store)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "pieces/word" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--config FILE"),
        (["--inspect", "STORE", "--config", "demo.yaml"], "--inspect does not support --config"),
        (["--inspect", "STORE", "--plan"], "--inspect does not support --plan"),
        (["--config", "demo.yaml", "--json"], "--json needs --inspect"),
        (
            ["--inspect", "STORE", "vocab.size=3"],
            "vocab.size=3: --inspect shows the store as it was made and accepts no settings",
        ),
        (["--inspect", "nowhere"], "nowhere: contains no prepared data"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], told: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys, *(str(store) if argument == "STORE" else argument for argument in arguments)
    )
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err


@pytest.mark.parametrize(
    "name", ["ledger.json", "vocab.model", "train.src.ids.npy", "train.tgt.offsets.npy"]
)
def test_a_damaged_store_is_refused(
    name: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)
    code, out, err = run(capsys, "--inspect", str(store))
    assert (code, out, err.count("\n")) == (2, "", 1) and name in err


def test_an_id_beyond_the_vocabulary_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.load(store / "train.src.ids.npy")
    ids[-1] = 999
    np.save(store / "train.src.ids.npy", ids)
    seal(store)
    code, _, err = run(capsys, "--inspect", str(store))
    assert code == 2 and "id 999" in err


# ---- offline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", counted(["prepare"], ["prepare", "train"]))
def test_offline_no_socket_is_opened(command: str, tmp_path: Path) -> None:
    program = f"""
import os, socket, sys
def refuse(*_):
    print("NETWORK", file=sys.stderr)
    raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = refuse
from nmt.commands.{command} import main
code = main(["--config", "base.yaml", "--offline"])
print("offline" if os.environ["HF_HUB_OFFLINE"] == "1" else "online")
sys.exit(code)
"""
    environment = {
        "PATH": "",
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 2 and "NETWORK" not in done.stderr and "wmt/wmt14" in done.stderr, (
        done.stderr
    )
    assert done.stdout == "offline\n"
