"""The state of a search, which beam search and sampling share, and when a sentence is done.

`decoding.stopping` selects when a sentence is done:
- `exact`: when no active hypothesis can still win, which cannot change the result, because log-probabilities only fall
  and penalties only grow;
- `full`: when `beam` hypotheses have finished;
- `likely`: when `beam` have finished, and the best active one would score no better than the worst of them if it ended
  at its current length;
- `never`: only at the length limit.
The length limit is set by `start_beams`. The penalty of a length is in length_penalty.py, which pieces may follow in
allowed_pieces.py.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import ModelConfig, multiply_exactly
from nmt.data.batch import Packed, Sentences
from nmt.data.vocab import BOS, EOS
from nmt.system.errors import Failure, UserError
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.search_rules import SearchRules

NEG_INF = float("-inf")
NAN = float("nan")  # the score of a hypothesis whose logits were NaN or infinite


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]  # without bos and eos
    score: float  # penalised log-probability


BestHypotheses = list[list[Hypothesis]]  # of each sentence, best first


class Decodable(Protocol):
    """A model that can be decoded with: a Transformer, an ensemble, or a test double.

    Each model defines its own caches, which have `reorder` and `keep`, like `Cache` in nmt/model/cache.py.
    """

    config: ModelConfig
    n_pieces: int  # in the vocabulary: only these can be chosen
    writes_unknown: bool  # whether the unknown piece can be chosen
    n_vocab: int  # in the softmax: the pieces and any unused rows after them

    def make_cache(self, src: Packed, beam: int, /) -> Any: ...
    def step(self, tokens: Tensor, cache: Any, /) -> Tensor: ...
    def projection(self, hidden: Tensor, /) -> Tensor: ...


@dataclass
class Beams:
    """The S sentences still being searched, each with B = beam active hypotheses and its n best finished ones.

    Row i belongs to sentence number `sentences[i]`; rows are reordered when finished sentences are removed.
    """

    sentences: Tensor  # (S,)
    limits: Tensor  # (S,) the maximum number of pieces before eos
    forced: Tensor  # (S, P) the prefix that a translation must begin with; -1 where it is free
    tokens: Tensor  # (S, B) the last piece of each active hypothesis; bos at first
    ids: Tensor  # (S, B, t) all of its pieces; eos in the columns of later steps
    scores: Tensor  # (S, B) log-probabilities, best first; NEG_INF where there is no hypothesis
    finished_ids: Tensor  # (S, n, t)
    finished_scores: Tensor  # (S, n) penalised
    n_finished: Tensor  # (S,)

    def keep(self, n: int, free_rows: Tensor, moved_rows: Tensor) -> None:
        """Copy the rows `moved_rows` into `free_rows`, then keep only the first `n`."""
        for name, rows in vars(self).items():
            rows[free_rows] = rows[moved_rows]
            setattr(self, name, rows[:n])


def start_beams(
    src: Packed,
    rules: SearchRules,
    model: ModelConfig,
    prefixes: Sentences,
) -> Beams:
    """Return the state before the first step: each sentence at bos, with its length limit and its prefix."""
    n, device, beam = src.n_sentences, src.tokens.device, rules.beam

    # Pad the prefixes to equal length.
    prefixes = prefixes or [[]] * n
    longest_prefix = max(map(len, prefixes))
    padded = [[*prefix, *[-1] * (longest_prefix - len(prefix))] for prefix in prefixes]
    forced = torch.tensor(padded, dtype=torch.int64, device=device)

    # The length limit grows with the source; it is never below the prefix's length nor above the
    # position table's.
    limits = multiply_exactly(src.lengths - 1, rules.max_ratio) + rules.max_extra
    limits = limits.maximum((forced >= 0).sum(1))
    if model.positions == "learned":
        if longest_prefix >= model.max_positions:
            raise UserError(
                f"a prefix of {longest_prefix} pieces is longer than model.max_positions "
                f"{model.max_positions} allows; shorten it"
            )
        limits.clamp_(max=model.max_positions - 1)

    scores = torch.zeros(n, beam, device=device)
    if not rules.is_sampling:
        # start from one hypothesis, because identical ones would stay identical
        scores[:, 1:] = NEG_INF
    return Beams(
        sentences=torch.arange(n, device=device),
        limits=limits,
        forced=forced,
        tokens=torch.full((n, beam), BOS, device=device),
        ids=torch.full((n, beam, 0), EOS, device=device),
        scores=scores,
        finished_ids=torch.full((n, rules.n_kept, 0), EOS, device=device),
        finished_scores=torch.full((n, rules.n_kept), NEG_INF, device=device),
        n_finished=torch.zeros(n, dtype=torch.int64, device=device),
    )


def find_done(beams: Beams, length: int, rules: SearchRules) -> Tensor:
    """Return a mask of the sentences that are done after this step, (S,)."""
    best = beams.scores.amax(1)
    done = (best == NEG_INF) | (beams.limits < length)
    if rules.is_sampling:
        return done
    if rules.stopping == "exact":
        # At best, an active hypothesis reaches the length limit without losing any probability.
        bound = best / compute_penalty(beams.limits + 1, rules)
        done |= bound <= beams.finished_scores[:, rules.n_best - 1]
    elif rules.stopping == "full":
        done |= beams.n_finished >= rules.beam
    elif rules.stopping == "likely":
        present = best / compute_penalty(length, rules)
        done |= present <= beams.finished_scores[:, rules.beam - 1]
    return done


def make_hypotheses(rows: list[list[int]], scores: list[float]) -> list[Hypothesis]:
    """Return the finished hypotheses of one sentence, best first."""
    finished = []
    for row, score in zip(rows, scores, strict=True):
        if score > NEG_INF:
            finished.append(Hypothesis(row[: row.index(EOS)], score))
    if not finished or any(map(math.isnan, scores)):
        raise Failure(
            "search found no hypothesis, because the model's scores are NaN or infinite; "
            "use another checkpoint"
        )
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


# ---- parts of a step ----------------------------------------------------------------------------------------------


def mark_overflow(values: Tensor, scores: Tensor, earlier_scores: Tensor) -> Tensor:
    """Return `values`, but NaN where a score has just become -inf. A hypothesis that was absent stays absent."""
    marked = values.masked_fill(scores == NEG_INF, NAN)
    return marked.masked_fill(earlier_scores == NEG_INF, NEG_INF)


def find_ended(pieces: Tensor, scores: Tensor) -> Tensor:
    """Return which hypotheses end with these pieces. One of NaN does, too, and its sentence is refused later."""
    return (scores > NEG_INF) & (pieces == EOS) | scores.isnan()


def append_pieces(ids: Tensor, pieces: Tensor) -> Tensor:
    """Append a piece to each row: (S, N, t), (S, N) -> (S, N, t + 1)."""
    return torch.cat((ids, pieces.unsqueeze(2)), 2)


def append_eos(ids: Tensor) -> Tensor:
    """Pad each row with eos to the width of this step: (S, N, t) -> (S, N, t + 1)."""
    return F.pad(ids, (0, 1), value=EOS)


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return tensor[s, index[s, i]] for all s and i: (S, N, T), (S, M) -> (S, M, T)."""
    return tensor.gather(1, index.unsqueeze(2).expand(-1, -1, tensor.shape[2]))
