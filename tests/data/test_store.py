"""The token store against brute force: what was appended in chunks is what is read, and damage is
named.
"""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
from pytest import MonkeyPatch, fixture, mark, raises
from support.untrained import make_vocab

from nmt.data.store import ArrayWriter, SideWriter, open_store
from nmt.data.vocab import VocabPair, load_vocab, write_vocab
from nmt.system.errors import UserError
from nmt.system.files import digest_file, seal
from nmt.system.run_folder import VOCAB_FILE

Sentences = list[list[int]]


def sentences(n: int, seed: int) -> Sentences:
    random = np.random.default_rng(seed)
    return [random.integers(0, 65_535, random.integers(0, 12)).tolist() for _ in range(n)]


def write(folder: Path, sides: dict[str, Sentences], chunk: int) -> None:
    for side, lines in sides.items():
        with closing(SideWriter(folder, "train", side)) as writer:
            for i in range(0, len(lines), chunk):
                some = lines[i : i + chunk]
                writer.append(
                    np.array(sum(some, []), np.uint16),
                    np.array([len(ids) for ids in some], np.int64),
                )
            assert writer.n_pieces == sum(map(len, lines))


@fixture
def sides() -> dict[str, Sentences]:
    return {
        "src": [[1, 2, 65_534], [], [7], *sentences(200, 0)],
        "tgt": [[3], [4, 5], [], *sentences(200, 1)],
    }


@fixture
def folder(tmp_path: Path, sides: dict[str, Sentences]) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    (store / VOCAB_FILE).write_bytes(b"a model")
    write(store, sides, chunk=7)
    seal(store)
    return store


def test_reads_back_what_was_appended(folder: Path, sides: dict[str, Sentences]) -> None:
    store = open_store(folder, "train")
    assert len(store) == 203
    for side, lines in ((store.src, sides["src"]), (store.tgt, sides["tgt"])):
        assert [
            side.ids[a:b].tolist() for a, b in zip(side.offsets, side.offsets[1:], strict=False)
        ] == lines
        assert side.lengths.tolist() == [len(line) + 1 for line in lines]
        assert side.n_tokens == side.lengths.sum()
        assert isinstance(side.ids, np.memmap)
        assert (side.ids.dtype.name, side.offsets.dtype.name) == ("uint16", "int64")


def test_counts_the_pairs_that_it_shares_with_others(
    folder: Path, sides: dict[str, Sentences], monkeypatch: MonkeyPatch
) -> None:
    """Of the others, some are the store's; some have only the same sums, or one side in common."""
    monkeypatch.setattr("nmt.data.store.SEARCHED_PAIRS", 50)
    store = open_store(folder, "train")
    own = list(zip(sides["src"], sides["tgt"], strict=True))
    with_longer = [pair for pair in own if len(set(pair[0])) > 1]
    turned = [(src[::-1], tgt) for src, tgt in with_longer if src != src[::-1]]
    exchanged = [(src, other) for (src, _), (_, other) in zip(own, own[1:], strict=False)]
    assert len(turned) > 100
    for others in (own, own[10:20], own[:9] * 2, turned, exchanged, own[100:] + turned, []):
        keys = {json.dumps(pair) for pair in others} & {json.dumps(pair) for pair in own}
        assert store.count_shared(others) == len(keys)


def test_array_file_is_byte_for_byte_numpys_own(tmp_path: Path) -> None:
    values = np.arange(1_234_567, dtype=np.int64)
    with closing(ArrayWriter(tmp_path / "ours.npy", "int64")) as writer:
        for part in np.array_split(values, 13):
            writer.append(part)
    np.save(tmp_path / "numpy.npy", values)
    assert digest_file(tmp_path / "ours.npy") == digest_file(tmp_path / "numpy.npy")


def test_refuses_an_empty_split(tmp_path: Path) -> None:
    write(tmp_path, {"src": [], "tgt": []}, chunk=1)
    (tmp_path / VOCAB_FILE).write_bytes(b"")
    seal(tmp_path)
    with raises(UserError, match=r"its train split has no sentences; .*nmt-prepare again"):
        open_store(tmp_path, "train")


def test_refuses_another_bpe_model(folder: Path, tmp_path: Path) -> None:
    ours, other = (make_vocab(tmp_path, size) for size in (80, 90))
    for vocab, another in ((ours, other), (VocabPair(ours, other), VocabPair(other, ours))):
        write_vocab(folder, vocab)
        seal(folder)
        assert load_vocab(folder).digest == vocab.digest
        open_store(folder, "train", vocab)
        for wrong in (another, other):
            with raises(UserError, match="made with another BPE model"):
                open_store(folder, "train", wrong)


def test_names_what_is_missing(folder: Path, tmp_path: Path) -> None:
    with raises(UserError, match="contains no prepared data; run nmt-prepare first"):
        open_store(tmp_path / "nothing", "train")
    with raises(UserError, match=r"has no valid split; set data\.valid"):
        open_store(folder, "valid")


@mark.parametrize("name", ["train.src.ids.npy", "train.tgt.offsets.npy"])
@mark.parametrize("damage", ["cut", "longer", "gone"])
def test_names_the_damaged_file(folder: Path, name: str, damage: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "gone":
        (folder / name).write_bytes(content[:-2] if damage == "cut" else content + b"\0\0")
    with raises(UserError, match=rf"{name}: is (damaged|missing).*use another copy"):
        open_store(folder, "train")


@mark.parametrize(
    "wrong, message",
    [
        (np.zeros(4, np.int32), "not a one-dimensional array of int64"),
        (np.zeros((4, 1), np.int64), "not a one-dimensional array of int64"),
        (np.array([0, 1, 2]), "does not match the file of ids"),
        (np.array([], np.int64), "does not match the file of ids"),
        (np.array(["x"], object), "not a one-dimensional array of int64"),
    ],
)
def test_refuses_sealed_nonsense(folder: Path, wrong: np.ndarray, message: str) -> None:
    np.save(folder / "train.src.offsets.npy", wrong, allow_pickle=True)
    seal(folder)
    with raises(UserError, match=message):
        open_store(folder, "train")


def test_refuses_sides_of_unequal_length(folder: Path, sides: dict[str, Sentences]) -> None:
    write(folder, {"tgt": sides["tgt"][:-1]}, chunk=50)
    seal(folder)
    with raises(UserError, match="203 source and 202 target sentences"):
        open_store(folder, "train")
