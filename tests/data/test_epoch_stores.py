"""Epochs on disk: the same text in other pieces, drawn once for all, equal however they are made;
faults.
"""

import shutil
from pathlib import Path

import numpy as np
from pytest import MonkeyPatch, fixture, mark, raises
from support.block_faults import die, slow
from support.finished_run import list_differing, read_lines, read_losses, read_tensors, train_toy
from support.forks import run_on_ranks
from support.sentencepieces import train_sentencepiece
from support.toy_corpus import sentences

from nmt.data import epoch_stores
from nmt.data.epoch_stores import EpochStores
from nmt.data.store import Side, SideWriter, open_store
from nmt.data.vocab import UNK, Vocab
from nmt.system.errors import UserError
from nmt.system.files import seal
from nmt.system.run_folder import VOCAB_FILE

N = 1_000
UNKNOWN = 7  # the pair with a character that the BPE does not know
Rows = list[list[int]]


def write_store(folder: Path, model: bytes, sides: dict[str, list[str]]) -> None:
    (folder / VOCAB_FILE).write_bytes(model)
    for side, lines in sides.items():
        rows = Vocab(model).encode(lines)
        writer = SideWriter(folder, "train", side)
        writer.append(np.array(sum(rows, []), np.uint16), np.array([len(row) for row in rows]))
        writer.close()
    seal(folder)


@fixture(scope="module")
def original(module_path: Path) -> Path:
    folder = module_path / "store"
    folder.mkdir()
    pairs = sentences(N, 0)
    lines = [line for pair in pairs for line in pair]
    model = train_sentencepiece(lines, 140)
    src, tgt = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    src[UNKNOWN] += " \N{SNOWMAN} " + src[UNKNOWN + 1]
    write_store(folder, model, {"src": src, "tgt": tgt})
    return folder


@fixture
def store(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "store")


@fixture
def here(monkeypatch: MonkeyPatch) -> None:
    """Draw in this process, which saves the start of others."""
    monkeypatch.setattr(
        epoch_stores, "map_in_order", lambda work, tasks, workers: (work(task) for task in tasks)
    )


def rows_of(side: Side) -> Rows:
    return [row.tolist() for row in np.split(side.ids, side.offsets[1:-1])]


def draw_epoch(
    store: Path,
    epoch: int,
    rate: float = 0.1,
    seed: int = 1,
    max_pieces: int | None = None,
    workers: int = 1,
) -> list[Rows]:
    stores = EpochStores(store, rate, seed, max_pieces, workers)
    stores.pairs_per_draw, stores.few_pairs = 300, 0
    drawn = stores(epoch)
    return [rows_of(drawn.src), rows_of(drawn.tgt)]


def read_stored(store: Path) -> list[Rows]:
    stored = open_store(store, "train")
    return [rows_of(stored.src), rows_of(stored.tgt)]


def names_of_epochs(store: Path) -> list[str]:
    return sorted(path.name for path in store.with_name("store.epochs").glob("*/epoch-*"))


def share_equal(a: Rows, b: Rows) -> float:
    return float(np.mean([x == y for x, y in zip(a, b, strict=True)]))


# ---- what is drawn ----------------------------------------------------------------------------------------------


@mark.usefixtures("here")
def test_the_same_text_in_other_pieces(store: Path) -> None:
    vocab = Vocab.load(store / VOCAB_FILE)
    for old, new in zip(read_stored(store), draw_epoch(store, 0), strict=True):
        assert vocab.decode(new) == vocab.decode(old)
        assert share_equal(old, new) < 0.9


@mark.usefixtures("here")
def test_epochs_seeds_and_sides_draw_apart(store: Path) -> None:
    draws = [draw_epoch(store, 0), draw_epoch(store, 1), draw_epoch(store, 0, seed=2)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert share_equal(draws[i][0], draws[j][0]) < 0.5
    for part in ("ids", "offsets"):  # a store of equal sides: they must not be drawn alike
        shutil.copyfile(store / f"train.src.{part}.npy", store / f"train.tgt.{part}.npy")
    seal(store)
    src, tgt = draw_epoch(store, 0)
    assert share_equal(src, tgt) < 0.5


@mark.usefixtures("here")
def test_at_a_vanishing_rate_the_stored_pieces_come_back(store: Path) -> None:
    assert draw_epoch(store, 0, rate=1e-9) == read_stored(store)
    assert draw_epoch(store, 0, rate=0.0) == read_stored(store)
    assert len(list(store.with_name("store.epochs").iterdir())) == 1  # none for rate 0


@mark.usefixtures("here")
def test_unknown_characters_stay_and_too_many_pieces_keep_what_is_stored(store: Path) -> None:
    old, free = read_stored(store), draw_epoch(store, 0, rate=0.9)
    limited = draw_epoch(store, 0, rate=0.9, max_pieces=20)
    assert old[0][UNKNOWN].count(UNK) == free[0][UNKNOWN].count(UNK) == 1
    assert free[0][UNKNOWN] != old[0][UNKNOWN]
    lengths = [len(row) for side in free for row in side]
    assert max(lengths) > 40 and min(lengths) <= 20
    for side in (0, 1):
        expected = [a if len(b) > 20 else b for a, b in zip(old[side], free[side], strict=True)]
        assert limited[side] == expected


@mark.usefixtures("here")
def test_another_store_under_the_same_name_is_drawn_anew(store: Path) -> None:
    before = draw_epoch(store, 0)
    for part in ("ids", "offsets"):
        shutil.copyfile(store / f"train.tgt.{part}.npy", store / f"train.src.{part}.npy")
    seal(store)
    assert draw_epoch(store, 0)[0] != before[0]
    assert len(list(store.with_name("store.epochs").iterdir())) == 2


def test_a_model_that_is_not_a_bpe_is_refused(store: Path) -> None:
    lines = [line for pair in sentences(N, 0) for line in pair]
    model = train_sentencepiece(lines, 50, model_type="unigram")
    write_store(store, model, {"src": lines[:100], "tgt": lines[:100]})
    with raises(UserError, match=r"not a BPE .* vocab\.bpe_dropout=0"):
        EpochStores(store, 0.1, 1, None, 1)


# ---- who draws it, and when -------------------------------------------------------------------------------------


def test_other_processes_draw_what_this_one_would(store: Path, monkeypatch: MonkeyPatch) -> None:
    truth = draw_epoch(store, 3)
    shutil.rmtree(store.with_name("store.epochs"))
    monkeypatch.setattr(epoch_stores, "draw_block", slow)
    assert draw_epoch(store, 3, workers=2) == truth


TWO_RANKS = """
    import sys
    import time
    from pathlib import Path
    from nmt.data import epoch_stores
    from nmt.system.ranks import join_world

    n_draws = 0
    def draw_here(work, tasks, executor):
        global n_draws
        n_draws += 1
        time.sleep(0.5)  # the other rank comes meanwhile
        return (work(task) for task in tasks)
    epoch_stores.map_in_order = draw_here

    with join_world("cpu") as world:
        stores = epoch_stores.EpochStores(Path(sys.argv[1]), 0.1, 1, None, 1)
        for epoch in range(3):
            both = world.collect(stores(epoch).src.ids.tobytes())
            assert not world.is_main or both[0] == both[1]
        counts = world.collect(str(n_draws).encode())
        if world.is_main:
            print(sum(map(int, counts)))
"""


def test_two_ranks_draw_an_epoch_once(store: Path, tmp_path: Path) -> None:
    done = run_on_ranks(2, TWO_RANKS, tmp_path / "ranks.py", str(store))
    assert done.codes == [0, 0], done.told()[-3000:]
    assert done.told("stdout") == "3\n"
    assert names_of_epochs(store) == ["epoch-000001", "epoch-000002"]


@mark.usefixtures("here")
def test_epochs_left_behind_go_and_come_back_for_who_needs_them(store: Path) -> None:
    ahead, behind = (EpochStores(store, 0.1, 1, None, 1) for _ in range(2))
    first = rows_of(behind(0).src)
    (ahead.epochs / "epoch-mine").mkdir()  # somebody else's
    held = [ahead(epoch) for epoch in range(5)][2]
    assert names_of_epochs(store) == ["epoch-000003", "epoch-000004", "epoch-mine"]
    assert rows_of(behind(0).src) == first
    assert len(rows_of(held.src)) == N


# ---- training on top ---------------------------------------------------------------------------------------------


@mark.usefixtures("here")
def test_training_continues_exactly(toy: Path, tmp_path: Path) -> None:
    one, two, plain = (tmp_path / name for name in ("one", "two", "plain"))
    settings = (
        "data.valid=null model.n_layers=1 training.src_tokens=1500 training.tgt_tokens=1500"
        " training.micro_tokens=800 vocab.bpe_dropout=0.1 vocab.byte_fallback=true vocab.size=400"
    ).split()
    train_toy(toy, *settings, f"out={one}", "training.steps=9")
    assert read_lines(one, "train")[-1]["epoch"] >= 1
    train_toy(toy, *settings, f"out={two}", "training.steps=5")
    assert not (tmp_path / "store.epochs").exists()  # the end of a run removes them
    train_toy(toy, *settings, f"out={two}", "training.steps=9")
    assert list_differing(read_tensors(one, 9), read_tensors(two, 9)) == []
    train_toy(toy, *settings, f"out={plain}", "training.steps=1", "vocab.bpe_dropout=0")
    assert read_losses(one)[1] != read_losses(plain)[1]


def test_a_killed_worker_is_one_line_and_leaves_no_half_epoch(
    store: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_stores, "draw_block", die)
    with raises(UserError, match="killed"):
        draw_epoch(store, 0, workers=2)
    assert names_of_epochs(store) == []
