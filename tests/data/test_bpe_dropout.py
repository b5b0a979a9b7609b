"""BPE-dropout against the text it must spell and the share it must change; faults and kills while an epoch is drawn."""

import io
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from block_faults import die, slow, stumble
from conftest import sentences

from nmt.config import TrainingConfig
from nmt.data import bpe_dropout as segmentation
from nmt.data.bpe_dropout import Recipe, Segmentations, draw_block
from nmt.data.loader import Loader, Update
from nmt.data.plan import Cursor
from nmt.data.store import Side, SideWriter, TokenStore, open_store
from nmt.data.vocab import UNK, Vocab
from nmt.system.errors import UserError
from nmt.system.files import seal
from nmt.system.ranks import World
from nmt.system.run_folder import VOCAB_FILE

N = 1_000
LOST = 7  # the pair with a character that the BPE does not know
Rows = list[list[int]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    folder.mkdir()
    pairs = sentences(N, 0)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for pair in pairs for line in pair),
        model_writer=model,
        model_type="bpe",
        vocab_size=110,
        normalization_rule_name="identity",
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=1,
        minloglevel=2,
    )
    (folder / VOCAB_FILE).write_bytes(model.getvalue())
    vocab = Vocab(model.getvalue())
    pairs[LOST] = (pairs[LOST][0] + " ☃ " + pairs[LOST + 1][0], pairs[LOST][1])
    for side, lines in zip(("src", "tgt"), zip(*pairs, strict=True), strict=True):
        rows = vocab.encode(list(lines))
        writer = SideWriter(folder, "train", side)
        writer.append(np.array(sum(rows, []), np.uint16), np.array(list(map(len, rows))))
        writer.close()
    seal(folder)
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "store")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmentation, "BLOCK", 300)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are drawn in this process, which saves the start of others."""
    monkeypatch.setattr(segmentation, "ordered", lambda work, tasks, workers: map(work, tasks))


def rows_of(side: Side) -> Rows:
    return [row.tolist() for row in np.split(side.ids, side.offsets[1:-1])]


def drawn(
    store: Path, epoch: int, rate: float = 0.1, seed: int = 1, max_pieces: int | None = None
) -> list[Rows]:
    with Segmentations(store, rate, seed, max_pieces, 1) as segmentations:
        found = segmentations(epoch)
        return [rows_of(found.src), rows_of(found.tgt)]


def stored(store: Path) -> list[Rows]:
    found = open_store(store, "train")
    return [rows_of(found.src), rows_of(found.tgt)]


@pytest.mark.usefixtures("here")
def test_the_same_text_in_other_pieces(store: Path) -> None:
    vocab = Vocab.load(store / VOCAB_FILE)
    for old, new in zip(stored(store), drawn(store, 0), strict=True):
        assert vocab.decode(new) == vocab.decode(old)
        assert max(max(row) for row in new) < vocab.size


def by_the_paper(
    word: list[str], known: dict[str, float], rate: float, draw: Callable[[], float]
) -> list[str]:
    """Algorithm 1 of Provilkov et al., symbol by symbol."""
    while True:
        merges = [
            (-known[left + right], i)
            for i, (left, right) in enumerate(zip(word, word[1:], strict=False))
            if left + right in known and draw() >= rate
        ]
        if not merges:
            return word
        _, i = min(merges)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_as_long_and_as_often_changed_as_by_the_papers_algorithm(rate: float, store: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(store / VOCAB_FILE))
    known = {
        processor.id_to_piece(i): processor.get_score(i)
        for i in range(4, processor.get_piece_size())
    }
    draw = random.Random(1).random
    old, new = (sum(sides, []) for sides in (stored(store), drawn(store, 0, rate)))
    ours, theirs = [], []
    for a, b in zip(old, new, strict=True):
        text = "".join(map(processor.id_to_piece, a))
        words = [
            by_the_paper(list("\u2581" + word), known, rate, draw)
            for word in text.split("\u2581")[1:]
        ]
        ours.append((len(b), a == b))
        theirs.append(
            (sum(map(len, words)), sum(words, []) == [processor.id_to_piece(i) for i in a])
        )
    differences = np.array(ours, float) - np.array(theirs, float)
    assert (abs(differences.mean(0)) < 4 * differences.std(0) / math.sqrt(len(old))).all()
    assert np.mean([is_same for _, is_same in ours]) < 0.9


@pytest.mark.usefixtures("here")
def test_epochs_seeds_and_sides_draw_apart(store: Path) -> None:
    draws = [drawn(store, 0), drawn(store, 1), drawn(store, 0, seed=2)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.mean([a == b for a, b in zip(draws[i][0], draws[j][0], strict=True)]) < 0.5
    for side in ("ids", "offsets"):  # a store of equal sides: they must not be drawn alike
        shutil.copyfile(store / f"train.src.{side}.npy", store / f"train.tgt.{side}.npy")
    seal(store)
    src, tgt = drawn(store, 0)
    assert np.mean([a == b for a, b in zip(src, tgt, strict=True)]) < 0.5


@pytest.mark.usefixtures("here")
def test_at_a_vanishing_rate_the_stored_pieces_come_back(store: Path) -> None:
    assert drawn(store, 0, rate=1e-9) == stored(store)
    assert drawn(store, 0, rate=0.0) == stored(store)
    assert len(list(store.with_name("store.epochs").iterdir())) == 1  # none for rate 0


@pytest.mark.usefixtures("here")
def test_lost_characters_stay_and_too_many_pieces_keep_what_is_stored(store: Path) -> None:
    old, free, limited = (
        stored(store),
        drawn(store, 0, rate=0.9),
        drawn(store, 0, rate=0.9, max_pieces=20),
    )
    assert (
        old[0][LOST].count(UNK) == free[0][LOST].count(UNK) == 1 and free[0][LOST] != old[0][LOST]
    )
    lengths = [len(row) for side in free for row in side]
    assert max(lengths) > 40 and min(lengths) <= 20
    for side in (0, 1):
        expected = [a if len(b) > 20 else b for a, b in zip(old[side], free[side], strict=True)]
        assert limited[side] == expected


def test_no_difference_by_number_of_processes_or_who_asks_first(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmentation, "draw_block", slow)
    other = shutil.copytree(store, tmp_path / "other" / "store")
    answers: list[TokenStore] = []

    def ask(folder: Path, workers: int) -> None:
        with Segmentations(folder, 0.1, 1, None, workers) as segmentations:
            answers.append(segmentations(3))

    folders = [store, shutil.copytree(store, tmp_path / "third" / "store")]
    threads = [
        threading.Thread(target=ask, args=args) for args in zip(folders, (2, 3), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in (
        (600, 900),
        (0, 300),
        (900, N),
        (300, 600),
    ):  # out of order, here, and nothing remembered
        segmentation._opened.cache_clear()
        recipe = Recipe(other, "", 0.1, 1, None)
        rows = draw_block(recipe, 3, block)
        for side, (ids, lengths) in [
            (side, row)
            for found in answers
            for side, row in zip((found.src, found.tgt), rows, strict=True)
        ]:
            first, end = side.offsets[list(block)]
            assert np.array_equal(ids, side.ids[first:end])
            assert np.array_equal(lengths, np.diff(side.offsets)[slice(*block)])
    assert len(answers) == 2


@pytest.mark.usefixtures("here")
def test_many_ask_and_one_makes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fill = Segmentations._fill

    def counted(self: Segmentations, folder: Path, epoch: int, is_awaited: bool) -> None:
        made.append(epoch)
        time.sleep(0.3)  # the others find the folder locked
        fill(self, folder, epoch, is_awaited)

    monkeypatch.setattr(Segmentations, "_fill", counted)
    ranks = [Segmentations(store, 0.1, 1, None, 1) for _ in range(4)]
    for epoch in range(3):
        threads = [threading.Thread(target=rank, args=(epoch,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in ranks:
        rank.close()
    assert made[:3] == [0, 1, 2] and made in ([0, 1, 2], [0, 1, 2, 3])


@pytest.mark.usefixtures("here")
def test_epochs_left_behind_go_and_come_back_for_who_needs_them(store: Path) -> None:
    def kept() -> list[str]:
        return sorted(path.name for path in store.with_name("store.epochs").glob("*/epoch-*"))

    with (
        Segmentations(store, 0.1, 1, None, 1) as ahead,
        Segmentations(store, 0.1, 1, None, 1) as behind,
    ):
        first = rows_of(behind(0).src)
        for epoch in range(4):
            held = ahead(epoch)
        assert ahead._ahead is not None
        ahead._ahead.result()
        assert kept() == ["epoch-000003", "epoch-000004"]
        assert rows_of(behind(0).src) == first
        assert len(rows_of(held.src)) == N


@pytest.mark.usefixtures("here")
def test_another_store_under_the_same_name_is_drawn_anew(store: Path) -> None:
    before = drawn(store, 0)
    for side in ("ids", "offsets"):
        shutil.copyfile(store / f"train.tgt.{side}.npy", store / f"train.src.{side}.npy")
    seal(store)
    assert drawn(store, 0)[0] != before[0]
    assert len(list(store.with_name("store.epochs").iterdir())) == 2


@pytest.mark.usefixtures("here")
def test_a_model_that_is_not_a_bpe_is_refused(store: Path) -> None:
    lines = [line for pair in sentences(N, 0) for line in pair]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=50,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=1,
        minloglevel=2,
    )
    (store / VOCAB_FILE).write_bytes(model.getvalue())
    for side in ("src", "tgt"):
        writer = SideWriter(store, "train", side)
        rows = Vocab(model.getvalue()).encode(lines[:100])
        writer.append(np.array(sum(rows, []), np.uint16), np.array(list(map(len, rows))))
        writer.close()
    seal(store)
    with pytest.raises(UserError, match=r"not a BPE .* vocab\.bpe_dropout=0"):
        drawn(store, 0)


# ---- the loader on top ------------------------------------------------------------------------------------------


def take(store: Path, n: int, cursor: Cursor, rank: int = 0, size: int = 1) -> list[Update]:
    config = TrainingConfig(src_tokens=3_000, tgt_tokens=3_000)
    segmentations = Segmentations(store, 0.1, 7, None, 1)
    with (
        Loader(
            segmentations, config, 500, 7, cursor, World(rank, size, torch.device("cpu"))
        ) as updates,
        segmentations,
    ):
        return [next(updates) for _ in range(n)]


def content(update: Update) -> list[list[int]]:
    return [
        part.tolist()
        for m in update.micros
        for part in (m.batch.src.tokens, m.batch.tgt.tokens, m.batch.labels)
    ]


@pytest.mark.usefixtures("here")
def test_the_same_batches_after_a_stop_in_the_middle_of_an_epoch(store: Path) -> None:
    whole = take(store, 12, Cursor())
    k = next(k for k, update in enumerate(whole) if update.after == Cursor(1, 1))
    for is_kept in (True, False):
        if not is_kept:
            shutil.rmtree(store.with_name("store.epochs"))
        again = take(store, 2, whole[k].after)
        assert list(map(content, again)) == list(map(content, whole[k + 1 : k + 3]))
    shares = [take(store, 3, Cursor(1, 0), rank, 2) for rank in (0, 1)]
    for updates in zip(whole[k : k + 3], *shares, strict=True):
        assert len({(update.n_src, update.n_tgt, update.after) for update in updates}) == 1


@pytest.mark.usefixtures("here")
def test_training_continues_exactly(toy: Path, tmp_path: Path) -> None:
    from nmt.commands.train import main

    def weights(run: str) -> bytes:
        return (tmp_path / run / "checkpoints" / "last" / "model.safetensors").read_bytes()

    options = ["--config", str(toy), "vocab.bpe_dropout=0.1"]
    assert main(options) == 0
    assert main([*options, f"out={tmp_path}/two", "training.steps=11"]) == 0
    assert not (tmp_path / "store.epochs").exists()  # the end of a recipe takes them along
    assert main([*options, f"out={tmp_path}/two"]) == 0
    assert weights("run") == weights("two")
    assert main(["--config", str(toy), f"out={tmp_path}/plain"]) == 0
    assert weights("run") != weights("plain")


# ---- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("work", "told"), [(die, "killed"), (stumble, "stumbled")])
def test_what_goes_wrong_in_another_process_is_raised_in_training(
    work: Callable[..., None], told: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(store, 0)
    for early in store.with_name("store.epochs").glob(
        "*/epoch-000001"
    ):  # made behind its back, if there was time
        shutil.rmtree(early)
    monkeypatch.setattr(segmentation, "draw_block", work)
    with pytest.raises(UserError, match=told):
        take(store, 1, Cursor())  # nothing drawn for its seed yet
    config = TrainingConfig(src_tokens=3_000, tgt_tokens=3_000)
    segmentations = Segmentations(
        store, 0.1, 1, None, 1
    )  # epoch 0 is there, epoch 1 fails behind its back
    with (
        Loader(
            segmentations, config, 500, 1, Cursor(), World(0, 1, torch.device("cpu"))
        ) as updates,
        segmentations,
    ):
        with pytest.raises(UserError, match=told):
            for _ in range(100):
                assert next(updates).after.epoch < 2
    assert [path.name for path in store.with_name("store.epochs").glob("*/epoch-*")] == [
        "epoch-000000"
    ]


def test_a_close_ends_the_work_at_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def endless(work: object, tasks: object, workers: int) -> object:
        while True:
            began.set()
            time.sleep(0.01)
            yield [(np.ones(1, np.uint16), np.ones(1, np.int64))] * 2

    monkeypatch.setattr(segmentation, "ordered", endless)
    segmentations = Segmentations(store, 0.1, 1, None, 1)
    waiting = Segmentations(store, 0.1, 1, None, 1)  # another rank
    world = World(0, 1, torch.device("cpu"))
    with (
        Loader(segmentations, TrainingConfig(), 3_200, 1, Cursor(), world),
        segmentations,
    ):
        assert began.wait(10)
        with Loader(waiting, TrainingConfig(), 3_200, 1, Cursor(), world), waiting:
            time.sleep(0.1)
    (folder,) = store.with_name("store.epochs").iterdir()
    assert [path.name for path in folder.iterdir()] == [".lock"]


KILLED = """
import sys
from pathlib import Path
from block_faults import slow
from nmt.data import bpe_dropout as segmentation
segmentation.BLOCK, segmentation.draw_block = 10, slow
if __name__ == "__main__":
    segmentation.Segmentations(Path(sys.argv[1]), 0.1, 1, None, 2)(0)
"""


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux's /proc"
)
def test_a_killed_trainer_leaves_no_process_and_no_half_epoch(store: Path, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed.py"), str(store)],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"},
    )
    half = store.with_name("store.epochs")
    deadline = time.monotonic() + 60
    while len(pids := children(process.pid)) < 3:  # two workers and multiprocessing's tracker
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(half.glob("*/.epoch-000000.tmp")) and not list(half.glob("*/epoch-*"))
    after = drawn(store, 0)
    assert not list(half.glob("*/.epoch-*.tmp"))
    shutil.rmtree(half)
    assert after == drawn(store, 0)
