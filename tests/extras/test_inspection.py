"""The look into a store: every figure equals one counted by hand from the texts, and no text acts
on the terminal.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pytest import fixture, mark
from support.capture import Capture
from support.checkout import ROOT
from support.hostile_text import OBEYED, PAYLOADS
from support.rings import amount
from support.toy_corpus import sentences

from nmt.commands.prepare import main
from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig
from nmt.corpus.ledger import Ledger, format_ledger
from nmt.corpus.prepare import prepare
from nmt.data.store import open_store
from nmt.data.vocab import UNK, load_vocab
from nmt.extras.inspection import count_pieces, describe_store
from nmt.system.files import read_json, seal, write_json
from nmt.system.records import RecordReader

EVIL = "a\x1b[31mred\u202edcba\u200b\x9b2J"


@fixture
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
    ledger["corpora"][0] |= more
    write_json(store / "ledger.json", ledger)
    seal(store)
    return store


# ---- the figures ------------------------------------------------------------------------------------------------


def test_every_figure_equals_one_counted_by_hand(store: Path) -> None:
    shown = dict(line.split(": ") for line in describe_store(store).split("\n\n")[-1].splitlines())
    assert list(shown) == ["digest", "train en", "train de", "valid en", "valid de"]
    assert shown["digest"] == read_json(store / "ledger.json")["store"]
    vocab = load_vocab(store).src
    for split in ("train", "valid"):
        opened = open_store(store, split)
        for language, side in (("en", opened.src), ("de", opened.tgt)):
            lines = (store.parent / f"{split}.{language}").read_text().split("\n")
            texts = lines[:302] if split == "train" else lines  # the last pair is dropped
            n_words = sum(len(text.split()) for text in texts)
            n_pieces = len(side.ids)
            n_unk = side.ids.tolist().count(UNK)
            assert n_unk == (split == "train")  # one piece for two in a row
            figures = f"{n_pieces:,} pieces, {n_pieces / n_words:.3f} for each word, {n_unk} of them <unk>"
            assert shown[f"{split} {language}"] == figures
            for chunk in (1, 7):
                assert count_pieces(side, vocab, chunk) == figures


# ---- what is shown ----------------------------------------------------------------------------------------------


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
    text = describe_store(store)
    assert "1,234 pairs" in text and "22 sources and 333 targets" in text
    assert "unreadable; for example\n  x.en:7: bad\n\n" in text
    assert (
        f": 9 dropped, {rule}; for example\n  en  a<U+001B>[31mred<U+202E>dcba\u200b<U+009B>2J\n  de  "
        in text
    )
    assert "  en  one\n  de  zwei\n" in text


# ---- the command ------------------------------------------------------------------------------------------------


@mark.parametrize("text", PAYLOADS, ids=ascii)
def test_no_name_in_a_strangers_ledger_acts(ledger: Any, text: str) -> None:
    """The same lines as of a harmless one, whatever the names hold."""
    reader = RecordReader(str, takes_any_text=True)
    shown = format_ledger(reader.read(Ledger, rename_all(ledger, text)))
    assert OBEYED.isdisjoint(shown)
    assert shown.count("\n") == format_ledger(reader.read(Ledger, ledger)).count("\n")


@fixture(scope="module")
def ledger(module_path: Path) -> Any:
    store = make_store(module_path)
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


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as error:  # as argparse ends
        code = int(error.code or 0)
    return code, *capsys.readouterr()


def test_the_command_shows_it_and_changes_nothing(store: Path, capsys: Capture) -> None:
    before = {path: path.read_bytes() for path in store.iterdir()}
    code, out, err = run(capsys, "--inspect", str(store))
    assert (code, out, err) == (0, describe_store(store) + "\n", "")
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
    assert done.returncode == 0 and "for each word" in done.stdout, done.stderr


@mark.parametrize(
    "arguments, told",
    [
        ([], "--config FILE"),
        (["--inspect", "STORE", "--config", "demo.yaml"], "--inspect does not support --config"),
        (["--inspect", "STORE", "--on", "ray"], "--inspect does not support --on"),
        (
            ["--inspect", "STORE", "vocab.size=3"],
            "vocab.size=3: --inspect shows the store as it was made and accepts no settings",
        ),
        (["--inspect", "nowhere"], "nowhere: contains no prepared data"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], told: str, store: Path, capsys: Capture
) -> None:
    code, out, err = run(
        capsys, *(str(store) if argument == "STORE" else argument for argument in arguments)
    )
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err


@mark.parametrize(
    "name", ["ledger.json", "vocab.model", "train.src.ids.npy", "train.tgt.offsets.npy"]
)
def test_a_damaged_store_is_refused(name: str, store: Path, capsys: Capture) -> None:
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)
    code, out, err = run(capsys, "--inspect", str(store))
    assert (code, out, err.count("\n")) == (2, "", 1) and name in err


def test_an_id_beyond_the_vocabulary_is_refused(store: Path, capsys: Capture) -> None:
    ids = np.load(store / "train.src.ids.npy")
    ids[-1] = 999
    np.save(store / "train.src.ids.npy", ids)
    seal(store)
    code, _, err = run(capsys, "--inspect", str(store))
    assert code == 2 and "id 999" in err


# ---- offline ----------------------------------------------------------------------------------------------------


@mark.parametrize("command", amount(["prepare"], ["prepare", "train"]))
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
        "PYTHONPATH": str(ROOT),
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
