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

from nmt.batch import Packed
from nmt.config import DecodingConfig, ModelConfig
from nmt.errors import Failure, UserError

PAD, BOS, EOS = 0, 2, 3  # of every vocabulary here
NEVER = float("-inf")
GROUP = 64  # pieces whose best is looked at first
BLOCK = 1 << 22  # logits looked at together


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]  # without bos and eos
    score: float  # penalised log-probability


class Speaker(Protocol):
    """What can be searched: a Transformer, or what stands for one. It makes and takes its own kind of cache, which can
    `reorder` and `keep` as that of nmt/model/cache.py."""

    config: ModelConfig
    n_vocab: int

    def start(self, src: Packed, beam: int) -> Any: ...
    def step(self, tokens: Tensor, cache: Any) -> Tensor: ...
    def projection(self, hidden: Tensor) -> Tensor: ...


def penalty(length: Tensor | int, config: DecodingConfig) -> Tensor:
    """What the log-probability of a hypothesis of so many pieces, eos included, is divided by."""
    size = torch.as_tensor(length, dtype=torch.float32)
    if config.penalty == "gnmt":
        return ((5.0 + size) / 6.0) ** config.length_penalty
    return size ** config.length_penalty if config.penalty == "length" else torch.ones_like(size)


@dataclass
class Beams:
    """The sentences that are still searched, S of them, with B = beam living hypotheses and n best finished ones each.

    A row belongs to the sentence `sentences` names; rows change places when sentences leave.
    """

    sentences: Tensor  # (S,)
    limits: Tensor  # (S,)
    forced: Tensor  # (S, P) the first pieces of a translation; -1 where it is free
    ids: Tensor  # (S, B, t) beginning with bos
    scores: Tensor  # (S, B) log-probabilities, best first; NEVER where there is no hypothesis
    finished_ids: Tensor  # (S, n, t)
    finished_scores: Tensor  # (S, n) penalised
    n_finished: Tensor  # (S,)

    def keep(self, n: int, holes: Tensor, movers: Tensor) -> None:
        for name, rows in vars(self).items():
            rows[holes] = rows[movers]
            setattr(self, name, rows[:n])


@torch.inference_mode()
def search(model: Speaker, src: Packed, config: DecodingConfig, n_best: int = 1,
           prefixes: Sequence[Sequence[int]] | None = None) -> list[list[Hypothesis]]:
    """The `n_best` best translations of each sentence, best first. Source sentences end with eos; a translation begins
    with the pieces that `prefixes` gives for its sentence. With `config.sample`, so many draws in place of the best."""
    if n_best > config.beam and not config.sample:
        raise UserError(f"the {n_best} best of a beam of {config.beam} are asked for; raise decoding.beam")
    beam = n_best if config.sample else config.beam
    live = _begin(src, config, model.config, beam, n_best, prefixes)
    lots = draw_lots(src, live.limits, beam, config.seed) if config.sample else None
    cache = model.start(src, beam)
    results: list[list[Hypothesis]] = [[] for _ in range(src.n_sentences)]
    length = 0  # pieces said, eos included
    while True:
        length += 1
        hidden = model.step(live.ids[:, :, -1].flatten(), cache)
        if lots is None:
            cache.reorder(_advance(live, model, hidden, length, config))
        else:
            _say(live, model, hidden, lots[live.sentences, :, length - 1], length, config)
        done = _is_done(live, length, config, n_best)
        if done.any():
            _collect(live, done, n_best, results)
            n = int((~done).sum())
            if n == 0:
                break
            holes, movers = done[:n].nonzero().squeeze(1), n + (~done[n:]).nonzero().squeeze(1)
            live.keep(n, holes, movers)
            cache.keep(n, holes, movers)
    return results


def _begin(src: Packed, config: DecodingConfig, model: ModelConfig, beam: int, n_best: int,
           prefixes: Sequence[Sequence[int]] | None) -> Beams:
    n, device = src.n_sentences, src.tokens.device
    prefixes = prefixes or [[]] * n
    longest = max(map(len, prefixes))
    forced = torch.tensor([[*prefix, *[-1] * (longest - len(prefix))] for prefix in prefixes], device=device)
    limits = ((src.lengths - 1) * config.max_ratio).long() + config.max_extra
    limits = limits.maximum((forced >= 0).sum(1))
    if model.positions == "learned":
        if longest >= model.max_positions:
            raise UserError(f"a prefix of {longest} pieces is longer than model.max_positions {model.max_positions} "
                            "allows; shorten it")
        limits.clamp_(max=model.max_positions - 1)
    n_kept = beam if config.stopping == "likely" else n_best
    scores = torch.zeros(n, beam, device=device)
    if not config.sample:
        scores[:, 1:] = NEVER  # there is but one beginning
    return Beams(torch.arange(n, device=device), limits, forced, torch.full((n, beam, 1), BOS, device=device), scores,
                 torch.full((n, n_kept, 0), EOS, device=device), torch.full((n, n_kept), NEVER, device=device),
                 torch.zeros(n, dtype=torch.int64, device=device))


def _advance(live: Beams, model: Speaker, hidden: Tensor, length: int, config: DecodingConfig) -> Tensor:
    """One piece more for each hypothesis, by search; returns which one each of them continues, (S, B)."""
    beam = config.beam
    only = _musts(live, length)
    parts = [_continuations(logits, live.scores[here], only[here], length <= config.min_length,
                            2 * beam if beam > 1 else 1) for here, logits in _blocks(model, hidden, beam)]
    parents, pieces, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    rank = torch.arange(scores.shape[1], device=scores.device)
    if config.finishing == "shrink":
        scores = scores.masked_fill(rank >= beam - live.n_finished[:, None], NEVER)
    ended = (pieces == EOS) & (scores > NEVER)
    grown = torch.cat((_rows(live.ids, parents), pieces.unsqueeze(2)), 2)  # (S, 2B, t + 1)

    # The finished: the best of those known and those that end here.
    counted = ended if config.finishing == "any" else ended & (rank < beam)
    if config.stopping == "full":
        counted = counted & (live.n_finished[:, None] + counted.cumsum(1) <= beam)
    ending = scores.masked_fill(~counted, NEVER) / penalty(length, config).to(scores.device)
    live.n_finished = live.n_finished + counted.sum(1)
    live.finished_scores, order = torch.cat((live.finished_scores, ending), 1).topk(live.finished_scores.shape[1], 1)
    live.finished_ids = _rows(torch.cat((F.pad(live.finished_ids, (0, 1), value=EOS), grown[:, :, 1:]), 1), order)

    # The living: the best of the others.
    live.scores, order = scores.masked_fill(ended, NEVER).topk(beam, 1)
    live.ids = _rows(grown, order)
    return parents.gather(1, order)


def _is_done(live: Beams, length: int, config: DecodingConfig, n_best: int) -> Tensor:
    best = live.scores.amax(1)
    done = (best == NEVER) | (live.limits < length)
    if config.sample:
        return done
    if config.stopping == "exact":
        done |= best / penalty(live.limits + 1, config).to(best.device) <= live.finished_scores[:, n_best - 1]
    elif config.stopping == "full":
        done |= live.n_finished >= config.beam
    elif config.stopping == "likely":
        done |= best / penalty(length, config).to(best.device) <= live.finished_scores[:, config.beam - 1]
    return done


def _collect(live: Beams, done: Tensor, n_best: int, results: list[list[Hypothesis]]) -> None:
    """Take down what was finished of the sentences that are done."""
    for sentence, rows, scores in zip(*(x[done].tolist() for x in (
            live.sentences, live.finished_ids[:, :n_best], live.finished_scores[:, :n_best])), strict=True):
        found = [Hypothesis(row[:row.index(EOS)], score) for row, score in zip(rows, scores, strict=True)
                 if score > NEVER]
        if not found:
            raise Failure("the search found nothing, for the model's scores are no numbers; take another checkpoint")
        results[sentence] = sorted(found, key=lambda one: -one.score)


def _blocks(model: Speaker, hidden: Tensor, beam: int) -> Iterator[tuple[slice, Tensor]]:
    """The logits (s * B, V) of some sentences after others: so many that a cache of the processor holds them."""
    n_sentences = hidden.shape[0] // beam
    size = n_sentences if hidden.device.type != "cpu" else max(1, BLOCK // (beam * model.n_vocab))
    for first in range(0, n_sentences, size):
        here = slice(first, min(first + size, n_sentences))
        yield here, model.projection(hidden[here.start * beam:here.stop * beam]).float()


def _musts(live: Beams, length: int) -> Tensor:
    """What each sentence must say as its piece of that number, (S,); -1 where it is free."""
    only = torch.where(live.limits < length, EOS, -1)
    if length <= live.forced.shape[1]:
        only = torch.where(live.forced[:, length - 1] >= 0, live.forced[:, length - 1], only)
    return only


def _constrain(logits: Tensor, only: Tensor, must_go_on: bool) -> None:
    """Leave of the logits (S * B, V) what may be said next."""
    free = logits.view(len(only), -1, logits.shape[1])
    free[:, :, (PAD, BOS)] = NEVER
    if must_go_on:
        free[only < 0, :, EOS] = NEVER
    bound = (only >= 0).nonzero().squeeze(1)
    if bound.numel():
        index = only[bound, None, None].expand(-1, free.shape[1], 1)
        kept = free[bound].gather(2, index)
        free[bound] = NEVER
        free[bound] = free[bound].scatter(2, index, kept)


def _continuations(logits: Tensor, scores: Tensor, only: Tensor, must_go_on: bool,
                   n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n best (parent, piece, log-probability) of each sentence, each (S, n), of logits (S * B, V) and what their
    hypotheses weigh, (S, B)."""
    # torch's log_softmax takes half the time of its logsumexp
    base = scores.flatten() - (logits[:, EOS] - logits.log_softmax(1)[:, EOS])
    _constrain(logits, only, must_go_on)
    values, pieces = _best(logits, n)  # the sentence's n best are among each parent's n best
    width = values.shape[1]
    totals = (values + base[:, None]).view(len(scores), -1)
    if totals.shape[1] < n:  # a toy vocabulary
        totals = F.pad(totals, (0, n - totals.shape[1]), value=NEVER)
    best, index = totals.topk(n, 1)
    index = index.clamp(max=scores.shape[1] * width - 1)
    return index // width, pieces.view(len(scores), -1).gather(1, index), best


def _best(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """logits.topk(n, 1): the best of each group of pieces are found first, and then the best of the best groups."""
    n_groups = logits.shape[1] // GROUP
    if n_groups < 4 * n:
        return logits.topk(min(n, logits.shape[1]), 1)
    grouped = logits[:, :n_groups * GROUP].unflatten(1, (n_groups, GROUP))
    groups = grouped.amax(2).topk(n, 1, sorted=False).indices  # (R, n)
    rest = logits[:, n_groups * GROUP:]
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
        key = hashlib.blake2b(tokens[first:last].tobytes(), digest_size=16, salt=seed.to_bytes(16)).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        lots[i, :, :sizes[i]] = stream.random((n, sizes[i]), np.float32)
    return torch.from_numpy(lots).to(limits.device)


def _say(live: Beams, model: Speaker, hidden: Tensor, lots: Tensor, length: int, config: DecodingConfig) -> None:
    """One piece more for each hypothesis, drawn; each is alone."""
    only, n = _musts(live, length), live.scores.shape[1]
    drawn = [_drawn(logits, only[here], lots[here].reshape(-1, 1), length, config)
             for here, logits in _blocks(model, hidden, n)]
    pieces, log_probs = (torch.cat(part).view(-1, n) for part in zip(*drawn, strict=True))
    scores = live.scores + log_probs
    ended = (pieces == EOS) & (scores > NEVER)
    live.ids = torch.cat((live.ids, pieces.unsqueeze(2)), 2)
    live.finished_scores = torch.where(ended, scores / penalty(length, config).to(scores.device), live.finished_scores)
    live.finished_ids = torch.where(ended[:, :, None], live.ids[:, :, 1:], F.pad(live.finished_ids, (0, 1), value=EOS))
    live.scores = scores.masked_fill(ended, NEVER)


def _drawn(logits: Tensor, only: Tensor, lots: Tensor, length: int, config: DecodingConfig) -> tuple[Tensor, Tensor]:
    """A piece for each row and its log-probability, each (R, 1)."""
    log_probs = logits.log_softmax(1)
    _constrain(logits, only, length <= config.min_length)
    logits = logits / config.temperature
    if config.top_k is not None:
        logits[logits < logits.topk(min(config.top_k, logits.shape[1]), 1).values[:, -1:]] = NEVER
    shares, order = logits.softmax(1).sort(1, descending=True)
    below = shares.cumsum(1) - shares  # what the more probable pieces hold
    shares = shares.masked_fill((below >= config.top_p) & (below > 0), 0.0)
    sums = shares.cumsum(1)
    target = lots * sums[:, -1:] * (1 - 1e-6)  # below the last sum, whatever rounding does
    pieces = order.gather(1, (sums <= target).sum(1, keepdim=True))
    return pieces, log_probs.gather(1, pieces)
