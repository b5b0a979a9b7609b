"""Search as its rules read, one sentence and one hypothesis at a time, and a language small enough
to look through.

Nothing here is shared with the search under test: log-probabilities are sums of Python floats over
whole prefixes, candidates are sorted lists. `Toy` stands for a model: the logits after a prefix are
a row of a random table, which row follows from the source and from each piece said. `Full` asks a
Transformer, by its full forward pass.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed, pack
from nmt.model.transformer import Transformer
from nmt.translate.search_state import Hypothesis

PAD, BOS, EOS = 0, 2, 3
Ids = tuple[int, ...]
Ranked = list[tuple[float, Ids]]  # scores and pieces, best first


class Oracle(Protocol):
    """Log-probabilities of all pieces after a prefix."""

    config: ModelConfig

    def after(self, src: Ids, prefix: Ids) -> list[float]: ...

    def after_each(self, src: Ids, prefixes: Sequence[Ids]) -> list[list[float]]: ...


# ---- two kinds of models ------------------------------------------------------------------------------------------


@dataclass
class ToyCache:
    """What each hypothesis has said, as the number of its row, (S, B)."""

    rows: Tensor

    def reorder(self, parents: Tensor) -> None:
        self.rows = self.rows.gather(1, parents)

    def keep(self, n: int, free_rows: Tensor, moved_rows: Tensor) -> None:
        self.rows[free_rows] = self.rows[moved_rows]
        self.rows = self.rows[:n]


class Toy:
    """`ending` is added to the logit of eos, `n` is the size of the vocabulary."""

    def __init__(
        self,
        seed: int,
        n: int = 6,
        ending: float = 0.0,
        n_rows: int = 4093,
        config: ModelConfig | None = None,
    ) -> None:
        self.config, self.n_pieces, self.n_vocab = config or ModelConfig(), n, n
        self.writes_unknown = True
        self.table = torch.randn(n_rows, n, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.table[:, EOS] += ending
        self.n_steps = 0
        self.known: dict[int, list[float]] = {}

    def moved(self, row: int, piece: int) -> int:
        return (row * 31 + piece * 7 + 1) % len(self.table)

    def after(self, src: Ids, prefix: Ids) -> list[float]:
        row = 0
        for piece in (*src, BOS, *prefix):
            row = self.moved(row, piece)
        if row not in self.known:
            self.known[row] = log_softmax(self.table[row].tolist())
        return self.known[row]

    def after_each(self, src: Ids, prefixes: Sequence[Ids]) -> list[list[float]]:
        return [self.after(src, prefix) for prefix in prefixes]

    def make_cache(self, src: Packed, beam: int) -> ToyCache:
        rows = []
        for a, b in itertools.pairwise(src.offsets.tolist()):
            row = 0
            for piece in src.tokens[a:b].tolist():
                row = self.moved(row, piece)
            rows.append([row] * beam)
        return ToyCache(torch.tensor(rows))

    def step(self, tokens: Tensor, cache: ToyCache) -> Tensor:
        self.n_steps += len(cache.rows)
        cache.rows = (cache.rows * 31 + tokens.view_as(cache.rows) * 7 + 1) % len(self.table)
        return cache.rows.view(-1, 1)

    def projection(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0]]


class Full:
    """All that is asked at once takes one pass: test_transformer.py holds a pass of many to those of
    each alone.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config
        self.memories: dict[Ids, Tensor] = {}
        self.known: dict[tuple[Ids, Ids], list[float]] = {}

    def after(self, src: Ids, prefix: Ids) -> list[float]:
        (row,) = self.after_each(src, [prefix])
        return row

    def after_each(self, src: Ids, prefixes: Sequence[Ids]) -> list[list[float]]:
        new = [prefix for prefix in prefixes if (src, prefix) not in self.known]
        if new:
            self.ask(src, new)
        return [self.known[src, prefix] for prefix in prefixes]

    def ask(self, src: Ids, prefixes: Sequence[Ids]) -> None:
        if src not in self.memories:
            self.memories[src] = self.model.encode(pack([src]))
        n = len(prefixes)
        memory = self.memories[src].repeat(n, 1)
        said = [[BOS, *prefix] for prefix in prefixes]
        hidden = self.model.decode(pack(said), memory, pack([src] * n))
        logits = iter(self.model.projection(hidden).tolist())
        for prefix in prefixes:
            for length in range(len(prefix) + 1):
                row = log_softmax(next(logits))
                self.known[src, prefix[:length]] = row[: self.model.n_pieces]


def log_softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    whole = most + math.log(math.fsum(math.exp(x - most) for x in logits))
    return [x - whole for x in logits]


# ---- the rules ----------------------------------------------------------------------------------------------------


def divisor(n: int, config: DecodingConfig) -> float:
    alpha = config.length_penalty
    return float({"gnmt": ((5 + n) / 6) ** alpha, "length": n**alpha, "none": 1.0}[config.penalty])


def score_of(oracle: Oracle, src: Ids, said: Sequence[int], config: DecodingConfig) -> float:
    """The score of a hypothesis that ends after these pieces."""
    pieces = (*said, EOS)
    total = sum(oracle.after(src, pieces[:n])[piece] for n, piece in enumerate(pieces))
    return total / divisor(len(pieces), config)


def limit(src: Ids, config: DecodingConfig, model: ModelConfig, prefix: Ids) -> int:
    """The most pieces before eos."""
    ratio = Fraction(str(config.max_ratio))  # as it is written
    most = max(int(ratio * (len(src) - 1)) + config.max_extra, len(prefix))
    return min(most, model.max_positions - 1) if model.positions == "learned" else most


def allowed(said: Ids, size: int, longest: int, config: DecodingConfig, prefix: Ids) -> list[int]:
    """The pieces that may come after some."""
    n = len(said)
    if n < len(prefix):
        return [prefix[n]]
    if n >= longest:
        return [EOS]
    free = [piece for piece in range(size) if piece not in (PAD, BOS, EOS)]
    free = [piece for piece in free if not repeats(said, piece, config.no_repeat_ngram)]
    if n >= config.min_length or not free:
        free.append(EOS)
    return free


def repeats(said: Ids, piece: int, size: int | None) -> bool:
    """Whether the piece makes the last n-gram equal an earlier one."""
    if size is None:
        return False
    text = (*said, piece)
    grams = [text[i : i + size] for i in range(len(text) - size + 1)]
    return grams[-1:] != [] and grams[-1] in grams[:-1]


def everything(oracle: Oracle, src: Ids, config: DecodingConfig, prefix: Ids = ()) -> Ranked:
    """Each sequence that may be said, with its score."""
    longest = limit(src, config, oracle.config, prefix)

    def ends(said: Ids, total: float) -> Iterator[tuple[float, Ids]]:
        row = oracle.after(src, said)
        for piece in allowed(said, len(row), longest, config, prefix):
            if piece == EOS:
                yield (total + row[EOS]) / divisor(len(said) + 1, config), said
            else:
                yield from ends((*said, piece), total + row[piece])

    return sorted(ends((), 0.0), reverse=True)


def recursion(
    oracle: Oracle,
    src: Ids,
    config: DecodingConfig,
    n_best: int = 1,
    prefix: Ids = (),
    margins: list[float] | None = None,
) -> Ranked:
    """The best that a beam search finishes, step by step, as the head of nmt/translate/search.py
    tells it. `margins` gets by how much the last that was kept is better than the first that was not.
    """
    beam, longest = config.beam, limit(src, config, oracle.config, prefix)
    living: Ranked = [(0.0, ())]
    finished: Ranked = []
    for n in range(longest + 1):
        candidates: list[tuple[float, int, Ids]] = []
        rows = oracle.after_each(src, [said for _, said in living])
        for (total, said), row in zip(living, rows, strict=True):
            candidates += [
                (total + row[piece], piece, said)
                for piece in allowed(said, len(row), longest, config, prefix)
            ]
        candidates.sort(reverse=True)
        looked_at = candidates[: 2 * beam if beam > 1 else 1]
        if config.finishing == "shrink":
            looked_at = looked_at[: beam - len(finished)]
        living = []
        for rank, (total, piece, said) in enumerate(looked_at):
            if piece != EOS:
                living.append((total, (*said, piece)))
            elif (config.finishing == "any" or rank < beam) and not (
                config.stopping == "full" and len(finished) >= beam
            ):
                finished.append((total / divisor(n + 1, config), said))
        if margins is not None:
            for scores in ([one[0] for one in living], [one[0] for one in candidates]):
                if len(scores) > beam:
                    margins.append(scores[beam - 1] - scores[beam])
        living = living[:beam]
        finished_scores = sorted((score for score, _ in finished), reverse=True)
        if not living:
            break
        best = living[0][0]
        if config.stopping == "full" and len(finished) >= beam:
            break
        if (
            config.stopping == "likely"
            and len(finished) >= beam
            and (best / divisor(n + 1, config) <= finished_scores[beam - 1])
        ):
            break
        if (
            config.stopping == "exact"
            and len(finished) >= n_best
            and (best / divisor(longest + 1, config) <= finished_scores[n_best - 1])
        ):
            break
    return sorted(finished, reverse=True)[:n_best]


# ---- comparing ----------------------------------------------------------------------------------------------------


def assert_same(
    found: Sequence[Hypothesis],
    expected: Sequence[tuple[float, Ids]],
    where: str = "",
    within: float = 1e-5,
) -> None:
    """The same hypotheses and scores; two whose scores are nearer than the bound may stand in
    either order. A sum in fp32 of some 60 nats is not as exact as the bound, which is for less.
    """
    got = [one.score for one in found]
    assert len(got) == len(expected), where
    assert np.allclose(got, [score for score, _ in expected], rtol=5e-7, atol=within), (
        where,
        got,
        expected,
    )
    for one, (_, ids) in zip(found, expected, strict=True):
        if tuple(one.ids) != ids:
            tied = [other for score, other in expected if abs(score - one.score) < within]
            assert tuple(one.ids) in tied, (where, one, expected)
