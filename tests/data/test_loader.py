"""Batches against what the store holds, the deal over ranks, and continuation from a cursor."""

from dataclasses import replace
from itertools import islice

import numpy as np
from pytest import mark, raises
from support.processor import ALONE, CPU

from nmt.config import Grouping, TrainingConfig
from nmt.data.batch import Batch
from nmt.data.loader import Loader, Update, make_batch, make_micro_batches, make_updates
from nmt.data.mixture import CorpusShare, Mixture
from nmt.data.plan import Cursor, choose_shape
from nmt.data.store import Side, TokenStore
from nmt.data.vocab import BOS, EOS
from nmt.system.errors import UserError
from nmt.system.ranks import World

MICRO_TOKENS = 60
CONFIG = TrainingConfig(src_tokens=200, tgt_tokens=200)


def make_store(n: int = 200) -> TokenStore:
    def side(seed: int) -> Side:
        rng = np.random.default_rng(seed)
        offsets = np.concatenate(([0], np.cumsum(rng.integers(1, 20, n))))
        return Side(rng.integers(4, 90, int(offsets[-1])).astype(np.uint16), offsets)

    return TokenStore(side(0), side(1))


START = Cursor()
MIXTURE = Mixture((CorpusShare(50, 125), CorpusShare(150, 30)))
with_every_order = mark.parametrize(
    "grouping, mixture", [("random", None), ("length", None), ("random", MIXTURE)]
)


def take(
    store: TokenStore,
    n: int,
    cursor: Cursor = START,
    rank: int = 0,
    size: int = 1,
    grouping: Grouping = "random",
    mixture: Mixture | None = None,
) -> list[Update]:
    config = replace(CONFIG, grouping=grouping)
    world = World(rank, size, CPU)
    loader = Loader(
        make_updates(lambda epoch: store, config, MICRO_TOKENS, 7, cursor, world, mixture=mixture)
    )
    with loader as updates:
        return [next(updates) for _ in range(n)]


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    sides = (
        (batch.src, batch.src.tokens),
        (batch.tgt, batch.tgt.tokens),
        (batch.tgt, batch.labels),
    )
    parts = (
        [part.tolist() for part in x[: side.n_live].split(side.lengths.tolist())]
        for side, x in sides
    )
    return list(zip(*parts, strict=True))


def test_a_batch_is_what_the_store_holds_with_marks() -> None:
    store, ids = make_store(), np.array([5, 0, 199, 17])
    batch = make_batch(store, ids)

    def pieces(side: Side, i: int) -> list[int]:
        return [int(t) for t in side.ids[side.offsets[i] : side.offsets[i + 1]]]

    expected = [
        (pieces(store.src, i) + [EOS], [BOS] + pieces(store.tgt, i), pieces(store.tgt, i) + [EOS])
        for i in ids
    ]
    assert rows(batch) == expected
    assert batch.n_tokens == sum(len(labels) for _, _, labels in expected)
    assert batch.src.longest == max(len(src) for src, _, _ in expected)


@with_every_order
def test_continues_exactly_from_any_cursor_across_epochs(
    grouping: Grouping, mixture: Mixture | None
) -> None:
    store = make_store()
    whole = take(store, 30, grouping=grouping, mixture=mixture)
    assert whole[-1].next_cursor.epoch >= 1
    for k in (0, 3, 11, 28):
        (again,) = take(store, 1, whole[k].next_cursor, grouping=grouping, mixture=mixture)
        assert [rows(m.batch) for m in again.micros] == [rows(m.batch) for m in whole[k + 1].micros]
        for field in ("n_src", "n_tgt", "next_cursor"):
            assert getattr(again, field) == getattr(whole[k + 1], field)


def test_each_epoch_is_read_from_its_own_store() -> None:
    stores = {epoch: make_store(100 + 50 * epoch) for epoch in range(2, 5)}
    seen: list[Update] = []
    with Loader(
        make_updates(lambda epoch: stores[epoch], CONFIG, MICRO_TOKENS, 7, Cursor(2, 3), ALONE)
    ) as updates:
        while not seen or seen[-1].next_cursor.epoch < 4:
            seen.append(next(updates))
    first = next(i for i, update in enumerate(seen) if update.next_cursor.epoch == 3) + 1
    whole = sorted(row for update in seen[first:] for m in update.micros for row in rows(m.batch))
    assert whole == sorted(rows(make_batch(stores[3], np.arange(250))))


@mark.parametrize("size", [2, 7])
@with_every_order
def test_ranks_share_each_update_without_loss_or_double(
    grouping: Grouping, mixture: Mixture | None, size: int
) -> None:
    store = make_store()
    alone = take(store, 12, grouping=grouping, mixture=mixture)
    of_ranks = [take(store, 12, START, rank, size, grouping, mixture) for rank in range(size)]
    for k, update in enumerate(alone):
        shares = [ranks[k] for ranks in of_ranks]
        # All take part in every sum of gradients
        assert len({len(share.micros) for share in shares}) == 1
        counted = {
            m.number: rows(m.batch) for share in shares for m in share.micros if m.batch.n_tokens
        }
        assert counted == {m.number: rows(m.batch) for m in update.micros}
        blanks = [m for share in shares for m in share.micros if not m.batch.n_tokens]
        assert all((m.batch.labels == -1).all() for m in blanks)
        assert all(
            (s.n_src, s.n_tgt, s.next_cursor) == (update.n_src, update.n_tgt, update.next_cursor)
            for s in shares
        )


def test_an_error_in_the_thread_reaches_the_trainer() -> None:
    store = make_store()
    # Ids that are not there
    broken = TokenStore(Side(store.src.ids[:10], store.src.offsets), store.tgt)
    with (
        Loader(
            make_updates(lambda epoch: broken, CONFIG, MICRO_TOKENS, 7, Cursor(), ALONE)
        ) as updates,
        raises(UserError, match="the token store: is damaged"),
    ):
        for _ in islice(iter(lambda: next(updates), None), 5):
            pass


def test_constant_shapes_hold_the_same_sentences() -> None:
    store = make_store()
    shape = choose_shape(store.src.lengths, store.tgt.lengths, MICRO_TOKENS)
    with Loader(
        make_updates(lambda epoch: store, CONFIG, MICRO_TOKENS, 7, START, ALONE, shape)
    ) as updates:
        taken = [next(updates) for _ in range(10)]
    with Loader(
        make_updates(lambda epoch: store, CONFIG, shape.tgt_tokens, 7, START, ALONE)
    ) as updates:
        plainly = [next(updates) for _ in range(10)]
    for update, plain in zip(taken, plainly, strict=True):
        for micro, expected in zip(update.micros, plain.micros, strict=True):
            batch, n = micro.batch, expected.batch.src.n_sentences
            assert batch.has_shape(shape) and not expected.batch.has_shape(shape)
            assert (
                rows(batch)[:n] == rows(expected.batch)
                and batch.n_tokens == expected.batch.n_tokens
            )
            assert all(row == ([], [], []) for row in rows(batch)[n:])
            assert (batch.labels[batch.tgt.n_live :] == -1).all() and (
                batch.labels >= 0
            ).sum() == batch.n_tokens
            assert batch.src.longest >= expected.batch.src.longest
    # pairs that do not fit have a shape of their own
    own = plain.micros[0].batch
    for tight in (replace(shape, sentences=1), replace(shape, longest=1)):
        batch = make_batch(store, plain.pairs[0], tight)
        assert rows(batch) == rows(own) and batch.src.longest == own.src.longest
    # an update of one micro-batch leaves the second rank a blank one
    (blank,) = make_micro_batches(store, list(plain.pairs[:1]), World(1, 2, CPU), shape)
    assert blank.batch.has_shape(shape) and blank.batch.n_tokens == 0
    assert (blank.batch.labels == -1).all()
