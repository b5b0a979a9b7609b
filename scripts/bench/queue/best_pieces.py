"""A kernel with which a step of the search on a GPU reads its bf16 logits once: the logarithm of their sum of exponentials
and the highest of each group of 64, from which the best continuations follow.

Today a step writes the logits anew in fp32 and passes over them for the softmax, for its result, and for the groups: 3.0 MB
a sentence at beam 4 and 37,000 pieces, here 0.6 MB. nmt/translate/search.py has the plain code, which a CPU needs, so this
would stand beside it in nmt/engines/cuda. It goes there if it makes 3,003 sentences 1.15 times faster (q4_decode.py); until
then nothing in nmt/ uses it. tests/kernels/test_best_pieces.py holds it to the plain code, interpreted.

Equal logits, which bf16 has many of: torch.topk takes any of them, here and in the plain code alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nmt.data.vocab import EOS
from nmt.translate import search
from nmt.translate.allowed_pieces import (
    LogitBlock,
    find_repeats,
    find_required_pieces,
    forbid_pieces,
)
from nmt.translate.search_rules import Length, SearchRules
from nmt.translate.search_state import NEG_INF, Beams, Decodable

GROUP, GROUPS = 64, 64  # columns of a group, and groups that a program holds at a time
plain_continuations = search._best_continuations
plain_blocks = search.compute_logit_blocks


@triton.jit
def scan_rows(
    logits, log_totals, highest, row, n_columns, n_pieces, n_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Of a row: log(sum(exp(logits))), and the highest logit of each group among the first `n_pieces`."""
    number = tl.program_id(0)
    logits += number.to(tl.int64) * row
    group = tl.arange(0, GROUPS)
    cells = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tops = tl.full((GROUPS,), -1e30, tl.float32)  # one for each of the groups held together
    totals = tl.zeros((GROUPS,), tl.float32)  # of exp(logit - top)
    for first in range(0, n_groups, GROUPS):
        columns = first * GROUP + cells
        part = tl.load(logits + columns, columns < n_columns, -float("inf")).to(tl.float32)
        best = tl.max(tl.where(columns < n_pieces, part, -float("inf")), 1)
        tl.store(highest + number * n_groups + first + group, best, first + group < n_groups)
        new_tops = tl.maximum(tops, tl.max(part, 1))
        totals = totals * tl.exp(tops - new_tops) + tl.sum(tl.exp(part - new_tops[:, None]), 1)
        tops = new_tops
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - top), 0)
    tl.store(log_totals + number, top + tl.log(total))


def scan(logits: Tensor, n_pieces: int) -> tuple[Tensor, Tensor]:
    """(R, V) -> log(sum(exp(logits))) (R,) in fp32, and the highest logit of each group (R, groups)."""
    n_rows, n_columns = logits.shape
    n_groups = triton.cdiv(n_columns, GROUP)
    log_totals = logits.new_empty(n_rows, dtype=torch.float32)
    highest = logits.new_empty(n_rows, n_groups)
    scan_rows[n_rows,](
        logits, log_totals, highest, logits.stride(0), n_columns, n_pieces, n_groups,
        GROUP, GROUPS, num_warps=8,
    )  # fmt: skip
    return log_totals, highest


def find_best(logits: Tensor, highest: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest logits of each row in fp32, and their columns: they lie in the n highest groups."""
    groups = highest.topk(n, 1, sorted=False).indices  # (R, n)
    columns = groups[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)
    columns = columns.flatten(1)  # (R, n * GROUP)
    last = logits.shape[1] - 1  # the last group may end beyond it
    values = logits.gather(1, columns.clamp(max=last)).float()
    values, index = values.masked_fill(columns > last, NEG_INF).topk(n, 1)
    return values, columns.gather(1, index)


def best_continuations(
    block: LogitBlock, scores: Tensor, model: Decodable, length: Length, rules: SearchRules
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_best_continuations` of nmt/translate/search.py."""
    here, logits, required, repeats = block
    n = rules.n_considered
    if repeats is not None or triton.cdiv(model.n_pieces, GROUP) < n:
        exact = block._replace(logits=logits.float())
        return plain_continuations(exact, scores, model, length, rules)
    scores = scores[here]
    log_totals, highest = scan(logits, model.n_pieces)
    base = scores.flatten() - log_totals
    required_logits = logits.gather(1, required.clamp(min=0)).float()
    forbid_pieces(logits, model, length <= rules.min_length, None)
    highest[:, 0] = logits[:, :GROUP].amax(1)  # the group of what is forbidden
    values, pieces = find_best(logits, highest, n)

    only_required = F.pad(required_logits, (0, n - 1), value=NEG_INF)
    values = torch.where(required < 0, values, only_required)
    pieces = torch.where(required < 0, pieces, required)
    totals = (values + base[:, None]).view(len(scores), -1)
    best, index = totals.topk(n, 1)
    return index // n, pieces.view(len(scores), -1).gather(1, index), best


def logit_blocks(
    beams: Beams, model: Decodable, hidden: Tensor, length: Length, rules: SearchRules
) -> Iterator[LogitBlock]:
    """As `compute_logit_blocks` on a GPU, but in the precision of the products."""
    n, beam = beams.scores.shape
    logits = model.projection(hidden)
    required = find_required_pieces(beams, length)[:, None].expand(-1, beam).reshape(-1, 1)
    yield LogitBlock(
        slice(0, n), logits, required, find_repeats(beams.ids.flatten(0, 1), length, rules)
    )


assert EOS < GROUP


@contextmanager
def in_place() -> Iterator[None]:
    """Search with the kernel meanwhile, wherever `beam_step` is called."""
    with mock.patch.multiple(
        search, _best_continuations=best_continuations, compute_logit_blocks=logit_blocks
    ):
        yield
