"""Sampling in place of beam search: each hypothesis is drawn independently, piece by piece.

The random numbers are drawn before the search, from the seed and the sentence alone. So a
sentence's samples do not depend on its batch or its device. A score is the model's own
log-probability, whatever temperature, top-k and top-p do to the draw.
"""

import hashlib
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nmt.data.batch import Packed
from nmt.translate.allowed_pieces import LogitBlock, compute_logit_blocks, forbid_pieces
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.search_rules import SearchRules
from nmt.translate.search_state import (
    NEG_INF,
    Beams,
    Decodable,
    append_eos,
    append_pieces,
    find_ended,
    mark_overflow,
)


def draw_uniforms(src: Packed, limits: Tensor, n: int, seed: int) -> Tensor:
    """Numbers in [0, 1) for n samples of each sentence and each of their steps, (S, n, longest)."""
    sizes = (limits + 1).tolist()
    tokens = src.tokens.cpu().numpy()
    salt = seed.to_bytes(16)
    uniforms = np.zeros((len(sizes), n, max(sizes)), np.float32)
    for i, (first, last) in enumerate(pairwise(src.offsets.tolist())):
        sentence = tokens[first:last].tobytes()
        key = hashlib.blake2b(sentence, digest_size=16, salt=salt).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        uniforms[i, :, : sizes[i]] = generator.random((n, sizes[i]), np.float32)
    return torch.from_numpy(uniforms).to(limits.device)


def sample_step(
    beams: Beams,
    model: Decodable,
    hidden: Tensor,
    uniforms: Tensor,
    length: int,
    rules: SearchRules,
) -> None:
    """Give each hypothesis one piece more, drawn with its number of `uniforms` (S, n)."""
    n = beams.scores.shape[1]
    blocks = []
    for block in compute_logit_blocks(beams, model, hidden, length, rules):
        own_uniforms = uniforms[block.here].reshape(-1, 1)
        blocks.append(_draw_pieces(block, own_uniforms, model, length, rules))
    pieces, log_probs = (torch.cat(block).view(-1, n) for block in zip(*blocks, strict=True))
    scores = beams.scores + log_probs
    scores = mark_overflow(scores, scores, beams.scores)
    ended = find_ended(pieces, scores)
    ending = scores / compute_penalty(length, rules)

    beams.tokens = pieces
    beams.ids = append_pieces(beams.ids, pieces)
    beams.finished_scores = torch.where(ended, ending, beams.finished_scores)
    finished_ids = append_eos(beams.finished_ids)
    beams.finished_ids = torch.where(ended[:, :, None], beams.ids, finished_ids)
    beams.scores = scores.masked_fill(ended, NEG_INF)


def _draw_pieces(
    block: LogitBlock, uniforms: Tensor, model: Decodable, length: int, rules: SearchRules
) -> tuple[Tensor, Tensor]:
    """A piece for each row and its log-probability, each (R, 1)."""
    _, logits, required, repeats = block
    log_probs = logits.log_softmax(1)

    # The distribution to draw from: temperature, then top-k, then top-p.
    forbid_pieces(logits, model, length <= rules.min_length, repeats)
    logits = logits / rules.temperature
    if rules.top_k is not None:
        least = logits.topk(min(rules.top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, NEG_INF)
    probs, order = logits.softmax(1).sort(1, descending=True)
    probs_before = probs.cumsum(1) - probs  # of the more probable pieces
    probs = probs.masked_fill((probs_before >= rules.top_p) & (probs_before > 0), 0.0)

    # The first piece whose cumulated probability exceeds the target.
    sums = probs.cumsum(1)
    target = uniforms * sums[:, -1:] * (1 - 1e-6)  # below the last sum, however it is rounded
    pieces = order.gather(1, (sums <= target).sum(1, keepdim=True))

    pieces = torch.where(required < 0, pieces, required)
    return pieces, log_probs.gather(1, pieces)
