"""How probable a given target is, given its source: the model's log-probability of each piece.

One full forward pass, packed and sorted by length as in training, without gradients. A score equals
the search's own, because weights, products and penalty are those of the search. What the search
could not have translated has probability 0 and says why: an empty source with a target that is not,
and a line that is too long. Nothing is left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import DecodingConfig
from nmt.data.batch import Packed, pack
from nmt.data.plan import split_pairs
from nmt.data.vocab import BOS, EOS
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure
from nmt.system.memory import is_out_of_memory
from nmt.translate.batching import DEFAULT_BATCH_TOKENS
from nmt.translate.beams import compute_penalty
from nmt.translate.translator import Sentences, Translator, open_translator, warn_if_untagged

MAX_SCORED_LOGITS = 1 << 24  # held at a time
MIN_SCORED_ROWS = 256  # at least, because each chunk reads all weights

ScoreKind = Literal["sum", "mean", "search"]


@dataclass(frozen=True)
class PairScore:
    """The log-probability of a target, piece by piece, or why it is impossible."""

    piece_ids: tuple[int, ...] = ()  # the end mark comes last; none if both sides are empty
    log_probs: tuple[float, ...] = ()  # of each piece
    problem: str | None = None

    @property
    def log_prob(self) -> float:
        return -math.inf if self.problem else math.fsum(self.log_probs)

    def value(self, kind: ScoreKind, config: DecodingConfig) -> float:
        """Return the log-probability, its mean over the pieces, or the score that the search gives
        it.
        """
        if kind == "sum" or not self.piece_ids:
            return self.log_prob
        n = len(self.piece_ids)
        return self.log_prob / (n if kind == "mean" else float(compute_penalty(n, config)))


class PairScorer:
    """Scores pairs of texts with the models of a translator."""

    def __init__(self, translator: Translator) -> None:
        self.translator, self.config = translator, translator.config
        # At least all that the search may write for the longest source.
        longest = translator.longest_source
        written = int(longest * self.config.max_ratio) + self.config.max_extra
        self.longest_target = max(longest, written)
        if translator.longest_table is not None:
            self.longest_target = min(self.longest_target, translator.longest_table)

    def score_pairs(self, sources: Sequence[str], targets: Sequence[str]) -> list[PairScore]:
        vocab = self.translator.vocab
        source_ids, target_ids = vocab.src.encode(sources), vocab.tgt.encode(targets)
        results = [PairScore()] * len(sources)
        possible = []  # places of the pairs that the model must look at
        for i, (source, target) in enumerate(zip(source_ids, target_ids, strict=True)):
            problem = self._find_problem(source, target)
            if problem is not None:
                results[i] = PairScore(problem=problem)
            elif source:
                possible.append(i)
        models, device = self.translator.prepared_models, self.translator.device
        budget = self.config.batch_tokens or DEFAULT_BATCH_TOKENS
        found = compute_log_probs(
            models,
            [[*self.translator.tag_ids, *source_ids[i]] for i in possible],
            [target_ids[i] for i in possible],
            device,
            budget,
        )
        for batch, rows in found:
            for place, log_probs in zip(batch, rows, strict=True):
                i = possible[place]
                results[i] = PairScore((*target_ids[i], EOS), tuple(log_probs))
        return results

    def _find_problem(self, source: list[int], target: list[int]) -> str | None:
        if not source:
            return "its source is empty" if target else None
        for side, ids, longest in (
            ("source", source, self.translator.longest),
            ("target", target, self.longest_target),
        ):
            if len(ids) > longest:
                return f"its {side} has {len(ids):,} pieces, more than {longest:,}"
        return None


def open_pair_scorer(paths: Sequence[str], overrides: Sequence[str] = ()) -> PairScorer:
    """Load one checkpoint, or several that score together."""
    model = open_translator(paths, overrides)
    assert isinstance(model.translator, Translator)
    warn_if_untagged(model.config.data, model.config.decoding.tag)
    return PairScorer(model.translator)


@torch.inference_mode()
def compute_log_probs(
    models: Sequence[Transformer],
    sources: Sentences,
    targets: Sentences,
    device: torch.device,
    batch_tokens: int,
) -> Iterator[tuple[list[int], list[list[float]]]]:
    """Yield batch by batch the indices of pairs and, for each, the log-probability of every piece
    of its target and of the end mark. Neither side has marks; several models are an ensemble.
    """
    src_lengths = np.array([len(ids) + 1 for ids in sources], dtype=np.int64)
    tgt_lengths = np.array([len(ids) + 1 for ids in targets], dtype=np.int64)
    # neighbours of similar length share a width in attention
    order = np.argsort(np.maximum(src_lengths, tgt_lengths), kind="stable")
    bounds = split_pairs(src_lengths[order], tgt_lengths[order], batch_tokens, batch_tokens)
    for first, last in pairwise(bounds.tolist()):
        batch = order[first:last].tolist()
        src = pack([[*sources[i], EOS] for i in batch]).to(device)
        tgt = pack([[BOS, *targets[i]] for i in batch]).to(device)
        gold = pack([[*targets[i], EOS] for i in batch]).to(device).tokens
        try:
            each = [_compute_gold_log_probs(model, src, tgt, gold) for model in models]
        except (MemoryError, RuntimeError) as error:  # torch raises a plain one for host memory
            if is_out_of_memory(error):
                raise Failure("scoring ran out of memory; lower decoding.batch_tokens") from None
            raise
        mean = each[0]
        if len(each) > 1:  # of probabilities, as in an ensemble that is searched
            mean = torch.stack(each).logsumexp(0) - math.log(len(each))
        yield batch, [row.tolist() for row in mean.cpu().split(tgt_lengths[batch].tolist())]


def _compute_gold_log_probs(model: Transformer, src: Packed, tgt: Packed, gold: Tensor) -> Tensor:
    """Return the log-probability (T,) of each gold piece; the (T, V) logits never exist as a whole."""
    hidden = model(src, tgt)  # (T, d)
    n_rows = max(MIN_SCORED_ROWS, MAX_SCORED_LOGITS // model.n_vocab)
    chunks = []
    for rows, labels in zip(hidden.split(n_rows), gold.split(n_rows), strict=True):
        logits = model.projection(rows).float()  # (C, V)
        chunks.append(-F.cross_entropy(logits, labels, reduction="none"))
    return torch.cat(chunks)
