"""The kernel of scripts/bench/queue/best_pieces.py against the search's own code: on a GPU, else
interpreted.

Nothing uses it yet, so `make gpu-dry` runs this and `make test` does not.
"""

import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreted import kernel_device  # noqa: F401 (the fixture `device`)
from support.searches import PLAIN, assert_alike, make_prefixes, make_sources, make_speaker
from support.untrained import TINY
from torch import Tensor

from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, PAD, UNK
from nmt.translate.allowed_pieces import LogitBlock
from nmt.translate.search import _best_continuations, search
from nmt.translate.search_rules import make_rules

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench" / "queue"))
pytest.importorskip("triton", reason="triton is not installed")
best_pieces: Any = importlib.import_module("best_pieces")

pytestmark = pytest.mark.gpu_dry
BEAM, SENTENCES = 4, 3
RULES = make_rules(replace(PLAIN, beam=BEAM, min_length=2))


class Pieces:
    """What the rules read of a model."""

    writes_unknown = False

    def __init__(self, n_pieces: int) -> None:
        self.n_pieces = n_pieces


def draw_logits(n_columns: int, has_ties: bool, device: torch.device) -> Tensor:
    """Rows of bf16: each number once, or few numbers many times."""
    torch.manual_seed(n_columns)
    if has_ties:
        numbers = torch.randint(-6, 6, (SENTENCES * BEAM, n_columns), device=device)
        return numbers.bfloat16()
    # the numbers of bf16 between 2^-32 and 2^4 in order, of either sign
    positive = torch.arange(0x2F80, 0x4180, dtype=torch.int16).view(torch.bfloat16)
    numbers = torch.cat((positive, -positive)).to(device)
    rows = [numbers[torch.randperm(len(numbers), device=device)] for _ in range(SENTENCES * BEAM)]
    return torch.stack(rows)[:, :n_columns].contiguous()


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(
    ("n_pieces", "n_columns"), [(512, 512), (600, 640), (1_000, 1_000), (9_000, 9_024)]
)
def test_the_best_continuations_are_those_of_the_search(
    n_pieces: int, n_columns: int, has_ties: bool, length: int, device: torch.device
) -> None:
    logits = draw_logits(n_columns, has_ties, device)
    # what is forbidden would be best, and must not take the place of a group
    logits[:, [PAD, BOS, UNK, EOS]] = 20
    logits[:, n_pieces:] = 20
    scores = -torch.rand(SENTENCES, BEAM, device=device)
    scores[:2, 1:] = -torch.inf  # so that all continuations are those of one row
    required = torch.full((SENTENCES * BEAM, 1), -1, device=device)
    required[BEAM : 2 * BEAM] = n_pieces - 1
    block = LogitBlock(slice(0, SENTENCES), logits.clone(), required, None)
    exact = block._replace(logits=logits.float())
    model: Any = Pieces(n_pieces)
    parents, pieces, best = best_pieces.best_continuations(block, scores, model, length, RULES)
    found = _best_continuations(exact, scores, model, length, RULES)
    their_parents, their_pieces, theirs = found
    torch.testing.assert_close(best, theirs, rtol=1e-6, atol=5e-6)
    if not has_ties:
        assert torch.equal(parents, their_parents) and torch.equal(pieces, their_pieces)

    # any of equal ones: each is allowed, chosen once, and has the score that is said of it
    free = torch.tensor([0, 2], device=device)
    rows = parents[free] + BEAM * free[:, None]
    assert pieces[free].max() < n_pieces
    for forbidden in (PAD, BOS, UNK, *([EOS] if length <= 2 else [])):
        assert not (pieces[free] == forbidden).any()
    chosen = (rows * n_columns + pieces[free]).flatten()
    assert len(chosen.unique()) == len(chosen)
    log_probs = logits.float().log_softmax(1).flatten()[chosen].view_as(rows)
    expected = log_probs + scores.flatten()[rows]
    torch.testing.assert_close(best[free], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_whole_search_finds_the_same(beam: int, device: torch.device) -> None:
    """In fp32, where hardly two logits are equal; with prefixes, by two finishing rules."""
    n_vocab = 700
    model = make_speaker(replace(TINY, n_layers=1), n_vocab, 3).to(device)
    given = make_sources(random.Random(4), 6, 9, n_vocab)
    prefixes = make_prefixes(random.Random(5), 6, n_vocab)
    for finishing in ("any", "top"):
        rules = make_rules(replace(PLAIN, beam=beam, finishing=finishing), 1)
        src = pack(given).to(device)
        expected = search(model, src, rules, prefixes)
        with best_pieces.in_place():
            assert_alike(search(model, src, rules, prefixes), expected)
