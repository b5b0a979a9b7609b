"""Beam search against brute force over all sequences of a toy vocabulary, and greedy against a plain loop."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch

from nmt.batch import pack
from nmt.config import DecodingConfig, ModelConfig
from nmt.decode.beam import BOS, EOS, PAD, search
from nmt.model.transformer import Transformer

V = 6  # pad, unk, bos, eos and two words: unk and the words can be written
WORDS = (1, 4, 5)
CONFIG = ModelConfig(d_model=8, d_ff=16, n_heads=2, n_layers=1, dropout=0.0)
SRC = [[4, 5, EOS], [5, EOS], [4, 4, 5, 1, EOS]]


def toy(seed: int, sharpness: float = 2.0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(CONFIG, V).eval()
    model.projection.weight.data *= sharpness
    return model


def log_prob(model: Transformer, src: list[int], tgt: list[int]) -> float:
    """Of tgt + eos, by the plain forward pass."""
    logits = model.projection(model(pack([src]), pack([[BOS, *tgt]])))
    return float(logits.log_softmax(-1)[range(len(tgt) + 1), [*tgt, EOS]].sum())


def divisor(n: int, config: DecodingConfig) -> float:
    alpha = config.length_penalty
    return {"gnmt": ((5 + n) / 6) ** alpha, "length": n ** alpha, "none": 1.0}[config.penalty]


def everything(model: Transformer, src: list[int], config: DecodingConfig) -> Iterator[tuple[float, list[int]]]:
    for n in range(len(src) - 1 + config.max_extra + 1):
        for tgt in itertools.product(WORDS, repeat=n):
            yield log_prob(model, src, list(tgt)) / divisor(n + 1, config), list(tgt)


@pytest.mark.parametrize("penalty", ["gnmt", "length", "none"])
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_a_wide_beam_finds_what_brute_force_finds(seed: int, penalty: Literal["gnmt", "length", "none"]) -> None:
    model, config = toy(seed), DecodingConfig(beam=81, penalty=penalty, length_penalty=0.6, max_extra=2)
    sources = SRC[:2]
    for src, found in zip(sources, search(model, pack(sources), config, n_best=3), strict=True):
        ranked = sorted(everything(model, src, config), reverse=True)[:3]
        assert [h.ids for h in found] == [ids for _, ids in ranked]
        assert [h.score for h in found] == pytest.approx([score for score, _ in ranked], abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_beam_one_is_greedy(seed: int) -> None:
    model, config = toy(seed), DecodingConfig(beam=1, max_extra=6)
    for src, found in zip(SRC, search(model, pack(SRC), config), strict=True):
        ids: list[int] = []
        while len(ids) < len(src) - 1 + config.max_extra:
            logits = model.projection(model(pack([src]), pack([[BOS, *ids]])))[-1]
            logits[[PAD, BOS]] = float("-inf")
            best = int(logits.argmax())
            if best == EOS:
                break
            ids.append(best)
        assert found[0].ids == ids
        score = log_prob(model, src, ids) / divisor(len(ids) + 1, config)
        assert found[0].score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("beam", [1, 2, 4])
@torch.no_grad()
def test_a_sentence_does_not_depend_on_its_batch(beam: int) -> None:
    model, config = toy(11, sharpness=1.0), DecodingConfig(beam=beam, max_extra=7)
    together = search(model, pack(SRC), config)
    for src, expected in zip(SRC, together, strict=True):
        (alone,) = search(model, pack([src]), config)
        assert alone[0].ids == expected[0].ids and alone[0].score == pytest.approx(expected[0].score, abs=1e-5)


@torch.no_grad()
def test_never_longer_than_source_plus_extra_and_always_ended() -> None:
    model = toy(3)
    model.projection.weight.data[EOS] = -10 * model.projection.weight.data[4].sign()  # it would rather not end
    for extra in (1, 3):
        for src, found in zip(SRC, search(model, pack(SRC), replace(DecodingConfig(), max_extra=extra)), strict=True):
            assert len(found) == 1 and len(found[0].ids) <= len(src) - 1 + extra
            assert not {PAD, BOS, EOS} & set(found[0].ids)
