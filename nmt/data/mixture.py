"""How often each corpus is seen in an epoch: `weight` of a corpus, and `data.temperature`.

A store holds each corpus once, whatever its weight. With a weight of 2.3, an epoch has every pair of
the corpus twice, and 30% of its pairs a third time. These are drawn anew for each epoch, from (seed,
epoch) alone: so all ranks draw the same pairs, and a run can continue in the middle of an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nmt.config import DataConfig
from nmt.system.errors import UserError


@dataclass(frozen=True)
class CorpusShare:
    """A corpus: its pairs in the store, and how many pairs of it an epoch has."""

    stored: int
    drawn: int


@dataclass(frozen=True)
class Mixture:
    """The corpora in the order in which the store holds them."""

    shares: tuple[CorpusShare, ...]

    def draw_rows(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of an epoch's pairs in the store, uint32, corpus by corpus."""
        rows = []
        first = 0
        for number, share in enumerate(self.shares):
            stored = np.arange(first, first + share.stored, dtype=np.uint32)
            first += share.stored
            n_copies, n_rest = divmod(share.drawn, max(1, share.stored))
            shuffled = make_random(seed, epoch, number).permutation(stored)
            rows += [stored] * n_copies + [shuffled[:n_rest]]
        return np.concatenate(rows)

    def count_tokens(self, lengths: np.ndarray) -> float:
        """Return how many tokens an epoch has on average; `lengths` are those of the stored pairs."""
        total = 0.0
        first = 0
        for share in self.shares:
            tokens = int(lengths[first : first + share.stored].sum())
            first += share.stored
            total += tokens * share.drawn / max(1, share.stored)
        return total


def make_random(*key: int) -> np.random.Generator:
    """Return the random numbers that belong to this key, such as a seed and an epoch, and to no other."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def compute_weights(data: DataConfig, sizes: Sequence[int]) -> list[float]:
    """Return the weight of each training corpus, given its pairs in the store.

    With a temperature T, a corpus of n pairs makes up n^(1/T) of the epoch, in proportion to the
    others, and the epoch is as long as without.
    """
    if data.temperature is None:
        return [1.0 if corpus.weight is None else corpus.weight for corpus in data.train]
    powers = [n ** (1 / data.temperature) for n in sizes]
    scale = sum(sizes) / sum(powers)
    return [scale * part / n if n else 1.0 for part, n in zip(powers, sizes, strict=True)]


def make_mixture(data: DataConfig, sizes: Sequence[int]) -> Mixture:
    """Decide how many pairs of each training corpus an epoch has."""
    shares = []
    for number, (n, weight) in enumerate(zip(sizes, compute_weights(data, sizes), strict=True)):
        share = CorpusShare(n, round(weight * n))
        if n and not share.drawn:
            raise UserError(
                f"data.train[{number}]: {n:,} pairs with a weight of {weight:.3g} make up less "
                "than one pair of an epoch; raise the weight, or leave the corpus out"
            )
        shares.append(share)
    return Mixture(tuple(shares))
