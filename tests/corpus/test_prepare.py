"""Preparation as its user sees it: the same bytes whatever kills it and wherever, and every line
accounted for.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.checkout import ROOT
from support.rings import amount
from support.stored_text import read_training_pairs
from support.waiting import until

from nmt.commands.prepare import main
from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig
from nmt.corpus.ledger import describe_mixture, find_mixture, format_ledger, read_ledger
from nmt.corpus.prepare import WORK_FOLDER, prepare
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError
from nmt.system.files import digest_file, lock, read_json, verify, write_json
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE
from nmt.system.strict_json import Fields

VOCAB = VocabConfig(size=60)
SYLLABLES = "ba de fi go hu ja ke li mo nu pa re si to vu wa xe yi zo".split()


def line(i: int) -> str:
    return " ".join(
        SYLLABLES[i * k % 17] + SYLLABLES[(i + k * k) % 19] for k in range(1, 2 + i % 7)
    )


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> CorpusConfig:
    path.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in pairs))
    return CorpusConfig(file=path.name)


@fixture
def root(tmp_path: Path) -> Path:
    """Two training corpora, with lines that must go, and a dev set, with lines that must stay."""
    folder = tmp_path / "raw"
    folder.mkdir()
    en = [line(i) for i in range(300)] + ["", "only english", "x " * 30, "a b c d e f"]
    de = [line(i + 1) for i in range(300)] + ["nur deutsch", " ", "kurz", "a"]
    (folder / "a.en").write_text("\n".join(en) + "\n")
    (folder / "a.de").write_text("\n".join(de) + "\n")
    write_pairs(folder / "b.tsv", [(line(i), line(2 * i)) for i in range(50, 90)])
    (folder / "dev.en").write_text("w1 w2\n\n  w3 \n")
    (folder / "dev.de").write_text("w1\nw4\u2028w5\nw6\n")
    (folder / "a.tgz").touch()
    return folder


B = CorpusConfig(file="b.tsv")


def config(root: Path, store: str = "store", **changes: object) -> DataConfig:
    values: dict[str, object] = {
        "root": str(root),
        "store": str(root.parent / store),
        "workers": 1,
        "valid": CorpusConfig(src="dev.en", tgt="dev.de"),
        "train": (CorpusConfig(src="a.en", tgt="a.de"), B, B),
        "clean": CleanConfig(max_words=20, max_ratio=4.0, max_pieces=15),
        **changes,
    }
    return DataConfig(**values)  # type: ignore[arg-type]


def make(data: DataConfig, vocab: VocabConfig = VOCAB, seed: int = 1) -> Path:
    assert prepare(data, vocab, seed)
    return Path(data.store)


def give_model(root: Path, store: str = "store", vocab: VocabConfig = VOCAB) -> None:
    """Put a model of another store beside the text, as own.model."""
    shutil.copy(make(config(root, store), vocab) / "vocab.model", root / "own.model")


def refuse(data: DataConfig, message: str, vocab: VocabConfig = VOCAB) -> None:
    with raises(UserError, match=message) as caught:
        prepare(data, vocab, 1)
    assert "\n" not in str(caught.value)


def contents(store: str | Path) -> dict[str, object]:
    """All that must not depend on where and how a store was made."""
    ledger = ledger_of(store)
    files = {
        path.name: digest_file(path)
        for path in Path(store).glob("[!.]*")
        if path.name not in (LEDGER_FILE, MANIFEST_FILE)
    }
    assert files == ledger["data"]
    return files | {key: value for key, value in ledger.items() if key != "command"}


def ledger_of(store: str | Path) -> Fields:
    return read_json(Path(store) / LEDGER_FILE)


def interrupt(data: DataConfig, monkeypatch: MonkeyPatch) -> Path:
    """Stop a preparation when all stages are done; returns its work folder."""

    def stop(*_: object, known: object = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.prepare.seal", stop)
        with raises(KeyboardInterrupt):
            prepare(data, VOCAB, 1)
    return Path(data.store) / WORK_FOLDER


# ---- what comes out ---------------------------------------------------------------------------------------------


def test_the_store_equals_the_rules_applied_by_hand(root: Path) -> None:
    store = make(config(root))
    verify(store)
    vocab = Vocab.load(store / "vocab.model")
    assert vocab.size == 60
    sides = [(root / name).read_text().split("\n")[:-1] for name in ("a.en", "a.de")]
    a = []
    for src, tgt in zip(*sides, strict=True):
        shorter, longer = sorted((len(src.split()), len(tgt.split())))
        if 0 < longer <= min(20, 4 * shorter):
            a.append((src, tgt))
    b = [
        (row.split("\t")[0], row.split("\t")[1])
        for row in (root / "b.tsv").read_text().split("\n")[:-1]
    ]
    a, b = ([pair for pair in pairs if max(map(len, vocab.encode(pair))) <= 15] for pairs in (a, b))
    assert read_training_pairs(store) == a + b + b
    assert not (store / WORK_FOLDER).exists()


def test_the_dev_set_is_taken_as_it_is(root: Path) -> None:
    store = make(config(root, valid=CorpusConfig(src="dev.en", tgt="dev.de")))
    assert (store / "valid.src.txt").read_bytes() == (root / "dev.en").read_bytes()
    assert (store / "valid.tgt.txt").read_bytes() == (root / "dev.de").read_bytes()
    valid = open_store(store, "valid")
    assert len(valid) == 3 and valid.src.lengths[1] == 1  # only eos


def test_without_a_dev_set_there_is_none(root: Path) -> None:
    store = make(config(root, valid=None))
    assert not list(store.glob("valid*"))
    with raises(UserError, match="has no valid split"):
        open_store(store, "valid")


def test_sides_that_do_not_belong_together_and_a_dev_set_that_is_tested_on_are_warned_of(
    root: Path, capsys: Capture
) -> None:
    lines = [" ".join([f"w{i}"] * (1 + i * 7 % 10)) for i in range(300)]

    def find_warnings(name: str, tgt: list[str], src: list[str] = lines, **changes: Any) -> str:
        train = write_pairs(root / f"{name}.tsv", list(zip(src, tgt, strict=True)))
        make(config(root, name, train=(train,), **changes))
        return read_stderr(capsys)

    dev = CorpusConfig(src="dev.en", tgt="dev.de")
    written = find_warnings("shifted", [*lines[1:], lines[0]], valid=dev, test=dev)
    sides = "shifted.tsv, source and shifted.tsv, target"
    assert f"{sides} do not look like translations of each other" in written
    assert "warning: data.valid and data.test are one corpus" in written
    assert "warning" not in find_warnings("aligned", [f"{line} w1" for line in lines])
    spaced = [f"{line} ." for line in lines]
    written = find_warnings("third", [f"{line}@@ w1" for line in lines], spaced)
    assert "warning: third.tsv, source:1: spaces before commas and full stops" in written
    assert "warning: third.tsv, target:1: BPE was left in" in written


def test_the_ledger_accounts_for_every_line(root: Path) -> None:
    store = make(config(root))
    ledger = ledger_of(store)
    a, b, again, dev = ledger["corpora"]
    assert again == b | {"duplicates": 40}  # what is listed twice is in the store twice
    assert (a["dropped"]["empty side"], a["dropped"]["more than 20 words"]) == (2, 1)
    assert a["samples"]["empty side"] == [["", "nur deutsch"], ["only english", ""]]
    assert a["samples"]["more than 20 words"] == [["x " * 29 + "x", "kurz"]]
    for rule, n in a["dropped"].items():
        assert len(a["samples"][rule]) == min(n, 3)
    for corpus, lines in ((a, 304), (b, 40), (dev, 3)):
        assert corpus["lines"] == lines == corpus["kept"] + sum(corpus["dropped"].values())
    train = open_store(store, "train")
    assert a["kept"] + b["kept"] + again["kept"] == len(train)
    n_tokens = [a["tokens"][i] + 2 * b["tokens"][i] for i in (0, 1)]
    assert n_tokens == [len(train.src.ids), len(train.tgt.ids)]
    for name, file in zip(("a.en", "a.de"), a["files"], strict=True):
        size = (root / name).stat().st_size
        assert file == {
            "name": name,
            "sha256": digest_file(root / name),
            "size": size,
            "lines": 304,
        }
    bpe = ledger["bpe"]["sha256"]
    assert bpe == Vocab.load(store / "vocab.model").digest
    table = format_ledger(read_ledger(store))
    names = ["a.en + a.de", "dev.en + dev.de (dev)", "2 empty side"]
    assert all(text in table for text in names)
    assert digest_file(root / "b.tsv") not in table and bpe not in table  # they are in the ledger


# ---- the same bytes ---------------------------------------------------------------------------------------------


def test_equal_whatever_the_workers_the_place_and_the_clock(
    root: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Dev and test set have several shards too."""
    pairs = [(line(i), line(i + 1)) for i in range(0, 600, 3)]
    dev, test = write_pairs(root / "dev.tsv", pairs[:90]), write_pairs(root / "test.tsv", pairs)
    truth = contents(make(config(root, valid=dev, test=test)))
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 64)
        assert contents(make(config(root, "two", workers=3, valid=dev, test=test))) == truth
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(root, elsewhere)
    for file in elsewhere.iterdir():
        os.utime(file, (1e9, 1e9))
    assert contents(make(config(elsewhere, valid=dev, test=test))) == truth


def test_the_seed_draws_the_sample_and_nothing_else(root: Path) -> None:
    all_lines, some_lines = (VocabConfig(size=60, sample_sentences=n) for n in (10_000, 100))
    assert contents(make(config(root, "a"), all_lines, 1)) == contents(
        make(config(root, "b"), all_lines, 2)
    )
    c = contents(make(config(root, "c"), some_lines, 1))
    assert c == contents(make(config(root, "d"), some_lines, 1))
    assert c != contents(make(config(root, "e"), some_lines, 2))
    bpe = ledger_of(root.parent / "c")["bpe"]
    assert (bpe["lines"], bpe["seed"]) == (100, 1)
    assert not prepare(config(root, "c"), some_lines, 2)


KILLS = """
import os, signal, sys
from nmt.system import files
from nmt.system import progress
from nmt.config_files import load_config
from nmt.corpus import prepare
from nmt.corpus import stages

def run(name, n):  # in a process of its own, killed at the n-th moment
    left = n
    def moment(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:
        os.fsync = lambda _: None  # the disk itself is not on trial
        files.on_change = progress.Progress.advance = moment
        stages.PAIRS_PER_SHARD = 150
        config = load_config(sys.argv[1], ["data.store=" + name, "data.workers=1"])
        prepare.prepare(config.data, config.vocab, config.seed)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.wait()[1])

step = int(sys.argv[2])
n = 1
while (code := run(f"store-{n}", n)) == -signal.SIGKILL:
    assert run(f"store-{n}", 0) == 0
    n += step
assert code == 0, code
"""


def test_killed_at_any_moment_and_restarted_it_ends_with_the_same_bytes(
    root: Path, tmp_path: Path
) -> None:
    """In `make test` every seventh moment, in `make soak` each."""
    (tmp_path / "c.yaml").write_text(
        f"data: {{root: {root}, train: [{{src: a.en, tgt: a.de}}, {{file: b.tsv}}],"
        " valid: {src: dev.en, tgt: dev.de}}\n"
        "vocab: {size: 60}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", KILLS, "c.yaml", str(amount(7, 1))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    stores = sorted(tmp_path.glob("store-*"))
    assert len(stores) > amount(5, 40) and not list(tmp_path.glob("store-*/.*/*"))
    undisturbed = contents(stores[0])
    assert all(contents(store) == undisturbed for store in stores)


def test_finished_stages_are_not_done_again(root: Path, monkeypatch: MonkeyPatch) -> None:
    interrupt(config(root), monkeypatch)

    def fail(*_: object) -> None:
        raise AssertionError

    for work in ("ShardCollector.__call__", "count_words", "train_bpe", "ShardEncoder.__call__"):
        monkeypatch.setattr(f"nmt.corpus.stages.{work}", fail)
    verify(make(config(root)))


def test_an_unfinished_preparation_follows_changed_settings(
    root: Path, monkeypatch: MonkeyPatch
) -> None:
    truth = contents(make(config(root, "truth", valid=None), VocabConfig(size=50)))
    interrupt(config(root), monkeypatch)
    assert contents(make(config(root, valid=None), VocabConfig(size=50))) == truth


@mark.parametrize("content", [b"", None])
def test_a_stage_without_a_whole_done_file_is_done_again(
    root: Path, monkeypatch: MonkeyPatch, content: bytes | None
) -> None:
    truth = contents(make(config(root, "truth")))
    for done in interrupt(config(root), monkeypatch).glob("*/done.json"):
        done.unlink() if content is None else done.write_bytes(content)
    assert contents(make(config(root))) == truth


def test_what_another_version_left_is_not_continued(root: Path, monkeypatch: MonkeyPatch) -> None:
    truth = contents(make(config(root, "truth")))
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.stages.LAYOUT", 1)
        work = interrupt(config(root), monkeypatch)
    for text in work.rglob("*.src.txt"):
        text.write_bytes(text.read_bytes().replace(b"a", b"o"))  # of the same size
    assert contents(make(config(root))) == truth


# ---- rules over the whole text, and what is given -----------------------------------------------------------------


@mark.parametrize("is_dropped", [False, True])
def test_repeats_are_counted_always_and_dropped_on_request(
    root: Path, monkeypatch: MonkeyPatch, is_dropped: bool
) -> None:
    rng = Random(5)
    pairs = [(line(rng.randrange(40)), line(rng.randrange(3))) for _ in range(400)]
    train = (write_pairs(root / "c.tsv", pairs[:150]), write_pairs(root / "d.tsv", pairs[150:]))
    monkeypatch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 64)
    clean = CleanConfig(duplicates=is_dropped)
    store = make(config(root, train=train, clean=clean))
    assert read_training_pairs(store) == (list(dict.fromkeys(pairs)) if is_dropped else pairs)
    n_first = len(set(pairs[:150]))
    n_repeats = [150 - n_first, 250 - len(set(pairs)) + n_first]
    for corpus, n in zip(ledger_of(store)["corpora"], n_repeats, strict=False):
        assert corpus["duplicates"] == n
        assert corpus["dropped"].get("duplicate") == (n if is_dropped else None)


@mark.parametrize("rule, gone", [("keep", []), ("drop-pairs", [4]), ("drop-sides", [4, 8, 10])])
def test_sentences_of_dev_and_test_are_counted_always_and_dropped_on_request(
    root: Path, rule: str, gone: list[int]
) -> None:
    numbers = range(0, 60, 2)
    train = write_pairs(root / "c.tsv", [(line(i), line(i + 1)) for i in numbers])
    (root / "dev.tsv").write_text(f" {line(4)}\t{line(5)} \n{line(8)}\tanders\n\t\n")
    test = write_pairs(root / "test.tsv", [("other", line(11))])
    dev = CorpusConfig(file="dev.tsv")
    clean = CleanConfig(held_out=rule)  # type: ignore[arg-type]
    store = make(config(root, train=(train,), clean=clean, valid=dev, test=test))
    assert read_training_pairs(store) == [(line(i), line(i + 1)) for i in numbers if i not in gone]
    assert ledger_of(store)["corpora"][0]["held_out"] == {"dev": [1, 2, 1], "test": [0, 0, 1]}
    shown = format_ledger(read_ledger(store))
    assert "shares 1 pairs, 2 sources and 1 targets with the dev set; dropped: " in shown
    assert ("dropped: none" in shown) == (rule == "keep")


def test_a_test_set_matters_only_where_it_decides(root: Path, capsys: Capture) -> None:
    lost = CorpusConfig(file="lost.tsv")
    make(config(root, test=lost))
    assert "not searched for sentences of the test set" in read_stderr(capsys)
    strict = CleanConfig(held_out="drop-pairs")
    refuse(config(root, "two", test=lost, clean=strict), r"lost\.tsv: not found")

    # one that decides must stay what it was
    test = write_pairs(root / "test.tsv", [("a", "b")])
    lenient = config(root, "lenient", test=test, clean=CleanConfig())
    decided = config(root, "decided", test=test, clean=strict)
    for data in (lenient, decided):
        files = ledger_of(make(data))["test"]["files"]
        digest = digest_file(root / "test.tsv")
        assert files == [{"name": "test.tsv", "size": 4, "lines": 1, "sha256": digest}]
    (root / "test.tsv").write_text("c\td\n")
    assert not prepare(lenient, VOCAB, 1)
    refuse(decided, r"test\.tsv: differs from the file that .*was prepared from")


def test_bad_lines_of_the_dev_set_are_accounted_for(root: Path) -> None:
    (root / "dev.en").write_bytes(b"w1 \xff\nw2\nw3\n")
    dev = ledger_of(make(config(root, on_bad_line="skip")))["corpora"][-1]
    assert (dev["lines"], dev["kept"], dev["dropped"]) == (3, 2, {"unreadable": 1})
    (root / "dev.en").write_bytes(b"\xff\n" * 3)
    refuse(config(root, "two", on_bad_line="skip"), r"data\.valid: it contains no usable pair")


def test_a_given_model_is_used_and_held_on_to(root: Path) -> None:
    give_model(root)
    data = config(root, "two", train=(B,))
    given = VocabConfig(model="own.model")
    store = make(data, given)
    digest = digest_file(root / "own.model")
    assert digest_file(store / "vocab.model") == digest == ledger_of(store)["bpe"]["sha256"]
    assert not prepare(data, replace(given, size=7), 1)
    give_model(root, "three", VocabConfig(size=50))
    refuse(data, r"own\.model: differs from the file that .*two was prepared from", given)
    (root / "own.model").write_bytes(b"none")
    refuse(data, r"vocab\.model: .*own\.model: damaged BPE model", given)
    message = r"vocab\.model: .*/none: cannot be read .* data\.root=.*/raw"
    refuse(config(root, "four"), message, VocabConfig(model="none"))


def test_a_full_disk_is_told_with_figures_and_nothing_is_lost(
    root: Path, monkeypatch: MonkeyPatch
) -> None:
    truth = contents(make(config(root, "truth")))
    message = r": about [\d,]+ bytes are needed in all, and [\d,]+ are free; free"
    store = root.parent / "store"
    for n_stages, code in ((1, errno.ENOSPC), (3, errno.EFBIG)):
        left = [write_json] * n_stages

        def write(path: Path, value: object, left: list[Any] = left, code: int = code) -> None:
            if not left:
                raise OSError(code, os.strerror(code))
            left.pop()(path, value)

        with monkeypatch.context() as patch:
            patch.setattr("nmt.corpus.stages.write_json", write)
            refuse(config(root), os.strerror(code) + message)
        assert len(list(store.glob(f"{WORK_FOLDER}/*/done.json"))) >= n_stages
    assert contents(make(config(root))) == truth
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    refuse(config(root, "three"), message)
    assert not (root.parent / "three").exists()


def test_a_tag_comes_in_front_of_each_source_as_one_piece(root: Path) -> None:
    train = write_pairs(root / "b.tsv", [("ba de", "fi"), ("ba", "de fi"), ("<bt> go <bt>", "hu")])
    valid = CorpusConfig(src="dev.en", tgt="dev.de", tag="<bt>")
    tagged = (replace(train, tag="<bt>"), train)
    data = config(root, train=tagged, valid=valid, clean=CleanConfig(max_pieces=None))
    small = VocabConfig(size=28)
    folder = make(data, small)

    vocab = Vocab.load(folder / "vocab.model")
    tag = vocab.find_symbol("<bt>")
    store = open_store(folder, "train")
    rows = [store.src.ids[m:n].tolist() for m, n in pairwise(store.src.offsets)]
    plain = vocab.encode(["ba de", "ba", "<bt> go <bt>"])
    assert rows == [[tag, *row] for row in plain] + plain
    assert tag not in store.tgt.ids and tag not in sum(plain, [])

    dev = open_store(folder, "valid").src
    assert dev.ids[: dev.offsets[1]].tolist() == [tag, *vocab.encode(["w1 w2"])[0]]
    assert (folder / "valid.src.txt").read_text() == "w1 w2\n\n  w3 \n"

    shown = format_ledger(read_ledger(folder)).split("\n")
    assert [row.split("  ")[0] for row in shown[1:3]] == ["<bt> b.tsv", "b.tsv"]
    refuse(replace(data, train=(train, train)), r"data\.train\[0\]\.tag <bt> -> None", small)


def test_a_tag_counts_as_a_piece(root: Path) -> None:
    train = write_pairs(root / "b.tsv", [(line(i), line(i)) for i in range(60)])
    for name, tag in (("plain", None), ("tagged", "<bt>")):
        corpora = (replace(train, tag=tag),)
        store = make(config(root, name, train=corpora, clean=CleanConfig(max_pieces=9)))
        assert open_store(store, "train").src.lengths.max() - 1 == 9


def test_a_given_model_gets_symbols_that_it_lacks(root: Path) -> None:
    give_model(root)
    given = VocabConfig(model="own.model", user_symbols=("<url>",))
    train = (replace(B, tag="<bt>"), replace(B, tag="<url>"))
    tagged = config(root, "two", train=train)
    grown = Vocab.load(make(tagged, given) / "vocab.model")
    own = Vocab.load(root / "own.model")
    assert grown.extends(own) and grown.pieces([own.size, own.size + 1]) == ["<url>", "<bt>"]
    assert not prepare(tagged, given, 1)
    plain = VocabConfig(model="own.model")
    refuse(tagged, r"vocab\.user_symbols\[0\] <url> -> None", plain)

    # what cannot be added
    message = "own.model: .* is already an ordinary piece .*; leave it out of vocab.user_symbols"
    piece = own.pieces([own.size - 1])[0]
    refuse(config(root, "four"), message, replace(plain, user_symbols=(piece,)))
    (root / "own.model").write_bytes(grown.model)  # where <bt> is in no text
    refuse(config(root, "four"), message, replace(plain, user_symbols=("<bt>",)))


def test_a_given_model_must_have_the_tag_of_the_dev_set(root: Path) -> None:
    give_model(root)
    given = VocabConfig(model="own.model")
    tagged = config(root, "two", valid=CorpusConfig(src="dev.en", tgt="dev.de", tag="<bt>"))
    refuse(tagged, r"vocab\.model=own\.model: '<bt>' is not a symbol .*user_symbols", given)
    reserved = VocabConfig(size=60, user_symbols=("<bt>",))
    give_model(root, "three", reserved)
    make(tagged, given)


def test_weights_leave_the_store_as_it_is_and_may_change(root: Path) -> None:
    plain = config(root, train=(CorpusConfig(src="a.en", tgt="a.de"), B))
    store = make(plain)
    weights = (replace(plain.train[0], weight=0.5), replace(plain.train[1], weight=2.5))
    weighted = config(root, "weighted", train=weights)
    ledger, with_weights = read_ledger(store), read_ledger(make(weighted))
    assert ledger.data == with_weights.data and ledger.settings == with_weights.settings
    shown = format_ledger(with_weights).split("\n")
    assert " x 0.5 " in shown[1] and " x 2.5 " in shown[2]
    assert " x " not in format_ledger(ledger)

    # the store of either serves both
    for data in (replace(weighted, store=plain.store), replace(plain, temperature=5.0)):
        assert not prepare(data, VOCAB, 1)
    n_pairs = len(open_store(store, "train"))
    assert find_mixture(ledger, plain, n_pairs) is None
    mixture = find_mixture(ledger, weighted, n_pairs)
    assert mixture is not None
    sizes = [corpus.kept for corpus in ledger.corpora if corpus.split == "train"]
    assert [share.stored for share in mixture.shares] == sizes
    assert [share.drawn for share in mixture.shares] == [round(0.5 * sizes[0]), 80]
    assert describe_mixture(mixture, weighted).endswith(", 80 of b.tsv (32)")
    with raises(UserError, match=r"ledger\.json: has corpora of .* prepare another data"):
        find_mixture(ledger, weighted, n_pairs + 1)


# ---- recognised or refused --------------------------------------------------------------------------------------


def test_a_complete_store_is_recognised_even_without_its_sources(root: Path) -> None:
    before = contents(make(config(root)))
    assert not prepare(config(root, workers=7), VOCAB, 1)
    shutil.rmtree(root)
    assert not prepare(config(root, test=CorpusConfig(demo="test")), VOCAB, 1)
    assert contents(root.parent / "store") == before


def test_a_rule_keeps_its_counts_whatever_it_is_called(root: Path) -> None:
    store = make(config(root))
    ledger = ledger_of(store)
    dropped = {"repeat": 3, "scores": 5}
    ledger["corpora"][0] |= {"dropped": dropped, "samples": {}}
    write_json(store / LEDGER_FILE, ledger)
    assert read_ledger(store).corpora[0].dropped == dropped


@mark.parametrize(
    "changes, size, named",
    [
        ({}, 50, "vocab.size 60 -> 50"),
        ({"clean": CleanConfig()}, 60, "data.clean.max_words 20 -> 250"),
        ({"train": (CorpusConfig(src="a.en", tgt="a.de"),)}, 60, r"data.train\[1\].file b.tsv -> "),
        ({"valid": None}, 60, "data.valid.src dev.en -> None"),
        ({"src": "de", "tgt": "en"}, 60, "data.src en -> de"),
    ],
)
def test_other_settings_are_refused_by_name(
    root: Path, changes: Fields, size: int, named: str
) -> None:
    make(config(root))
    message = rf"prepared with other settings \(.*{named}.*\); give another data\.store=DIR"
    refuse(config(root, **changes), message, VocabConfig(size=size))


def test_changed_inputs_are_noticed(root: Path) -> None:
    make(config(root))
    os.utime(root / "b.tsv")  # touched, not changed
    assert not prepare(config(root), VOCAB, 1)
    other = root.parent / "other"
    shutil.copytree(root, other)
    assert not prepare(config(other), VOCAB, 1)  # the same files at another place
    original = (other / "b.tsv").read_text()
    rows = original.split("\n")
    swapped = "\n".join([rows[1], rows[0], *rows[2:]])  # of the same size
    for text in (original + "more\tmehr\n", original.replace("ba", "bo", 1), swapped):
        (other / "b.tsv").write_text(text)
        refuse(config(other), r"other/b\.tsv: differs from the file that .*store was prepared from")
    assert not prepare(config(root), VOCAB, 1)


def test_a_file_changed_while_it_is_read_is_refused(root: Path, monkeypatch: MonkeyPatch) -> None:
    def change_and_digest(path: Path) -> str:
        os.utime(root / "b.tsv", (1e9, 1e9))
        return digest_file(path)

    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.stages.digest_source", change_and_digest)
        refuse(config(root, train=(B,)), r"b\.tsv: changed while it was being read; run the comm")
    make(config(root, train=(B,)))


def test_a_store_in_a_folder_that_cannot_be_written_is_recognised(
    root: Path, monkeypatch: MonkeyPatch
) -> None:
    make(config(root))

    def fail(path: Path) -> Path:
        raise UserError(f"{path}: cannot be written")

    monkeypatch.setattr("nmt.corpus.prepare.make_folder", fail)
    assert not prepare(config(root), VOCAB, 1)


@mark.parametrize("damage", ["vocab.model", "train.src.ids.npy", "ledger.json", "manifest.json"])
def test_a_damaged_store_is_not_taken_for_a_whole_one(root: Path, damage: str) -> None:
    (make(config(root)) / damage).write_text("{}")
    refuse(config(root), "damaged")


def test_a_config_may_have_any_name(root: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nmt-prepare", "--config", "b\udce9.yaml"])
    assert ledger_of(make(config(root)))["command"] == "nmt-prepare --config 'b\udce9.yaml'"


@mark.parametrize("file", ["done.json", "00000.npz"], ids=["finished", "begun"])
def test_two_processes_do_not_meet(file: str, root: Path) -> None:
    work = root.parent / "store" / WORK_FOLDER
    (work / "train.0").mkdir(parents=True)
    (work / "train.0" / file).touch()
    with lock(work, "preparing"):
        refuse(config(root), "/store/.*: is in use by preparing .* pid")
        assert (work / "train.0" / file).exists()  # the work of the process that holds the lock
    assert not work.with_name(".lock").exists()
    make(config(root))
    assert not work.exists()


def test_whoever_waits_takes_the_store_that_another_has_made(root: Path, capsys: Capture) -> None:
    done, data = make(config(root, "done")), config(root)
    store = Path(data.store)
    (store / WORK_FOLDER).mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with lock(store / WORK_FOLDER, "preparing"):
            is_new = pool.submit(prepare, data, VOCAB, 1, patience_s=60.0)
            until(lambda: "waiting for it" in read_stderr(capsys))
            shutil.copytree(done, store, dirs_exist_ok=True)
            shutil.rmtree(store / WORK_FOLDER)
        assert is_new.result(60) is False
    assert contents(store) == contents(done) and not (store / WORK_FOLDER).exists()


def test_a_work_folder_that_is_a_link_is_refused(root: Path) -> None:
    (root.parent / "store").mkdir()
    (root.parent / "store" / WORK_FOLDER).symlink_to(root)
    refuse(config(root), "is a link; remove it")


@mark.parametrize(
    "changes, size, message",
    [
        ({"train": ()}, 60, "data.train: no corpus given"),
        ({"train": (CorpusConfig(src="gone.en", tgt="a.de"),)}, 60, "gone.en: not found"),
        ({"valid": CorpusConfig(src="dev.en", tgt="gone.de")}, 60, "gone.de: not found"),
        (
            {"train": (CorpusConfig(src="a.tgz", tgt="a.de"),)},
            60,
            "is an archive; give archive: a.tgz",
        ),
        ({"clean": CleanConfig(max_words=0)}, 60, "data.train: no pairs are left after cleaning"),
        (
            {"train": (B,), "valid": B, "clean": CleanConfig(held_out="drop-sides")},
            60,
            "check data.clean and the corpora, and that data.valid and data.test are other text",
        ),
        ({"clean": CleanConfig(max_pieces=0)}, 60, "data.train: no pairs are left after cleaning"),
        ({}, 5000, "vocab.size: 5000 is too large"),
        ({"store": "/proc/nothing/store"}, 60, "cannot be written"),
        ({"store": "raw"}, 60, "exists but is not a prepared store"),
    ],
)
def test_mistakes_leave_no_store(root: Path, changes: Fields, size: int, message: str) -> None:
    refuse(config(root, **changes), re.escape(message), VocabConfig(size=size))
    assert not (root / MANIFEST_FILE).exists()
    work = root.parent / "store" / WORK_FOLDER
    assert not (root.parent / "store").exists() or list(work.glob("*/done.json"))


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command_says_where_and_that_it_is_done(root: Path, capsys: Capture) -> None:
    path = root / "c.yaml"
    path.write_text(f"data: {{root: {root}, train: [{{file: b.tsv}}]}}\nvocab: {{size: 40}}\n")
    arguments = ["--config", str(path), f"data.store={root}/made"]
    for message in (f"prepared: {root}/made", f"already prepared: {root}/made"):
        assert main(arguments) == 0
        assert message in read_stderr(capsys)
    assert main([*arguments, "vocab.size=41"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nmt-prepare: error: ") and captured.err.count("\n") == 1
    assert captured.out == ""
