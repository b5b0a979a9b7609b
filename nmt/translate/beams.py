"""The state of a search, and what beam search and sampling share: lengths, penalties, prefixes, finished hypotheses.

A hypothesis's score is its log-probability divided by a penalty that depends on its length |Y|, which counts the final
eos. `decoding.stopping` selects when a sentence is done:
- `exact`: when no active hypothesis can still win, which cannot change the result, because log-probabilities only fall
  and penalties only grow;
- `full`: when `beam` hypotheses have finished;
- `likely`: when `beam` have finished, and the best active one would score no better than the worst of them if it ended
  at its current length;
- `never`: only at the length limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import ModelConfig
from nmt.data.batch import Packed
from nmt.data.vocab import BOS, EOS, PAD
from nmt.system.errors import Failure, UserError
from nmt.translate.search_rules import Length, SearchRules

NEG_INF = float("-inf")
MAX_BLOCK_LOGITS = 1 << 22  # on a CPU: as many as its cache holds


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]  # without bos and eos
    score: float  # penalised log-probability


class Decodable(Protocol):
    """A model that can be decoded with: a Transformer, an ensemble, or a test double.

    Each model defines its own caches. The one that `make_cache` returns has `reorder` and `keep`, like `Cache` in
    nmt/model/cache.py; the one that `make_static_cache` returns has the methods of `StaticCache`.
    """

    config: ModelConfig
    n_pieces: int  # in the vocabulary: only these can be chosen
    n_vocab: int  # in the softmax: the pieces and any unused rows after them

    def make_cache(self, src: Packed, beam: int, /) -> Any: ...
    def step(self, tokens: Tensor, cache: Any, /) -> Tensor: ...
    def projection(self, hidden: Tensor, /) -> Tensor: ...
    def make_static_cache(self, beam: int, /) -> Any: ...
    def refill_cache(
        self, cache: Any, src: Packed, n: int, capacity: int, max_capacity: int, /
    ) -> None: ...


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
    prefixes: Sequence[Sequence[int]] | None,
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
    limits = ((src.lengths - 1) * rules.max_ratio).long() + rules.max_extra
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


def find_done(beams: Beams, length: Length, rules: SearchRules) -> Tensor:
    """Return a mask of the sentences that are done after this step, (S,)."""
    best = beams.scores.amax(1)
    done = (best == NEG_INF) | (beams.limits < length)
    if rules.is_sampling:
        return done
    if rules.stopping == "exact":
        # At best, an active hypothesis reaches the length limit without losing any probability.
        bound = best / rules.compute_penalty(beams.limits + 1).to(best.device)
        done |= bound <= beams.finished_scores[:, rules.n_best - 1]
    elif rules.stopping == "full":
        done |= beams.n_finished >= rules.beam
    elif rules.stopping == "likely":
        present = best / rules.compute_penalty(length).to(best.device)
        done |= present <= beams.finished_scores[:, rules.beam - 1]
    return done


def make_hypotheses(rows: list[list[int]], scores: list[float]) -> list[Hypothesis]:
    """Return the finished hypotheses of one sentence, best first."""
    finished = []
    for row, score in zip(rows, scores, strict=True):
        if score > NEG_INF:
            finished.append(Hypothesis(row[: row.index(EOS)], score))
    if not finished:
        raise Failure(
            "search found no hypothesis, because the model's scores are NaN or infinite; "
            "use another checkpoint"
        )
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


# ---- parts of a step ----------------------------------------------------------------------------------------------


class LogitBlock(NamedTuple):
    """The logits of some sentences in a step, and what the rules say of their next pieces."""

    here: slice  # the sentences
    logits: Tensor  # (s * B, V)
    required: Tensor  # (s * B, 1): the only piece that may follow, or -1
    repeats: Tensor | None  # as of `find_repeats`


def compute_logit_blocks(
    beams: Beams, model: Decodable, hidden: Tensor, length: Length, rules: SearchRules
) -> Iterator[LogitBlock]:
    """Yield one block of sentences after another; on a CPU, blocks that fit into its cache."""
    n_sentences, beam = beams.scores.shape
    size = n_sentences
    if hidden.device.type == "cpu":
        size = max(1, MAX_BLOCK_LOGITS // (beam * model.n_vocab))
    required = find_required_pieces(beams, length)[:, None].expand(-1, beam)
    for first in range(0, n_sentences, size):
        here = slice(first, min(first + size, n_sentences))
        logits = model.projection(hidden[here.start * beam : here.stop * beam]).float()
        repeats = find_repeats(beams.ids[here].flatten(0, 1), length, rules)
        yield LogitBlock(here, logits, required[here].reshape(-1, 1), repeats)


def find_required_pieces(beams: Beams, length: Length) -> Tensor:
    """Return the piece each sentence must take in this step, (S,): its prefix's, eos at the limit,
    or -1 for any piece.
    """
    required = torch.where(beams.limits < length, EOS, -1)
    if isinstance(length, Tensor):
        forced = beams.forced.index_select(1, find_step_column(beams.forced, length)).squeeze(1)
    elif length <= beams.forced.shape[1]:
        forced = beams.forced[:, length - 1]
    else:
        return required
    return torch.where(forced >= 0, forced, required)


def find_repeats(ids: Tensor, length: Length, rules: SearchRules) -> Tensor | None:
    """Return the pieces that would complete an n-gram a second time, (R, k), given the pieces (R, t) said before.

    Where there are fewer, pad fills the rest. None if `decoding.no_repeat_ngram` is not set or nothing can repeat yet.
    """
    if rules.no_repeat_ngram is None or ids.shape[1] < rules.no_repeat_ngram:
        return None
    n_before = rules.no_repeat_ngram - 1  # pieces of an n-gram before its last
    n_said = length - 1
    followers = ids[:, n_before:]  # the last piece of each n-gram, (R, k)
    k = followers.shape[1]
    starts = ids.unfold(1, n_before, 1)[:, :k]  # (R, k, n - 1)
    newest = torch.arange(-n_before, 0, device=ids.device) + n_said
    # Steps that only warm up a recording may be later than the last column; their results are not used.
    newest = ids.index_select(
        1, newest.clamp(0, ids.shape[1] - 1)
    )  # the pieces just said, (R, n - 1)
    is_said = torch.arange(n_before, n_before + k, device=ids.device) < n_said
    is_repeat = (starts == newest[:, None]).all(2) & is_said
    return torch.where(is_repeat, followers, PAD)


def forbid_pieces(
    logits: Tensor, n_pieces: int, is_eos_forbidden: bool | Tensor, repeats: Tensor | None
) -> None:
    """Set the logits (R, V) of what may not be chosen freely to -inf: pad, bos, unused rows, repeats and, if forbidden,
    eos. A hypothesis that every other piece would repeat may end.
    """
    if repeats is not None:
        eos_logits = logits[:, EOS].clone()
    if n_pieces < logits.shape[1]:
        logits[:, n_pieces:] = NEG_INF
    logits[:, PAD] = NEG_INF
    logits[:, BOS] = NEG_INF
    if isinstance(is_eos_forbidden, Tensor):
        logits[:, EOS].masked_fill_(is_eos_forbidden, NEG_INF)
    elif is_eos_forbidden:
        logits[:, EOS] = NEG_INF
    if repeats is not None:
        logits.scatter_(1, repeats, NEG_INF)
        is_stuck = logits.amax(1) == NEG_INF
        logits[:, EOS] = torch.where(is_stuck, eos_logits, logits[:, EOS])


def find_step_column(rows: Tensor, length: Tensor) -> Tensor:
    """Return the column (1,) of a recorded step. Steps beyond capacity, whose results are
    discarded, use the last one.
    """
    return (length - 1).clamp(max=rows.shape[-1] - 1)


def append_pieces(ids: Tensor, pieces: Tensor, length: Length) -> Tensor:
    """Append a piece to each row: (S, N, t), (S, N) -> (S, N, t + 1). A recorded step writes its own column instead."""
    if isinstance(length, Tensor):
        return ids.index_copy(2, find_step_column(ids, length), pieces.unsqueeze(2))
    return torch.cat((ids, pieces.unsqueeze(2)), 2)


def pad_width(ids: Tensor, like: Tensor) -> Tensor:
    """Pad rows of pieces with eos to the width of `like`."""
    n_missing = like.shape[2] - ids.shape[2]
    return F.pad(ids, (0, n_missing), value=EOS) if n_missing else ids


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return tensor[s, index[s, i]] for all s and i: (S, N, T), (S, M) -> (S, M, T)."""
    return tensor.gather(1, index.unsqueeze(2).expand(-1, -1, tensor.shape[2]))
