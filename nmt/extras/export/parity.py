"""Tests whether an exported model agrees with its checkpoint.

Both translate the same lines, and both score our translations. An `Engine` is a library with a
model in it. Greedy outputs are compared piece by piece. Then each engine computes the
log-probability of each piece of our outputs, eos included, and these are compared. In float32 the
engines may differ by rounding alone; with fewer bits the mean difference is bounded, and the text
may differ. All bounds are here.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from nmt.config import DecodingConfig
from nmt.data.batch import Sentences, pack
from nmt.data.vocab import EOS, EncodedLines
from nmt.extras.pair_scores.pair_scores import LogProbs, compute_log_probs
from nmt.model.transformer import Transformer
from nmt.translate.batching import DEFAULT_BATCH_TOKENS
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules

# In float32, the log-probability of a piece may differ by this much. Greedy outputs may differ in
# this share of the lines, because two pieces can be equally likely.
MAX_DIFFERENCE = 1e-4
MAX_DIFFERING_SHARE = 1e-3
# Log-probabilities may differ by this much on average with fewer bits. Marian's constants differ from ours,
# so there `model.positions` decides how much they may differ in float32.
MAX_MEAN = {"float16": 0.005, "bfloat16": 0.05, "int8": 0.1, "marian": 1e-4, "sinusoidal": 0.1}
BATCH_SENTENCES = 32


class Engine(Protocol):
    """Sees one batch at a time."""

    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        """Return the output of each sentence, of at most `limit` pieces."""

    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        """Return the log-probability of each piece of `tgt`, and of its eos."""


class OwnEngine:
    """Our own model and search."""

    def __init__(self, model: Transformer) -> None:
        self.model = model.eval()

    def translate_greedily(self, src: Sentences, limit: int) -> EncodedLines:
        config = DecodingConfig(
            beam=1,
            penalty="none",
            max_ratio=0.0,
            max_extra=limit,
            finishing="top",
            stopping="exact",
        )
        outputs = search(self.model, pack(add_eos(src)), make_rules(config))
        return [best.ids for (best,) in outputs]

    def score(self, src: Sentences, tgt: Sentences) -> LogProbs:
        device = torch.device("cpu")
        return compute_log_probs([self.model], src, tgt, device, DEFAULT_BATCH_TOKENS)


def add_eos(sentences: Sentences) -> EncodedLines:
    return [[*ids, EOS] for ids in sentences]


@dataclass(frozen=True)
class Agreement:
    """How far two engines agree."""

    lines: int
    differing: int  # the lines whose greedy outputs differ
    largest: float  # difference in the log-probability of a piece
    mean: float  # of the absolute differences
    in_use: str = ""  # the same where it will run, if that has another type or other constants

    def __str__(self) -> str:
        return (
            f"{self.lines - self.differing} of {self.lines} lines greedily the same; "
            "log-probability of a piece "
            f"differs by at most {self.largest:.2g}, on average {self.mean:.2g}{self.in_use}"
        )

    def is_within(self, quantization: str) -> bool:
        """Tell whether the bounds hold. They do not for NaN: no comparison with it is true."""
        if quantization == "float32":
            is_close = self.largest <= MAX_DIFFERENCE
            return is_close and self.differing <= MAX_DIFFERING_SHARE * self.lines
        return self.mean <= _mean_bound(quantization)


def describe_bound(quantization: str) -> str:
    if quantization == "float32":
        return f"{1 - MAX_DIFFERING_SHARE:.1%} of the lines and {MAX_DIFFERENCE:.0e}"
    return f"{_mean_bound(quantization)} on average"


def _mean_bound(quantization: str) -> float:
    return MAX_MEAN[quantization.partition("_")[0]]  # int8_float16 is judged as int8


def compare_engines(ours: Engine, theirs: Engine, src: Sentences, limit: int) -> Agreement:
    """Translate `src` greedily with both engines, and let both score what ours translated."""
    n_differing = 0
    our_scores: list[float] = []  # of pieces
    their_scores: list[float] = []
    for start in range(0, len(src), BATCH_SENTENCES):
        batch = src[start : start + BATCH_SENTENCES]
        outputs = ours.translate_greedily(batch, limit)
        others = theirs.translate_greedily(batch, limit)
        n_differing += sum(a != b for a, b in zip(outputs, others, strict=True))
        our_scores += chain.from_iterable(ours.score(batch, outputs))
        their_scores += chain.from_iterable(theirs.score(batch, outputs))

    differences = torch.tensor(our_scores, dtype=torch.float64)
    differences -= torch.tensor(their_scores, dtype=torch.float64)
    differences.abs_()  # its max is NaN if any of them is
    return Agreement(len(src), n_differing, float(differences.max()), float(differences.mean()))
