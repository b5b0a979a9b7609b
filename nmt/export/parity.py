"""Whether an exported model still says the same: both sides translate, and both judge what ours said.

A `Side` is an engine with a model in it. Greedy outputs are compared piece by piece; then each side gives the
log-probability of each piece of our outputs, eos included, and the differences count. In fp32 the sides differ by
rounding alone; of fewer bits the average difference is bounded, and text may differ. Every bound stands here.
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

LARGEST = 1e-4  # float32: of one piece's log-probability
DIFFERING = (
    1e-3  # float32: share of lines whose greedy output may differ, for two pieces can be as likely
)
MEAN = {"float16": 0.005, "bfloat16": 0.05, "int8": 0.1}  # fewer bits: of the mean difference
BATCH = 32


class Side(Protocol):
    def search(self, src: Ids, beam: int, alpha: float, limit: int) -> list[Hypothesis]:
        """The best output of each sentence, by log-probability / |Y|^alpha, of at most `limit` pieces."""

    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        """The log-probability of each piece of `tgt`, and of its eos."""


class Ours:
    """The engine of this project as a `Side`."""

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
        return [
            best
            for batch in _batches(src)
            for best, *_ in search(self.model, pack([[*ids, EOS] for ids in batch]), config)
        ]

    @torch.inference_mode()
    def score(self, src: Ids, tgt: Ids) -> list[list[float]]:
        scores = []
        for sources, targets in zip(_batches(src), _batches(tgt), strict=True):
            given = pack([[BOS, *ids] for ids in targets])
            logits = self.model.projection(
                self.model(pack([[*ids, EOS] for ids in sources]), given)
            )
            wanted = torch.tensor([piece for ids in targets for piece in (*ids, EOS)])
            each = logits.log_softmax(1).gather(1, wanted[:, None]).squeeze(1)
            scores += [part.tolist() for part in each.split([len(ids) + 1 for ids in targets])]
        return scores


def _batches(sentences: Ids) -> list[Ids]:
    return [sentences[i : i + BATCH] for i in range(0, len(sentences), BATCH)]


@dataclass(frozen=True)
class Agreement:
    """What a comparison found."""

    lines: int
    differing: int  # lines of which the greedy output is not the same
    largest: float  # difference of one piece's log-probability
    mean: float  # of the absolute differences

    def __str__(self) -> str:
        return (
            f"{self.lines - self.differing} of {self.lines} lines greedily the same; log-probability of a piece "
            f"differs by at most {self.largest:.2g}, on average {self.mean:.2g}"
        )

    def is_within(self, quantization: str) -> bool:
        """Anything that is no number is not."""
        if quantization == "float32":
            return self.largest <= LARGEST and self.differing <= DIFFERING * self.lines
        return self.mean <= MEAN[quantization.partition("_")[0]]


def bound(quantization: str) -> str:
    if quantization == "float32":
        return f"{1 - DIFFERING:.1%} of the lines and {LARGEST:.0e}"
    return f"{MEAN[quantization.partition('_')[0]]} on average"


def compare(ours: Side, theirs: Side, src: Ids, limit: int) -> Agreement:
    found, other = (side.search(src, 1, 0.0, limit) for side in (ours, theirs))
    outputs = [one.ids for one in found]
    differing = sum(ids != one.ids for ids, one in zip(outputs, other, strict=True))
    differences = torch.tensor(
        [
            abs(a - b)
            for mine, their in zip(
                ours.score(src, outputs), theirs.score(src, outputs), strict=True
            )
            for a, b in zip(mine, their, strict=True)
        ],
        dtype=torch.float64,
    )
    return Agreement(len(src), differing, float(differences.max()), float(differences.mean()))
