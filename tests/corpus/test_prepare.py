"""Preparation as its user sees it: the same bytes whatever kills it and wherever, and every line
accounted for.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.needs import REAL_TEXT, needs_text
from support.soaking import IS_SOAK, counted

from nmt.commands.prepare import main
from nmt.config import CleanConfig, CorpusConfig, DataConfig, VocabConfig
from nmt.corpus.ledger import describe_mixture, format_ledger, read_ledger, read_mixture
from nmt.corpus.prepare import prepare
from nmt.corpus.shards import find_finished_shards
from nmt.data.store import open_store
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError
from nmt.system.files import digest_file, lock, verify
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE

REPOSITORY = Path(__file__).parents[2]
VOCAB = VocabConfig(size=60)
SYLLABLES = "ba de fi go hu ja ke li mo nu pa re si to vu wa xe yi zo".split()


def line(i: int) -> str:
    return " ".join(
        SYLLABLES[i * k % 17] + SYLLABLES[(i + k * k) % 19] for k in range(1, 2 + i % 7)
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two training corpora, with lines that must go, and a dev set, with lines that must stay."""
    folder = tmp_path / "raw"
    folder.mkdir()
    en = [line(i) for i in range(300)] + ["", "only english", "x " * 30, "a b c d e f"]
    de = [line(i + 1) for i in range(300)] + ["nur deutsch", " ", "kurz", "a"]
    (folder / "a.en").write_text("\n".join(en) + "\n")
    (folder / "a.de").write_text("\n".join(de) + "\n")
    (folder / "b.tsv").write_text("".join(f"{line(i)}\t{line(2 * i)}\n" for i in range(50, 90)))
    (folder / "dev.en").write_text("w1 w2\n\n  w3 \n")
    (folder / "dev.de").write_text("w1\nw4\u2028w5\nw6\n")
    (folder / "a.tgz").touch()
    return folder


def config(root: Path, **changes: object) -> DataConfig:
    values: dict[str, object] = {
        "root": str(root),
        "store": str(root.parent / "store"),
        "valid": CorpusConfig(src="dev.en", tgt="dev.de"),
        "train": (CorpusConfig(src="a.en", tgt="a.de"), CorpusConfig(file="b.tsv", repeat=2)),
        "clean": CleanConfig(max_words=20, max_ratio=4.0, max_pieces=15),
        **changes,
    }
    return DataConfig(**values)  # type: ignore[arg-type]


def contents(store: str | Path) -> dict[str, object]:
    """All that must not depend on where and how a store was made."""
    ledger = json.loads((Path(store) / LEDGER_FILE).read_text())
    files = {
        path.name: digest_file(path)
        for path in Path(store).glob("[!.]*")
        if path.name not in (LEDGER_FILE, MANIFEST_FILE)
    }
    assert files == ledger["data"]
    return files | {key: value for key, value in ledger.items() if key != "command"}


# ---- what comes out ---------------------------------------------------------------------------------------------


def test_the_store_equals_the_rules_applied_by_hand(root: Path) -> None:
    data = config(root)
    assert prepare(data, VOCAB, seed=1)
    store = Path(data.store)
    verify(store)
    vocab = Vocab.load(store / "vocab.model")
    assert vocab.size == 60
    sides = ((root / name).read_text().split("\n") for name in ("a.en", "a.de"))
    a = [
        (s, t)
        for s, t in zip(*sides, strict=True)
        if s.strip()
        and t.strip()
        and max(len(s.split()), len(t.split())) <= min(20, 4 * len(s.split()), 4 * len(t.split()))
    ]
    b = [
        (s, t)
        for s, _, t in (
            row.partition("\t") for row in (root / "b.tsv").read_text().split("\n")[:-1]
        )
    ]
    a, b = ([pair for pair in pairs if max(map(len, vocab.encode(pair))) <= 15] for pairs in (a, b))
    train = open_store(store, "train", vocab)
    for i, side in enumerate((train.src, train.tgt)):
        ids = [side.ids[m:n].tolist() for m, n in pairwise(side.offsets)]
        assert vocab.decode(ids) == [pair[i] for pair in a + b + b]
    assert not list(store.parent.glob("*.work"))


def test_the_dev_set_is_taken_as_it_is(root: Path) -> None:
    data = config(root)
    prepare(data, VOCAB, 1)
    store = Path(data.store)
    assert (store / "valid.src.txt").read_bytes() == (root / "dev.en").read_bytes()
    assert (store / "valid.tgt.txt").read_bytes() == (root / "dev.de").read_bytes()
    valid = open_store(store, "valid")
    assert len(valid) == 3 and valid.src.lengths[1] == 1  # only eos
    repeated = config(
        root, store=f"{data.store}2", valid=CorpusConfig(src="dev.en", tgt="dev.de", repeat=3)
    )
    prepare(repeated, VOCAB, 1)
    assert len(open_store(Path(repeated.store), "valid")) == 3


def test_without_a_dev_set_there_is_none(root: Path) -> None:
    data = config(root, valid=None)
    prepare(data, VOCAB, 1)
    assert not list(Path(data.store).glob("valid*"))
    with pytest.raises(UserError, match="has no valid split"):
        open_store(Path(data.store), "valid")


def test_the_ledger_accounts_for_every_line(root: Path) -> None:
    data = config(root)
    prepare(data, VOCAB, 1)
    ledger = json.loads((Path(data.store) / "ledger.json").read_text())
    a, b, dev = ledger["corpora"]
    assert {
        rule: a["dropped"][rule]
        for rule in ("empty side", "more than 20 words", "length ratio above 4")
    } == {
        "empty side": 2,
        "more than 20 words": 1,
        "length ratio above 4": a["dropped"]["length ratio above 4"],
    }
    assert a["samples"]["empty side"] == [["", "nur deutsch"], ["only english", ""]]
    assert a["samples"]["more than 20 words"] == [["x " * 29 + "x", "kurz"]]
    assert [len(a["samples"][rule]) for rule in a["dropped"]] == [
        min(n, 3) for n in a["dropped"].values()
    ]
    for corpus, lines in ((a, 304), (b, 40), (dev, 3)):
        assert corpus["lines"] == lines == corpus["kept"] + sum(corpus["dropped"].values())
    train = open_store(Path(data.store), "train")
    assert a["kept"] + 2 * b["kept"] == len(train)
    assert [sum(c["tokens"][i] for c in (a, b)) for i in (0, 1)] == [
        len(train.src.ids),
        len(train.tgt.ids),
    ]
    assert a["files"] == [
        {
            "name": name,
            "sha256": digest_file(root / name),
            "size": (root / name).stat().st_size,
            "lines": 304,
        }
        for name in ("a.en", "a.de")
    ]
    assert ledger["bpe"]["sha256"] == Vocab.load(Path(data.store) / "vocab.model").digest
    table = format_ledger(read_ledger(Path(data.store)))
    for text in (
        "a.en + a.de",
        "dev.en + dev.de (dev)",
        "2 empty side",
        "x 2",
        digest_file(root / "b.tsv"),
    ):
        assert text in table
    assert ledger["bpe"]["sha256"] in table


def test_pairs_below_a_score_are_left_out_whatever_the_workers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(line(i), line(2 * i)) for i in range(200)]
    (root / "c.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in pairs))
    scores = [i * 7 % 200 / 200 for i in range(200)]
    (root / "c.scores").write_text("".join(f"{score}\n" for score in scores))
    monkeypatch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 64)
    monkeypatch.setattr("nmt.system.pool.QUICK_S", 0.0)
    stores = []
    for workers in (1, 3):
        scored = CorpusConfig(file="c.tsv", scores="c.scores", min_score=0.25)
        store = str(root.parent / f"store{workers}")
        data = config(root, train=(scored,), clean=CleanConfig(), workers=workers, store=store)
        prepare(data, VOCAB, 1)
        stores.append(contents(store))
    assert stores[0] == stores[1]
    assert kept(store) == [pair for pair, score in zip(pairs, scores, strict=True) if score >= 0.25]
    account = ledger_of(store)["corpora"][0]
    assert account["dropped"] == {"score below 0.25": 50}
    assert [file["name"] for file in account["files"]] == ["c.tsv", "c.scores"]

    # the store is not that of other scores
    (root / "c.scores").write_text("1\n" * 200)
    with pytest.raises(UserError, match="c.scores: differs from the file"):
        prepare(data, VOCAB, 1)


# ---- the same bytes ---------------------------------------------------------------------------------------------


def test_equal_whatever_the_workers_the_place_and_the_clock(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(root)
    prepare(data, VOCAB, 1)
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 64)
        patch.setattr("nmt.system.pool.QUICK_S", 0.0)
        prepare(config(root, store=str(tmp_path / "two"), workers=3), VOCAB, 1)
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(root, elsewhere)
    for file in elsewhere.iterdir():
        os.utime(file, (1e9, 1e9))
    prepare(config(elsewhere), VOCAB, 1)
    assert (
        contents(data.store) == contents(tmp_path / "two") == contents(elsewhere.parent / "store")
    )


def test_the_seed_draws_the_sample_and_nothing_else(root: Path, tmp_path: Path) -> None:
    def made(name: str, seed: int, sample: int) -> dict[str, object]:
        data = config(root, store=str(tmp_path / name))
        prepare(data, VocabConfig(size=60, sample_sentences=sample), seed)
        return contents(data.store)

    assert made("a", 1, 10_000) == made("b", 2, 10_000)
    assert made("c", 1, 100) == made("d", 1, 100) != made("e", 2, 100)
    ledger = json.loads((tmp_path / "c" / "ledger.json").read_text())
    assert (ledger["bpe"]["lines"], ledger["bpe"]["seed"]) == (100, 1)
    assert not prepare(
        config(root, store=str(tmp_path / "c")), VocabConfig(size=60, sample_sentences=100), 2
    )


KILLS = """
import os, signal, sys
from nmt.system import files
from nmt.system import progress
from nmt.config import load_config
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
        os.fsync = progress.Progress.advance = moment  # the disk itself is not on trial
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
    """In `make test` every third moment, in `make soak` each."""
    (tmp_path / "c.yaml").write_text(
        f"data: {{root: {root}, train: [{{src: a.en, tgt: a.de}}, {{file: b.tsv}}],"
        " valid: {src: dev.en, tgt: dev.de}}\n"
        "vocab: {size: 60}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", KILLS, "c.yaml", str(counted(3, 1))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    stores = sorted(tmp_path.glob("store-*"))
    assert len(stores) > counted(15, 50) and not list(tmp_path.glob("*.work"))
    undisturbed = contents(stores[0])
    assert all(contents(store) == undisturbed for store in stores)


def test_finished_stages_are_not_done_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, known: object = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.prepare.seal", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(root), VOCAB, 1)
    with monkeypatch.context() as patch:
        for work in (
            "ShardCollector.__call__",
            "count_words",
            "train_bpe",
            "ShardEncoder.__call__",
        ):
            patch.setattr(f"nmt.corpus.stages.{work}", fail)
        assert prepare(config(root), VOCAB, 1)
    verify(root.parent / "store")


def test_an_unfinished_preparation_follows_changed_settings(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(root, store=str(root / "truth"), valid=None), VocabConfig(size=50), 1)
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.prepare.seal", lambda *_, known: sys.exit(1))
        with pytest.raises(SystemExit):
            prepare(config(root), VOCAB, 1)
    prepare(config(root, valid=None), VocabConfig(size=50), 1)
    assert contents(root.parent / "store") == contents(root / "truth")


def test_what_another_version_left_is_not_continued(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.prepare.seal", lambda *_, known: sys.exit(1))
        patch.setattr("nmt.corpus.stages.LAYOUT", 1)
        with pytest.raises(SystemExit):
            prepare(config(root), VOCAB, 1)
    for text in (root.parent / "store.work").rglob("*.txt"):
        text.write_text("of another layout")
    prepare(config(root), VOCAB, 1)
    prepare(config(root, store=str(root / "truth")), VOCAB, 1)
    assert contents(root.parent / "store") == contents(root / "truth")


def test_damaged_work_is_named_and_never_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is emptied, changed or removed before the run is continued; in `make soak` all."""
    data = config(root, workers=1)
    prepare(config(root, store=str(root / "truth"), workers=1), VOCAB, 1)
    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.prepare.seal", lambda *_, known: sys.exit(1))
        with pytest.raises(SystemExit):
            prepare(data, VOCAB, 1)
    work, kept = root.parent / "store.work", root.parent / "kept"
    shutil.rmtree(work / "store")  # is always written anew
    os.rename(work, kept)
    n_named = 0
    damages = ("emptied", "changed", "removed")
    for i, file in enumerate(sorted(path.relative_to(kept) for path in kept.glob("*/*"))):
        for damage in damages if IS_SOAK else damages[i % 3 :][:1]:
            shutil.copytree(kept, work)
            content = bytearray((kept / file).read_bytes())
            content[len(content) // 2 :][:1] = b"\x81"
            (work / file).unlink()
            if damage != "removed":
                (work / file).write_bytes(content if damage == "changed" else b"")
            try:
                prepare(data, VOCAB, 1)
                assert contents(data.store) == contents(root / "truth")
                shutil.rmtree(data.store)
            except UserError as error:
                assert str(file) in str(error) or "a.en" in str(error)
                assert "damaged; remove STORE.work and prepare the store again" in str(error)
                n_named += 1
                shutil.rmtree(work)
    assert n_named >= counted(8, 30)


# ---- rules over the whole text, and what is given -----------------------------------------------------------------


def kept(store: str) -> list[tuple[str, ...]]:
    """The training pairs of a store as text."""
    folder = Path(store)
    vocab, train = Vocab.load(folder / "vocab.model"), open_store(folder, "train")
    sides = [
        vocab.decode([side.ids[m:n].tolist() for m, n in pairwise(side.offsets)])
        for side in (train.src, train.tgt)
    ]
    return list(zip(*sides, strict=True))


def ledger_of(store: str) -> dict[str, Any]:
    ledger: dict[str, Any] = json.loads((Path(store) / LEDGER_FILE).read_text())
    return ledger


@pytest.mark.parametrize("is_dropped", [False, True])
def test_repeats_are_counted_always_and_dropped_on_request(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    rng = Random(5)
    pairs = [(line(rng.randrange(40)), line(rng.randrange(3))) for _ in range(400)]
    for name, some in (("c.tsv", pairs[:150]), ("d.tsv", pairs[150:])):
        (root / name).write_text("".join(f"{src}\t{tgt}\n" for src, tgt in some))
    monkeypatch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 64)
    monkeypatch.setattr("nmt.corpus.cleaning.DIGESTS_IN_MEMORY", 90)
    data = config(
        root,
        train=(CorpusConfig(file="c.tsv"), CorpusConfig(file="d.tsv")),
        workers=1,
        clean=CleanConfig(duplicates=is_dropped),
    )
    prepare(data, VOCAB, 1)
    assert kept(data.store) == (list(dict.fromkeys(pairs)) if is_dropped else pairs)
    c, d, _ = ledger_of(data.store)["corpora"]
    n_first = len(set(pairs[:150]))
    assert (c["duplicates"], d["duplicates"]) == (150 - n_first, 250 - len(set(pairs)) + n_first)
    assert (c["dropped"].get("duplicate"), d["dropped"].get("duplicate")) == (
        (c["duplicates"], d["duplicates"]) if is_dropped else (None, None)
    )


@pytest.mark.parametrize("rule", ["keep", "drop-pairs", "drop-sides"])
def test_sentences_of_dev_and_test_are_counted_always_and_dropped_on_request(
    root: Path, rule: str
) -> None:
    pairs = [(line(i), line(i + 1)) for i in range(0, 60, 2)]
    (root / "c.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in pairs))
    (root / "dev.tsv").write_text(f" {line(4)}\t{line(5)} \n{line(8)}\tanders\n\t\n")
    (root / "test.tsv").write_text(f"other\t{line(11)}\n")
    data = config(
        root,
        train=(CorpusConfig(file="c.tsv"),),
        valid=CorpusConfig(file="dev.tsv"),
        test=CorpusConfig(file="test.tsv"),
        clean=CleanConfig(held_out=rule),  # type: ignore[arg-type]
    )
    prepare(data, VOCAB, 1)
    gone = {"keep": [], "drop-pairs": [4], "drop-sides": [4, 8, 10]}[rule]
    assert kept(data.store) == [
        pair for pair in pairs if pair not in [(line(i), line(i + 1)) for i in gone]
    ]
    corpus = ledger_of(data.store)["corpora"][0]
    assert corpus["held_out"] == {"dev": [1, 2, 1], "test": [0, 0, 1]}
    assert "shares 1 pairs, 2 sources and 1 targets with the dev set" in format_ledger(
        read_ledger(Path(data.store))
    )


def test_a_test_set_that_cannot_be_had_matters_only_where_it_decides(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = CorpusConfig(file="lost.tsv")
    prepare(config(root, test=lost), VOCAB, 1)
    assert "not searched for sentences of the test set" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"lost\.tsv: not found"):
        prepare(
            config(
                root, test=lost, store=str(root / "two"), clean=CleanConfig(held_out="drop-pairs")
            ),
            VOCAB,
            1,
        )


def test_a_test_set_that_decides_must_stay_what_it_was(root: Path) -> None:
    shutil.copy(root / "dev.en", root / "test.en")
    shutil.copy(root / "dev.de", root / "test.de")
    for rule in ("keep", "drop-pairs"):
        data = config(
            root,
            test=CorpusConfig(src="test.en", tgt="test.de"),
            store=str(root / rule),
            clean=CleanConfig(held_out=rule),
        )
        prepare(data, VOCAB, 1)
        assert ledger_of(data.store)["test"]["files"][0] == {
            "name": "test.en",
            "size": 13,
            "lines": 3,
            "sha256": digest_file(root / "test.en"),
        }
        (root / "test.en").write_text("a\nb\nc\n")
        if rule == "keep":
            assert not prepare(data, VOCAB, 1)
        else:
            with pytest.raises(
                UserError, match=r"test\.en: differs from the file that .*was prepared from"
            ):
                prepare(data, VOCAB, 1)
        shutil.copy(root / "dev.en", root / "test.en")


def test_identical_sides_and_unreadable_lines(root: Path) -> None:
    (root / "c.tsv").write_bytes(
        b"a b\ta b\nba de\tfi \xff\nba de\tfi go\nno tab\n" + b"ba\tde\n" * 9
    )
    data = config(
        root,
        train=(CorpusConfig(file="c.tsv"),),
        on_bad_line="skip",
        clean=CleanConfig(identical=True),
    )
    prepare(data, VocabConfig(size=20), 1)
    assert kept(data.store) == [("ba de", "fi go"), *[("ba", "de")] * 9]
    corpus = ledger_of(data.store)["corpora"][0]
    assert corpus["dropped"] == {"unreadable": 2, "identical sides": 1}
    assert [sample[0].partition("c.tsv:")[2][0] for sample in corpus["samples"]["unreadable"]] == [
        "2",
        "4",
    ]
    with pytest.raises(UserError, match=r"c\.tsv:2"):
        prepare(
            config(root, train=(CorpusConfig(file="c.tsv"),), store=str(root / "two")), VOCAB, 1
        )


def test_a_given_model_is_used_and_held_on_to(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    shutil.copy(root.parent / "store" / "vocab.model", root / "own.model")
    data = config(root, store=str(root / "two"), train=(CorpusConfig(file="b.tsv"),))
    prepare(data, VocabConfig(model="own.model"), 1)
    assert (
        digest_file(root / "two" / "vocab.model")
        == digest_file(root / "own.model")
        == ledger_of(data.store)["bpe"]["sha256"]
    )
    assert not prepare(data, VocabConfig(model="own.model", size=7), 1)
    with pytest.raises(
        UserError, match=r"vocab\.model: .*/none: cannot be read .* data\.root=.*/raw"
    ):
        prepare(config(root, store=str(root / "four")), VocabConfig(model="none"), 1)
    prepare(config(root, store=str(root / "three")), VocabConfig(size=50), 1)
    shutil.copy(root / "three" / "vocab.model", root / "own.model")
    with pytest.raises(
        UserError, match=r"own\.model: differs from the file that .*two was prepared from"
    ):
        prepare(data, VocabConfig(model="own.model"), 1)


def test_a_sample_teaches_of_all_lines_alike(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.corpus.stages.PAIRS_PER_SHARD", 10)
    seen: Counter[str] = Counter()
    monkeypatch.setattr(
        "nmt.corpus.stages.train_bpe",
        lambda words, *_: (
            seen.update(row.partition("\t")[0] for row in words.read_text().split("\n"))
            or sys.exit(1)
        ),
    )
    (root / "c.tsv").write_text("".join(f"s{i}\tt{i}\n" for i in range(60)))
    for seed in range(40):
        with pytest.raises(SystemExit):
            prepare(
                config(root, train=(CorpusConfig(file="c.tsv"),), workers=1),
                VocabConfig(size=60, sample_sentences=30),
                seed,
            )
    del seen[""]
    assert seen.total() == 40 * 30 and len(seen) == 120
    assert all(1 <= n <= 22 for n in seen.values())  # 10 expected, 2.7 the deviation


def test_a_full_disk_is_told_with_figures_and_nothing_is_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(root, store=str(root / "truth")), VOCAB, 1)
    message = (
        r"not enough disk space: about [\d,]+ bytes are needed, "
        r"of which [\d,]+ are already written, and [\d,]+ are free; free"
    )
    for n in (1, 2, 2):
        left = iter(range(n))

        def write(path: Path, data: bytes, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            path.write_bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr("nmt.corpus.shards.write_bytes", write)
            with pytest.raises(UserError, match=message):
                prepare(config(root, workers=1), VOCAB, 1)
        assert not (root.parent / "store").exists()
    prepare(config(root), VOCAB, 1)
    assert contents(root.parent / "store") == contents(root / "truth")
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(UserError, match=message):
        prepare(config(root, store=str(root / "three")), VOCAB, 1)
    assert not list(root.glob("three*"))


# ---- recognised or refused --------------------------------------------------------------------------------------


def test_a_complete_store_is_recognised_even_without_its_sources(root: Path) -> None:
    assert prepare(config(root), VOCAB, 1)
    before = contents(root.parent / "store")
    assert not prepare(config(root, workers=7), VOCAB, 1)
    shutil.rmtree(root)
    assert not prepare(config(root, test=CorpusConfig(demo="test")), VOCAB, 1)
    assert contents(root.parent / "store") == before


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({}, 50, "vocab.size 60 -> 50"),
        ({"clean": CleanConfig()}, 60, "data.clean.max_words 20 -> 250"),
        (
            {"train": (CorpusConfig(src="a.en", tgt="a.de"),)},
            60,
            r"data.train\[1\].file b.tsv -> None",
        ),
        ({"valid": None}, 60, "data.valid.src dev.en -> None"),
        ({"src": "de", "tgt": "en"}, 60, "data.src en -> de"),
    ],
)
def test_other_settings_are_refused_by_name(
    root: Path, changes: dict[str, object], size: int, named: str
) -> None:
    prepare(config(root), VOCAB, 1)
    with pytest.raises(
        UserError,
        match=rf"prepared with other settings \(.*{named}.*\); give another data\.store=DIR",
    ):
        prepare(config(root, **changes), VocabConfig(size=size), 1)


def test_changed_inputs_are_noticed(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    os.utime(root / "b.tsv")  # touched, not changed
    assert not prepare(config(root), VOCAB, 1)
    for change in (lambda text: text + "more\tmehr\n", lambda text: text.replace("ba", "bo", 1)):
        original = (root / "b.tsv").read_text()
        (root / "b.tsv").write_text(change(original))
        with pytest.raises(
            UserError, match=r"b\.tsv: differs from the file that .*store was prepared from"
        ):
            prepare(config(root), VOCAB, 1)
        (root / "b.tsv").write_text(original)
    assert not prepare(config(root), VOCAB, 1)


def test_other_files_of_the_same_size_are_noticed(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    other = root.parent / "other"
    shutil.copytree(root, other)
    assert not prepare(config(other), VOCAB, 1)  # the same files at another place
    swapped = (other / "b.tsv").read_text().split("\n")
    (other / "b.tsv").write_text("\n".join([swapped[1], swapped[0], *swapped[2:]]))
    os.utime(other / "b.tsv", (1e9, 1e9))
    with pytest.raises(
        UserError, match=r"other/b\.tsv: differs from the file that .*store was prepared from"
    ):
        prepare(config(other), VOCAB, 1)


def test_a_file_changed_while_it_is_read_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_and_digest(path: Path) -> str:
        os.utime(root / "b.tsv", (1e9, 1e9))
        return digest_file(path)

    with monkeypatch.context() as patch:
        patch.setattr("nmt.corpus.stages.digest_file", change_and_digest)
        with pytest.raises(
            UserError, match=r"b\.tsv: changed while it was being read; run the command again"
        ):
            prepare(config(root, train=(CorpusConfig(file="b.tsv"),)), VOCAB, 1)
    assert prepare(config(root, train=(CorpusConfig(file="b.tsv"),)), VOCAB, 1)


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_with_the_name_of_the_work_folder_is_left_alone(root: Path, made: bool) -> None:
    mine = root.parent / "store.work"
    if made:
        prepare(config(root), VOCAB, 1)
    mine.mkdir()
    (mine / "valid.de").write_text("mine")
    if made:
        assert not prepare(config(root), VOCAB, 1)
    else:
        with pytest.raises(UserError, match=r"store\.work: was not made by nmt-prepare"):
            prepare(config(root), VOCAB, 1)
    assert (mine / "valid.de").read_text() == "mine"


def test_a_run_killed_before_it_could_mark_its_folder_is_no_obstacle(root: Path) -> None:
    (root.parent / "store.work").mkdir()
    (root.parent / "store.work" / ".probe-77").touch()
    assert prepare(config(root), VOCAB, 1)
    assert not (root.parent / "store.work").exists()


def test_bad_lines_of_the_dev_set_are_accounted_for(root: Path) -> None:
    (root / "dev.en").write_bytes(b"w1 \xff\nw2\nw3\n")
    prepare(config(root, on_bad_line="skip"), VOCAB, 1)
    dev = ledger_of(str(root.parent / "store"))["corpora"][-1]
    assert (dev["lines"], dev["kept"], dev["dropped"]) == (3, 2, {"unreadable": 1})
    (root / "dev.en").write_bytes(b"\xff\n" * 3)
    with pytest.raises(UserError, match=r"data\.valid: it contains no usable pair"):
        prepare(config(root, on_bad_line="skip", store=str(root / "two")), VOCAB, 1)


def test_a_store_in_a_folder_that_cannot_be_written_is_recognised(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(root), VOCAB, 1)

    def refuse(path: Path) -> Path:
        raise UserError(f"{path}: cannot be written")

    monkeypatch.setattr("nmt.corpus.prepare.make_folder", refuse)
    assert not prepare(config(root), VOCAB, 1)


@pytest.mark.parametrize(
    "damage", ["vocab.model", "train.src.ids.npy", "ledger.json", "manifest.json"]
)
def test_a_damaged_store_is_not_taken_for_a_whole_one(root: Path, damage: str) -> None:
    prepare(config(root), VOCAB, 1)
    (root.parent / "store" / damage).write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        prepare(config(root), VOCAB, 1)


def test_a_config_may_have_any_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nmt-prepare", "--config", "b\udce9.yaml"])
    prepare(config(root), VOCAB, 1)
    assert ledger_of(str(root.parent / "store"))["command"] == "nmt-prepare --config 'b\udce9.yaml'"


def test_two_processes_do_not_meet(root: Path) -> None:
    with (
        lock(root.parent / "store", "preparing", ".store.lock"),
        pytest.raises(UserError, match=r"/store: is in use by preparing .* pid"),
    ):
        prepare(config(root), VOCAB, 1)
    assert not list(root.parent.glob(".*"))
    assert prepare(config(root), VOCAB, 1)
    assert not list(root.parent.glob(".*"))


def test_a_lock_that_a_killed_run_left_is_swept(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    (root.parent / ".store.lock").write_text("preparing on a machine, pid 1")
    assert not prepare(config(root), VOCAB, 1)
    assert not list(root.parent.glob(".*"))
    with lock(root.parent / "store", "preparing", ".store.lock"):  # but not one that is held
        assert not prepare(config(root), VOCAB, 1)
        assert list(root.parent.glob(".*"))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"train": ()}, 60, "data.train: no corpus given"),
        ({"train": (CorpusConfig(src="gone.en", tgt="a.de"),)}, 60, "gone.en: not found"),
        ({"valid": CorpusConfig(src="dev.en", tgt="gone.de")}, 60, "gone.de: not found"),
        (
            {"train": (CorpusConfig(src="a.tgz", tgt="a.de"),)},
            60,
            "a.tgz: is an archive; give archive: a.tgz",
        ),
        ({"clean": CleanConfig(max_words=0)}, 60, "data.train: no pairs are left after cleaning"),
        ({"clean": CleanConfig(max_pieces=0)}, 60, "data.train: no pairs are left after cleaning"),
        (
            {"train": (CorpusConfig(file="b.tsv", scores="gone", min_score=0.0),)},
            60,
            "gone: not found; give a file",
        ),
        ({}, 5000, "vocab.size: 5000 is too large"),
        ({"store": "/proc/nothing/store"}, 60, "cannot be written"),
        ({"store": "RAW"}, 60, "exists but is not a prepared store"),
    ],
)
def test_mistakes_leave_no_store(
    root: Path, changes: dict[str, object], size: int, message: str
) -> None:
    if changes.get("store") == "RAW":
        changes = {"store": str(root)}
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        prepare(config(root, **changes), VocabConfig(size=size), 1)
    assert "\n" not in str(caught.value)
    assert not (root.parent / "store").exists() and not (root / MANIFEST_FILE).exists()


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command_says_where_and_that_it_is_done(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "c.yaml"
    path.write_text(f"data: {{root: {root}, train: [{{file: b.tsv}}]}}\nvocab: {{size: 40}}\n")
    arguments = ["--config", str(path), f"data.store={root}/made"]
    assert main(arguments) == 0
    assert f"prepared: {root}/made" in capsys.readouterr().err
    assert main(arguments) == 0
    assert f"already prepared: {root}/made" in capsys.readouterr().err
    assert main([*arguments, "vocab.size=41"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.err.startswith("nmt-prepare: error: ")
        and captured.err.count("\n") == 1
        and captured.out == ""
    )


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, contextlib; from nmt.commands.prepare import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "sys.exit(bool({'torch', 'numpy', 'yaml', 'sentencepiece', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0 and b"examples:" in done.stdout


@needs_text("multi30k")
def test_multi30k(tmp_path: Path) -> None:
    data = DataConfig(
        root=str(REAL_TEXT / "multi30k"),
        store=str(tmp_path / "store"),
        valid=CorpusConfig(src="valid.en", tgt="valid.de"),
        train=(CorpusConfig(src="train.en", tgt="train.de"),),
    )
    prepare(data, VocabConfig(size=10_000), 1)
    assert [len(open_store(tmp_path / "store", split)) for split in ("train", "valid")] == [
        29_000,
        1_014,
    ]
    assert (tmp_path / "store" / "valid.tgt.txt").read_bytes() == (
        REAL_TEXT / "multi30k" / "valid.de"
    ).read_bytes()


def test_only_names_of_shards_are_shards(tmp_path: Path) -> None:
    for name in ("00001.json", "00012.json", "0x.json", "1.json", "done.json"):
        (tmp_path / name).touch()
    assert find_finished_shards(tmp_path) == {1, 12}


def test_a_tag_comes_in_front_of_each_source_as_one_piece(root: Path) -> None:
    (root / "b.tsv").write_text("ba de\tfi\nba\tde fi\n<bt> go <bt>\thu\n")
    train = (CorpusConfig(file="b.tsv", tag="<bt>"), CorpusConfig(file="b.tsv"))
    valid = CorpusConfig(src="dev.en", tgt="dev.de", tag="<bt>")
    clean = CleanConfig(max_pieces=None)
    data = config(root, train=train, valid=valid, clean=clean)
    prepare(data, VocabConfig(size=28), 1)

    vocab = Vocab.load(Path(data.store) / "vocab.model")
    tag = vocab.find_symbol("<bt>")
    store = open_store(Path(data.store), "train")
    ids, counts = store.src.read_rows(0, len(store))
    rows = [ids[end - n : end].tolist() for n, end in zip(counts, counts.cumsum(), strict=True)]
    plain = vocab.encode(["ba de", "ba", "<bt> go <bt>"])
    assert rows == [[tag, *row] for row in plain] + plain
    assert tag not in store.tgt.read_rows(0, len(store))[0] and tag not in sum(plain, [])

    dev = open_store(Path(data.store), "valid")
    first, _ = dev.src.read_rows(0, 1)
    assert first.tolist() == [tag, *vocab.encode(["w1 w2"])[0]]
    assert (Path(data.store) / "valid.src.txt").read_text() == "w1 w2\n\n  w3 \n"

    shown = format_ledger(read_ledger(Path(data.store))).split("\n")
    assert [row.split("  ")[0] for row in shown[1:3]] == ["<bt> b.tsv", "b.tsv"]
    with pytest.raises(UserError, match=r"data\.train\[0\]\.tag <bt> -> None"):
        prepare(
            config(root, train=train[1:] * 2, valid=valid, clean=clean), VocabConfig(size=28), 1
        )


def test_a_tag_counts_as_a_piece(root: Path) -> None:
    (root / "b.tsv").write_text("".join(f"{line(i)}\t{line(i)}\n" for i in range(60)))
    kept = []
    for i, tag in enumerate((None, "<bt>")):
        train = (CorpusConfig(file="b.tsv", tag=tag),)
        clean = CleanConfig(max_pieces=9)
        data = config(root, train=train, clean=clean, store=str(root / f"store{i}"))
        prepare(data, VOCAB, 1)
        kept.append(open_store(Path(data.store), "train").src.lengths.max() - 1)
    assert kept == [9, 9]


def test_a_given_model_gets_symbols_that_it_lacks(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    shutil.copy(root.parent / "store" / "vocab.model", root / "own.model")
    given = VocabConfig(model="own.model", user_symbols=("<url>",))
    train = (CorpusConfig(file="b.tsv", tag="<bt>"), CorpusConfig(file="b.tsv", tag="<url>"))
    tagged = config(root, train=train, store=str(root / "two"))
    assert prepare(tagged, given, 1)
    own, grown = (Vocab.load(root / name) for name in ("own.model", "two/vocab.model"))
    assert grown.extends(own) and grown.pieces([own.size, own.size + 1]) == ["<url>", "<bt>"]
    assert not prepare(tagged, given, 1)
    with pytest.raises(UserError, match=r"vocab\.user_symbols\[0\] <url> -> None"):
        prepare(tagged, VocabConfig(model="own.model"), 1)

    # what cannot be added
    piece = own.pieces([own.size - 1])[0]
    odd = VocabConfig(model="own.model", user_symbols=(piece,))
    elsewhere = config(root, store=str(root / "four"))
    with pytest.raises(UserError, match="own.model: .* already, .*; leave it out"):
        prepare(elsewhere, odd, 1)
    shutil.copy(root / "two" / "vocab.model", root / "own.model")  # where <bt> is in no text
    odd = VocabConfig(model="own.model", user_symbols=("<bt>",))
    with pytest.raises(UserError, match="own.model: '<bt>' .* already, .*; leave it out"):
        prepare(elsewhere, odd, 1)


def test_a_given_model_must_have_the_tag_of_the_dev_set(root: Path) -> None:
    prepare(config(root), VOCAB, 1)
    shutil.copy(root.parent / "store" / "vocab.model", root / "own.model")
    given = VocabConfig(model="own.model")
    valid = CorpusConfig(src="dev.en", tgt="dev.de", tag="<bt>")
    tagged = config(root, valid=valid, store=str(root / "two"))
    with pytest.raises(
        UserError, match=r"vocab\.model=own\.model: '<bt>' is not a symbol .*user_symbols"
    ):
        prepare(tagged, given, 1)
    assert not (root / "two").exists()
    reserved = VocabConfig(size=60, user_symbols=("<bt>",))
    prepare(config(root, store=str(root / "three")), reserved, 1)
    shutil.copy(root / "three" / "vocab.model", root / "own.model")
    assert prepare(tagged, given, 1)


def test_weights_leave_the_store_as_it_is_and_may_change(root: Path) -> None:
    plain = config(root, train=(CorpusConfig(src="a.en", tgt="a.de"), CorpusConfig(file="b.tsv")))
    prepare(plain, VOCAB, 1)
    weights = (replace(plain.train[0], weight=0.5), replace(plain.train[1], weight=2.5))
    weighted = replace(plain, train=weights, store=str(root / "weighted"))
    prepare(weighted, VOCAB, 1)
    ledger, with_weights = read_ledger(Path(plain.store)), read_ledger(Path(weighted.store))
    assert ledger.data == with_weights.data and ledger.settings == with_weights.settings
    shown = format_ledger(with_weights).split("\n")
    assert [" x 0.5 " in shown[1], " x 2.5 " in shown[2], " x " in format_ledger(ledger)] == [
        True,
        True,
        False,
    ]

    # the store of either serves both
    for data in (replace(weighted, store=plain.store), replace(plain, temperature=5.0)):
        assert not prepare(data, VOCAB, 1)
    n_pairs = len(open_store(Path(plain.store), "train"))
    assert read_mixture(Path(plain.store), plain, n_pairs) is None
    mixture = read_mixture(Path(plain.store), weighted, n_pairs)
    assert mixture is not None
    sizes = [corpus.kept for corpus in ledger.corpora if corpus.split == "train"]
    assert [share.stored for share in mixture.shares] == sizes
    assert [share.drawn for share in mixture.shares] == [round(0.5 * sizes[0]), 80]
    assert describe_mixture(mixture, weighted).endswith(", 80 of b.tsv (32)")
    with pytest.raises(UserError, match=r"ledger\.json: has corpora of .* prepare another data"):
        read_mixture(Path(plain.store), weighted, n_pairs + 1)
