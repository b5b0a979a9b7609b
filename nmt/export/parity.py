"""Tests whether an exported model agrees with its checkpoint: both translate, and both score our
translations.

An `Engine` is a library with a model in it. Greedy outputs are compared piece by piece. Then each
engine computes the log-probability of each piece of our outputs, eos included, and these are
compared. In float32 the engines may differ by rounding alone; with fewer bits the mean difference
is bounded, and the text may differ. All bounds are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS
from nmt.model.transformer import Transformer
from nmt.translate.beams import Hypothesis
from nmt.translate.search import search

Ids = Sequence[Sequence[int]]  # sentences without bos and eos

MAX_DIFFERENCE = 1e-4  # float32: in the log-probability of a piece
# float32: the share of lines whose greedy output may differ, because two pieces can be equally
# likely.
MAX_DIFFERING_SHARE = 1e-3
MAX_MEAN = {"float16": 0.005, "bfloat16": 0.05, "int8": 0.1}  # fewer bits: the mean difference
BATCH_SENTENCES = 32


class Engine(Protocol):
    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        """Return the best output of each sentence, by log-probability / |Y|^alpha, of at most
        `limit` pieces.
        """

    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        """Return the log-probability of each piece of `tgt`, and of its eos."""


class OwnEngine:
    """Our own model and search."""

    def __init__(self, model: Transformer, stopping: Literal["exact", "full"] = "exact") -> None:
        self.model, self.stopping = model.eval(), stopping

    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        config = DecodingConfig(
            beam=beam,
            penalty="length",
            length_penalty=alpha,
            max_ratio=0.0,
            max_extra=limit,
            finishing="top",
            stopping=self.stopping,
        )
        found = []
        for batch in split_batches(src):
            hypotheses = search(self.model, pack([[*ids, EOS] for ids in batch]), config)
            found += [best for best, *_ in hypotheses]
        return found

    @torch.inference_mode()
    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        scores = []
        for sources, targets in zip(split_batches(src), split_batches(tgt), strict=True):
            inputs = pack([[BOS, *ids] for ids in targets])
            states = self.model(pack([[*ids, EOS] for ids in sources]), inputs)
            log_probs = self.model.projection(states).log_softmax(1)  # (T, V)
            expected = torch.tensor([piece for ids in targets for piece in (*ids, EOS)])
            chosen = log_probs.gather(1, expected[:, None]).squeeze(1)  # (T,)
            lengths = [len(ids) + 1 for ids in targets]
            scores += [part.tolist() for part in chosen.split(lengths)]
        return scores


def split_batches(sentences: Ids) -> list[Ids]:
    starts = range(0, len(sentences), BATCH_SENTENCES)
    return [sentences[i : i + BATCH_SENTENCES] for i in starts]


@dataclass(frozen=True)
class Agreement:
    """What a comparison found."""

    lines: int
    differing: int  # the lines whose greedy outputs differ
    largest: float  # difference in the log-probability of a piece
    mean: float  # of the absolute differences

    def __str__(self) -> str:
        return (
            f"{self.lines - self.differing} of {self.lines} lines greedily the same; log-probability of a piece "
            f"differs by at most {self.largest:.2g}, on average {self.mean:.2g}"
        )

    def is_within(self, quantization: str) -> bool:
        """Tell whether the bounds hold. They do not for NaN, because no comparison with it is true."""
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


def compare_engines(ours: Engine, theirs: Engine, src: Ids, limit: int) -> Agreement:
    """Translate `src` with both, greedily, and let both score what ours translated."""
    # translate
    our_outputs = [found.ids for found in ours.search(src, 1, 0.0, limit)]
    their_outputs = [found.ids for found in theirs.search(src, 1, 0.0, limit)]
    differing = sum(a != b for a, b in zip(our_outputs, their_outputs, strict=True))

    # score
    our_scores = ours.score(src, our_outputs)
    their_scores = theirs.score(src, our_outputs)
    differences = []
    for our_line, their_line in zip(our_scores, their_scores, strict=True):
        differences += [abs(a - b) for a, b in zip(our_line, their_line, strict=True)]
    values = torch.tensor(differences, dtype=torch.float64)  # max is NaN if any of them is
    return Agreement(len(src), differing, float(values.max()), float(values.mean()))
