"""Beam search with a cache, for many sentences at once: section 6.1 of the paper.

A hypothesis' score is its log-probability over a penalty of its length |Y|, closing eos included: ((5+|Y|)/6)^alpha in
the paper (Wu et al. 2016). Of each sentence's 2 * beam best continuations those that end are finished and the best
`beam` others live on; a beam of 1 looks at the very best alone, which is greedy search. A sentence leaves the batch
when no living hypothesis can still beat its finished ones, which cannot change the result: log-probabilities only fall
and penalties only grow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.batch import Packed
from nmt.config import DecodingConfig
from nmt.model.transformer import Transformer

PAD, BOS, EOS = 0, 2, 3  # of every vocabulary here
NEVER = float("-inf")


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]  # without bos and eos
    score: float  # penalised log-probability


def penalty(length: Tensor | int, config: DecodingConfig) -> Tensor:
    """What the log-probability of a hypothesis of so many pieces, eos included, is divided by."""
    size = torch.as_tensor(length, dtype=torch.float32)
    if config.penalty == "gnmt":
        return ((5.0 + size) / 6.0) ** config.length_penalty
    return size ** config.length_penalty if config.penalty == "length" else torch.ones_like(size)


@torch.inference_mode()
def search(model: Transformer, src: Packed, config: DecodingConfig, n_best: int = 1) -> list[list[Hypothesis]]:
    """The `n_best` best translations of each sentence, best first. Source sentences end with eos."""
    beam, device = config.beam, src.tokens.device
    n_continuations = 2 * beam if beam > 1 else 1
    n_all = src.n_sentences
    limits = src.lengths - 1 + config.max_extra  # pieces before eos
    if model.config.positions == "learned":
        limits.clamp_(max=model.config.max_positions - 1)
    cache = model.start(src, beam)
    best_scores = torch.full((n_all, n_best), NEVER, device=device)
    best_ids = torch.full((n_all, n_best, 0), PAD, device=device)
    sentences = torch.arange(n_all, device=device)  # those still searched; S of them
    scores = torch.full((n_all, beam), NEVER, device=device)  # (S, B) log-probabilities of living hypotheses
    scores[:, 0] = 0.0
    ids = torch.full((n_all, beam, 1), BOS, device=device)  # (S, B, t)
    for length in range(1, int(limits.max()) + 2):
        logits = model.step(ids[:, :, -1].flatten(), cache).float()
        parents, pieces, candidates = _continuations(logits, scores, length > limits[sentences], n_continuations)
        ended = pieces == EOS
        grown = torch.cat((_rows(ids, parents), pieces.unsqueeze(2)), 2)  # (S, 2B, t + 1)

        # The finished: the best n of those known and those that end here.
        ending = candidates.masked_fill(~ended, NEVER) / penalty(length, config).to(device)
        pool = torch.cat((best_scores[sentences], ending), 1)
        best_ids = torch.nn.functional.pad(best_ids, (0, 1), value=PAD)
        known, order = pool.topk(n_best, 1)
        best_scores[sentences] = known
        best_ids[sentences] = _rows(torch.cat((best_ids[sentences], grown[:, :, 1:]), 1), order)

        # The living: the best of the others, where they can still matter.
        scores, order = candidates.masked_fill(ended, NEVER).topk(beam, 1)
        parents, ids = parents.gather(1, order), _rows(grown, order)
        bound = scores[:, 0] / penalty(limits[sentences] + 1, config).to(device)
        alive = (bound > known[:, -1]).nonzero().squeeze(1)
        if alive.numel() == 0:
            break
        rows = (alive[:, None] * beam + parents[alive]).flatten()
        if alive.numel() < sentences.numel():
            cache.keep(alive)
            sentences, scores, ids = sentences[alive], scores[alive], ids[alive]
        cache.reorder(rows)
    return [[Hypothesis(_plain(row), score) for row, score in zip(rows_of, scores_of, strict=True) if score > NEVER]
            for rows_of, scores_of in zip(best_ids.tolist(), best_scores.tolist(), strict=True)]


def _continuations(logits: Tensor, scores: Tensor, must_end: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n best (parent, piece, log-probability) of each sentence, each (S, n); logits are (S * B, V)."""
    n_sentences, beam = scores.shape
    base = scores.flatten() - logits.logsumexp(1)  # (S * B,)
    eos = logits[:, EOS].clone()
    logits[must_end.repeat_interleave(beam)] = NEVER
    logits[:, (PAD, BOS)] = NEVER
    logits[:, EOS] = eos
    values, pieces = logits.topk(min(n, logits.shape[1]), 1)  # the sentence's n best are among each parent's n best
    width = values.shape[1]
    totals = (values + base[:, None]).view(n_sentences, beam * width)
    if totals.shape[1] < n:  # a toy vocabulary
        totals = torch.nn.functional.pad(totals, (0, n - totals.shape[1]), value=NEVER)
    best, index = totals.topk(n, 1)
    index = index.clamp(max=beam * width - 1)
    return index // width, pieces.view(n_sentences, -1).gather(1, index), best


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[s, index[s, i]]: (S, N, T), (S, M) -> (S, M, T)."""
    return tensor.gather(1, index.unsqueeze(2).expand(-1, -1, tensor.shape[2]))


def _plain(row: list[int]) -> list[int]:
    return row[:row.index(EOS)]
