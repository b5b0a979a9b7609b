"""Which pieces may follow a hypothesis: the prefix's, eos at the length limit, and no n-gram a second time.

Beam search and sampling get their logits here, block by block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.data.vocab import BOS, EOS, PAD, UNK
from nmt.translate.search_rules import SearchRules
from nmt.translate.search_state import NEG_INF, Beams, Decodable

MAX_BLOCK_LOGITS = 1 << 22  # on a CPU: as many as its cache holds


class LogitBlock(NamedTuple):
    """The logits of some sentences in a step, and what the rules say of their next pieces."""

    here: slice  # the sentences
    logits: Tensor  # (s * B, V)
    required: Tensor  # (s * B, 1): the only piece that may follow, or -1
    repeats: Tensor | None  # as of `find_repeats`


def compute_logit_blocks(
    beams: Beams, model: Decodable, hidden: Tensor, length: int, rules: SearchRules
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
        repeats = find_repeats(beams.ids[here].flatten(0, 1), rules)
        yield LogitBlock(here, logits, required[here].reshape(-1, 1), repeats)


def find_required_pieces(beams: Beams, length: int) -> Tensor:
    """Return the piece each sentence must take in this step, (S,): its prefix's, eos at the limit,
    or -1 for any piece.
    """
    required = torch.where(beams.limits < length, EOS, -1)
    if length > beams.forced.shape[1]:
        return required
    forced = beams.forced[:, length - 1]
    return torch.where(forced >= 0, forced, required)


def find_repeats(ids: Tensor, rules: SearchRules) -> Tensor | None:
    """Return the pieces that would complete an n-gram a second time, (R, k), given the pieces (R, t) said before.

    Where there are fewer, pad fills the rest. None if `decoding.no_repeat_ngram` is not set or nothing can repeat yet.
    """
    if rules.no_repeat_ngram is None or ids.shape[1] < rules.no_repeat_ngram:
        return None
    n_before = rules.no_repeat_ngram - 1  # pieces of an n-gram before its last
    followers = ids[:, n_before:]  # the last piece of each n-gram, (R, k)
    # its others, and at the end the pieces just said, (R, k + 1, n - 1)
    starts = ids.unfold(1, n_before, 1)
    is_repeat = (starts[:, :-1] == starts[:, -1:]).all(2)
    return torch.where(is_repeat, followers, PAD)


def forbid_pieces(
    logits: Tensor, model: Decodable, is_eos_forbidden: bool, repeats: Tensor | None
) -> None:
    """Set the logits (R, V) of what may not be chosen freely to -inf: pad, bos, unused rows, the unknown piece if the
    vocabulary can spell everything, repeats and, if forbidden, eos. A hypothesis that every other piece would repeat
    may end.
    """
    if repeats is not None:
        eos_logits = logits[:, EOS].clone()
    if model.n_pieces < logits.shape[1]:
        logits[:, model.n_pieces :] = NEG_INF
    if not model.writes_unknown:
        logits[:, UNK] = NEG_INF
    logits[:, PAD] = NEG_INF
    logits[:, BOS] = NEG_INF
    if is_eos_forbidden:
        logits[:, EOS] = NEG_INF
    if repeats is not None:
        logits.scatter_(1, repeats, NEG_INF)
        is_stuck = logits.amax(1) == NEG_INF
        logits[:, EOS] = torch.where(is_stuck, eos_logits, logits[:, EOS])
