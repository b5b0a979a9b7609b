"""Beam search with a cache, for many sentences at once: section 6.1 of the paper, and the rules of others by name.

A hypothesis' score is its log-probability over a penalty of its length |Y|, closing eos included. At each step the
2 * beam best continuations of a sentence are looked at; a beam of 1 looks at the very best alone, which is greedy.
`finishing` says which of those that end count: `any` of them (the paper's code); those among the `beam` best (`top`:
fairseq, Hugging Face, CTranslate2); or those, and the beam is narrower by each from then on (`shrink`: Marian).
`stopping` says when a sentence is done: when no living hypothesis can still win (`exact`, which cannot change the
result, for log-probabilities only fall and penalties only grow); when `beam` have finished (`full`); when so many have
and the best living one is no better at its present length (`likely`); or at the limit (`never`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import Packed
from nmt.data.vocab import BOS, EOS, PAD
from nmt.system.errors import Failure, UserError

NEVER = float("-inf")
GROUP = 64  # pieces whose best is looked at first
BLOCK = 1 << 22  # logits looked at together


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]  # without bos and eos
    score: float  # penalised log-probability


class Speaker(Protocol):
    """What can be searched: a Transformer, or what stands for one. It makes and takes its own kind of cache, which can
    `reorder` and `keep` as `Cache` of nmt/model/cache.py does, or, in place, what `StaticCache` does."""

    config: ModelConfig
    n_vocab: int

    def start(self, src: Packed, beam: int) -> Any: ...
    def step(self, tokens: Tensor, cache: Any) -> Tensor: ...
    def projection(self, hidden: Tensor) -> Tensor: ...
    def static_cache(self, beam: int) -> Any: ...
    def restart(self, cache: Any, src: Packed, n: int, room: int, most_room: int) -> None: ...
    def sentence_bytes(self, beam: int, longest: int, room: int) -> int: ...


# The number of a step, from 1 on. As an int it is the CPU's: tensors grow by a column with each step. As a tensor (1,)
# on the device it is that of a recorded step: there tensors have room for steps to come, and keep their shapes.
Length = int | Tensor


def penalty(length: Length, config: DecodingConfig) -> Tensor:
    """What the log-probability of a hypothesis of so many pieces, eos included, is divided by."""
    size = torch.as_tensor(length, dtype=torch.float32)
    if config.penalty == "gnmt":
        return ((5.0 + size) / 6.0) ** config.length_penalty
    return size**config.length_penalty if config.penalty == "length" else torch.ones_like(size)


@dataclass
class Beams:
    """The sentences that are still searched, S of them, with B = beam living hypotheses and n best finished ones each.

    A row belongs to the sentence `sentences` names; rows change places when sentences leave.
    """

    sentences: Tensor  # (S,)
    limits: Tensor  # (S,)
    forced: Tensor  # (S, P) the first pieces of a translation; -1 where it is free
    tokens: Tensor  # (S, B) the last piece of each living hypothesis; bos, at first
    ids: Tensor  # (S, B, t) all of its pieces; beyond them eos, where there is room for more
    scores: Tensor  # (S, B) log-probabilities, best first; NEVER where there is no hypothesis
    finished_ids: Tensor  # (S, n, t)
    finished_scores: Tensor  # (S, n) penalised
    n_finished: Tensor  # (S,)

    def keep(self, n: int, holes: Tensor, movers: Tensor) -> None:
        for name, rows in vars(self).items():
            rows[holes] = rows[movers]
            setattr(self, name, rows[:n])


@torch.inference_mode()
def search(
    model: Speaker,
    src: Packed,
    config: DecodingConfig,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` best translations of each sentence, best first. Source sentences end with eos; a translation begins
    with the pieces that `prefixes` gives for its sentence. With `config.sample`, so many draws in place of the best."""
    beam = width(config, n_best)
    live = begin(src, config, model.config, n_best, prefixes)
    lots = draw_lots(src, live.limits, beam, config.seed) if config.sample else None
    cache = model.start(src, beam)
    results: list[list[Hypothesis]] = [[] for _ in range(src.n_sentences)]
    length = 0  # pieces said, eos included
    while True:
        length += 1
        hidden = model.step(live.tokens.flatten(), cache)
        if lots is None:
            cache.reorder(advance(live, model, hidden, length, config))
        else:
            say(live, model, hidden, lots[live.sentences, :, length - 1], length, config)
        done = is_done(live, length, config, n_best)
        if done.any():
            found = [
                x[done].tolist()
                for x in (live.finished_ids[:, :n_best], live.finished_scores[:, :n_best])
            ]
            for sentence, rows, scores in zip(live.sentences[done].tolist(), *found, strict=True):
                results[sentence] = hypotheses(rows, scores)
            n = int((~done).sum())
            if n == 0:
                break
            holes, movers = done[:n].nonzero().squeeze(1), n + (~done[n:]).nonzero().squeeze(1)
            live.keep(n, holes, movers)
            cache.keep(n, holes, movers)
    return results


def width(config: DecodingConfig, n_best: int) -> int:
    """How many hypotheses of a sentence live at a time."""
    if config.sample:
        return n_best
    if n_best > config.beam:
        raise UserError(
            f"the {n_best} best of a beam of {config.beam} are asked for; raise decoding.beam"
        )
    return config.beam


def begin(
    src: Packed,
    config: DecodingConfig,
    model: ModelConfig,
    n_best: int,
    prefixes: Sequence[Sequence[int]] | None,
) -> Beams:
    n, device, beam = src.n_sentences, src.tokens.device, width(config, n_best)
    prefixes = prefixes or [[]] * n
    longest = max(map(len, prefixes))
    padded = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in prefixes]
    forced = torch.tensor(padded, dtype=torch.int64, device=device)
    limits = ((src.lengths - 1) * config.max_ratio).long() + config.max_extra
    limits = limits.maximum((forced >= 0).sum(1))
    if model.positions == "learned":
        if longest >= model.max_positions:
            raise UserError(
                f"a prefix of {longest} pieces is longer than model.max_positions {model.max_positions} "
                "allows; shorten it"
            )
        limits.clamp_(max=model.max_positions - 1)
    n_kept = beam if config.stopping == "likely" else n_best
    scores = torch.zeros(n, beam, device=device)
    if not config.sample:
        scores[:, 1:] = NEVER  # there is but one beginning
    return Beams(
        torch.arange(n, device=device),
        limits,
        forced,
        torch.full((n, beam), BOS, device=device),
        torch.full((n, beam, 0), EOS, device=device),
        scores,
        torch.full((n, n_kept, 0), EOS, device=device),
        torch.full((n, n_kept), NEVER, device=device),
        torch.zeros(n, dtype=torch.int64, device=device),
    )


def advance(
    live: Beams, model: Speaker, hidden: Tensor, length: Length, config: DecodingConfig
) -> Tensor:
    """One piece more for each hypothesis, by search; returns which one each of them continues, (S, B)."""
    beam = config.beam
    only = _musts(live, length)
    parts = [
        _continuations(
            logits,
            live.scores[here],
            only[here],
            length <= config.min_length,
            2 * beam if beam > 1 else 1,
        )
        for here, logits in _blocks(model, hidden, beam)
    ]
    parents, pieces, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    rank = torch.arange(scores.shape[1], device=scores.device)
    if config.finishing == "shrink":
        scores = scores.masked_fill(rank >= beam - live.n_finished[:, None], NEVER)
    ended = (pieces == EOS) & (scores > NEVER)
    grown = _extended(_rows(live.ids, parents), pieces, length)  # (S, 2B, t + 1)

    # The finished: the best of those known and those that end here.
    counted = ended if config.finishing == "any" else ended & (rank < beam)
    if config.stopping == "full":
        counted = counted & (live.n_finished[:, None] + counted.cumsum(1) <= beam)
    ending = scores.masked_fill(~counted, NEVER) / penalty(length, config).to(scores.device)
    live.n_finished = live.n_finished + counted.sum(1)
    live.finished_scores, order = torch.cat((live.finished_scores, ending), 1).topk(
        live.finished_scores.shape[1], 1
    )
    live.finished_ids = _rows(torch.cat((_widened(live.finished_ids, grown), grown), 1), order)

    # The living: the best of the others.
    live.scores, order = scores.masked_fill(ended, NEVER).topk(beam, 1)
    live.tokens = pieces.gather(1, order)
    live.ids = _rows(grown, order)
    return parents.gather(1, order)


def is_done(live: Beams, length: Length, config: DecodingConfig, n_best: int) -> Tensor:
    best = live.scores.amax(1)
    done = (best == NEVER) | (live.limits < length)
    if config.sample:
        return done
    if config.stopping == "exact":
        done |= (
            best / penalty(live.limits + 1, config).to(best.device)
            <= live.finished_scores[:, n_best - 1]
        )
    elif config.stopping == "full":
        done |= live.n_finished >= config.beam
    elif config.stopping == "likely":
        done |= (
            best / penalty(length, config).to(best.device)
            <= live.finished_scores[:, config.beam - 1]
        )
    return done


def hypotheses(rows: list[list[int]], scores: list[float]) -> list[Hypothesis]:
    """What was finished of a sentence that is done, best first."""
    found = [
        Hypothesis(row[: row.index(EOS)], score)
        for row, score in zip(rows, scores, strict=True)
        if score > NEVER
    ]
    if not found:
        raise Failure(
            "the search found nothing, for the model's scores are no numbers; take another checkpoint"
        )
    return sorted(found, key=lambda one: -one.score)


def _blocks(model: Speaker, hidden: Tensor, beam: int) -> Iterator[tuple[slice, Tensor]]:
    """The logits (s * B, V) of some sentences after others: so many that a cache of the processor holds them."""
    n_sentences = hidden.shape[0] // beam
    size = n_sentences if hidden.device.type != "cpu" else max(1, BLOCK // (beam * model.n_vocab))
    for first in range(0, n_sentences, size):
        here = slice(first, min(first + size, n_sentences))
        yield here, model.projection(hidden[here.start * beam : here.stop * beam]).float()


def _musts(live: Beams, length: Length) -> Tensor:
    """What each sentence must say as its piece of that number, (S,); -1 where it is free."""
    only = torch.where(live.limits < length, EOS, -1)
    if isinstance(length, Tensor):
        forced = live.forced.index_select(1, _column(live.forced, length)).squeeze(1)
    elif length <= live.forced.shape[1]:
        forced = live.forced[:, length - 1]
    else:
        return only
    return torch.where(forced >= 0, forced, only)


def _column(rows: Tensor, length: Tensor) -> Tensor:
    """The column (1,) of a step's pieces. The last column serves steps beyond the room, whose result nobody uses."""
    return (length - 1).clamp(max=rows.shape[-1] - 1)


def _extended(ids: Tensor, pieces: Tensor, length: Length) -> Tensor:
    """Rows of pieces with one piece more each: (S, N, t), (S, N) -> (S, N, t + 1)."""
    if isinstance(length, Tensor):
        return ids.index_copy(2, _column(ids, length), pieces.unsqueeze(2))
    return torch.cat((ids, pieces.unsqueeze(2)), 2)


def _widened(ids: Tensor, like: Tensor) -> Tensor:
    """Rows of pieces as wide as others, with eos at their ends."""
    n_missing = like.shape[2] - ids.shape[2]
    return F.pad(ids, (0, n_missing), value=EOS) if n_missing else ids


def _forbid(logits: Tensor, must_go_on: bool | Tensor) -> None:
    """Rule out of logits (R, V) what may not be said next by anybody who is free to choose."""
    logits[:, PAD] = NEVER
    logits[:, BOS] = NEVER
    if isinstance(must_go_on, Tensor):
        logits[:, EOS].masked_fill_(must_go_on, NEVER)
    elif must_go_on:
        logits[:, EOS] = NEVER


def _continuations(
    logits: Tensor, scores: Tensor, only: Tensor, must_go_on: bool | Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The n best (parent, piece, log-probability) of each sentence, each (S, n), of logits (S * B, V) and what their
    hypotheses weigh, (S, B)."""
    # torch's log_softmax takes half the time of its logsumexp
    base = scores.flatten() - (logits[:, EOS] - logits.log_softmax(1)[:, EOS])
    only = only[:, None].expand_as(scores).reshape(-1, 1)  # (S * B, 1)
    demanded = logits.gather(1, only.clamp(min=0))
    _forbid(logits, must_go_on)
    values, pieces = _best(logits, n)  # the sentence's n best are among each parent's n best

    # Where a piece is demanded, it is the best continuation and there is no other.
    alone = F.pad(demanded, (0, values.shape[1] - 1), value=NEVER)
    values = torch.where(only < 0, values, alone)
    pieces = torch.where(only < 0, pieces, only)

    totals = (values + base[:, None]).view(len(scores), -1)
    n_each = values.shape[1]
    if totals.shape[1] < n:  # a toy vocabulary
        totals = F.pad(totals, (0, n - totals.shape[1]), value=NEVER)
    best, index = totals.topk(n, 1)
    index = index.clamp(max=scores.shape[1] * n_each - 1)
    return index // n_each, pieces.view(len(scores), -1).gather(1, index), best


def _best(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """logits.topk(n, 1): the best of each group of pieces are found first, and then the best of the best groups."""
    n_groups = logits.shape[1] // GROUP
    if n_groups < 4 * n:
        return logits.topk(min(n, logits.shape[1]), 1)
    grouped = logits[:, : n_groups * GROUP].unflatten(1, (n_groups, GROUP))
    groups = grouped.amax(2).topk(n, 1, sorted=False).indices  # (R, n)
    rest = logits[:, n_groups * GROUP :]
    values, index = torch.cat((_rows(grouped, groups).flatten(1), rest), 1).topk(n, 1)
    group, place = (index // GROUP).clamp(max=n - 1), index - index // GROUP * GROUP
    pieces = groups.gather(1, group) * GROUP + place
    return values, torch.where(index < n * GROUP, pieces, index + (n_groups - n) * GROUP)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[s, index[s, i]]: (S, N, T), (S, M) -> (S, M, T)."""
    return tensor.gather(1, index.unsqueeze(2).expand(-1, -1, tensor.shape[2]))


# ---- sampling ----------------------------------------------------------------------------------------------------


def draw_lots(src: Packed, limits: Tensor, n: int, seed: int) -> Tensor:
    """What chance decides, (S, n, longest): numbers in [0, 1) that follow from the seed and the sentence alone."""
    sizes, tokens = (limits + 1).tolist(), src.tokens.cpu().numpy()
    lots = np.zeros((len(sizes), n, max(sizes)), np.float32)
    for i, (first, last) in enumerate(pairwise(src.offsets.tolist())):
        key = hashlib.blake2b(
            tokens[first:last].tobytes(), digest_size=16, salt=seed.to_bytes(16)
        ).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        lots[i, :, : sizes[i]] = stream.random((n, sizes[i]), np.float32)
    return torch.from_numpy(lots).to(limits.device)


def say(
    live: Beams,
    model: Speaker,
    hidden: Tensor,
    lots: Tensor,
    length: Length,
    config: DecodingConfig,
) -> None:
    """One piece more for each hypothesis, drawn; each is alone."""
    only, n = _musts(live, length), live.scores.shape[1]
    drawn = [
        _drawn(logits, only[here], lots[here].reshape(-1, 1), length <= config.min_length, config)
        for here, logits in _blocks(model, hidden, n)
    ]
    pieces, log_probs = (torch.cat(part).view(-1, n) for part in zip(*drawn, strict=True))
    scores = live.scores + log_probs
    ended = (pieces == EOS) & (scores > NEVER)
    live.tokens = pieces
    live.ids = _extended(live.ids, pieces, length)
    live.finished_scores = torch.where(
        ended, scores / penalty(length, config).to(scores.device), live.finished_scores
    )
    live.finished_ids = torch.where(
        ended[:, :, None], live.ids, _widened(live.finished_ids, live.ids)
    )
    live.scores = scores.masked_fill(ended, NEVER)


def _drawn(
    logits: Tensor, only: Tensor, lots: Tensor, must_go_on: bool | Tensor, config: DecodingConfig
) -> tuple[Tensor, Tensor]:
    """A piece for each row and its log-probability, each (R, 1)."""
    log_probs = logits.log_softmax(1)
    _forbid(logits, must_go_on)
    logits = logits / config.temperature
    if config.top_k is not None:
        least = logits.topk(min(config.top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, NEVER)
    shares, order = logits.softmax(1).sort(1, descending=True)
    below = shares.cumsum(1) - shares  # what the more probable pieces hold
    shares = shares.masked_fill((below >= config.top_p) & (below > 0), 0.0)
    sums = shares.cumsum(1)
    target = lots * sums[:, -1:] * (1 - 1e-6)  # below the last sum, whatever rounding does
    pieces = order.gather(1, (sums <= target).sum(1, keepdim=True))
    only = only[:, None].expand(-1, len(lots) // len(only)).reshape(-1, 1)  # (R, 1)
    pieces = torch.where(only < 0, pieces, only)
    return pieces, log_probs.gather(1, pieces)
