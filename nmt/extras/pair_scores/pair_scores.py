"""How probable a given target is, given its source: the model's log-probability of each piece.

One full forward pass, packed and sorted by length as in training, without gradients. A score equals
the search's own, because weights, products and penalty are those of the search. A pair that
the search could not have produced has probability 0 and the reason: an empty source with a target that
is not empty, or a line that is too long. Every pair gets a score.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nmt.config import USERS_TEXT, DecodingConfig
from nmt.data.batch import Packed, Sentences, pack
from nmt.data.plan import split_pairs
from nmt.data.vocab import EOS
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure
from nmt.system.memory import explain_memory_error
from nmt.translate.batching import DEFAULT_BATCH_TOKENS, pack_pairs
from nmt.translate.capitals import lower_capitals
from nmt.translate.ensemble import average_log_probs
from nmt.translate.length_penalty import compute_penalty
from nmt.translate.search_rules import make_rules
from nmt.translate.translator import Translator, open_translator, warn_if_untagged

MAX_SCORED_LOGITS = 1 << 24  # held at a time
SCORING_TOO_LARGE = "scoring ran out of memory; lower decoding.batch_tokens"
MIN_SCORED_ROWS = 256  # at least, because each chunk reads all weights

LogProbs = list[list[float]]  # of each sentence's pieces, and of its end mark
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
        return self.log_prob / (
            n if kind == "mean" else float(compute_penalty(n, make_rules(config)))
        )


class PairScorer:
    """Scores pairs of texts with the models of a translator."""

    def __init__(self, translator: Translator) -> None:
        self.translator, self.config = translator, translator.config
        # At least all that the search may write for the longest source.
        longest = translator.longest_source
        self.longest_target = max(longest, self.config.find_longest(longest))
        if translator.longest_table is not None:
            self.longest_target = min(self.longest_target, translator.longest_table)

    def score_pairs(self, sources: Sequence[str], targets: Sequence[str]) -> list[PairScore]:
        translator = self.translator
        results = [PairScore()] * len(sources)  # as of a pair of two empty sides
        usable = []
        own_sources = []
        own_targets = []
        # as they are translated: of a source in capitals by small letters
        lowered = [
            lower_capitals(tgt) if translator.is_lowered(src) and tgt.isupper() else tgt
            for src, tgt in zip(sources, map(str.strip, targets), strict=True)
        ]
        encoded_targets = translator.vocab.tgt.encode(lowered)
        pairs = zip(translator.encode_source(sources), encoded_targets, strict=True)
        for number, (source, target) in enumerate(pairs):
            problem = self._find_problem(source, target)
            if problem is not None:
                results[number] = PairScore(problem=problem)
            elif source:
                usable.append(number)
                own_sources.append([*self.translator.tag_ids, *source])
                own_targets.append(target)

        all_log_probs = compute_log_probs(
            self.translator.prepared_models,
            own_sources,
            own_targets,
            self.translator.device,
            self.config.batch_tokens or DEFAULT_BATCH_TOKENS,
        )
        for number, target, log_probs in zip(usable, own_targets, all_log_probs, strict=True):
            results[number] = PairScore((*target, EOS), tuple(log_probs))
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


def open_pair_scorer(paths: Sequence[str], overrides: Sequence[str]) -> PairScorer:
    """Load one checkpoint, or several that score together."""
    model = open_translator(paths, [*USERS_TEXT, *overrides])
    assert isinstance(model.translator, Translator)
    warn_if_untagged(model.config)
    return PairScorer(model.translator)


@torch.inference_mode()
def compute_log_probs(
    models: Sequence[Transformer],
    sources: Sentences,
    targets: Sentences,
    device: torch.device,
    batch_tokens: int,
) -> LogProbs:
    """Return for each pair the log-probability of every piece of its target and of the end mark.
    Neither side has marks; several models are an ensemble.
    """
    results: LogProbs = [[]] * len(sources)
    for numbers in batch_pairs(sources, targets, batch_tokens):
        own_targets = [targets[i] for i in numbers]
        src, tgt = pack_pairs([sources[i] for i in numbers], own_targets, device)
        gold = pack([[*ids, EOS] for ids in own_targets]).to(device).tokens
        with explain_memory_error(Failure(SCORING_TOO_LARGE)):
            log_probs = find_log_probs(models, src, tgt, gold)
        rows = log_probs.cpu().split([len(ids) + 1 for ids in own_targets])
        for number, row in zip(numbers, rows, strict=True):
            results[number] = row.tolist()
    return results


def batch_pairs(sources: Sentences, targets: Sentences, batch_tokens: int) -> Iterator[list[int]]:
    """Yield the places of the pairs of each batch: neighbours of similar length share a width in
    attention. Pairs have no marks, which are added.
    """
    src_lengths = np.array([len(ids) + 1 for ids in sources], dtype=np.int64)
    tgt_lengths = np.array([len(ids) + 1 for ids in targets], dtype=np.int64)
    order = np.argsort(np.maximum(src_lengths, tgt_lengths), kind="stable")
    bounds = split_pairs(src_lengths[order], tgt_lengths[order], batch_tokens, batch_tokens)
    for first, last in pairwise(bounds.tolist()):
        yield order[first:last].tolist()


def find_log_probs(models: Sequence[Transformer], src: Packed, tgt: Packed, gold: Tensor) -> Tensor:
    """Return the log-probability of each gold piece, (T,). Logits of all positions never exist together."""
    n_rows = max(MIN_SCORED_ROWS, MAX_SCORED_LOGITS // max(model.n_vocab for model in models))
    hidden = [model(src, tgt).split(n_rows) for model in models]  # (C, d) each
    chunks = []
    for pieces, *states in zip(gold[:, None].split(n_rows), *hidden, strict=True):
        each = []
        for model, rows in zip(models, states, strict=True):
            log_probs = model.projection(rows).float().log_softmax(1)
            each.append(log_probs.gather(1, pieces))
        chunks.append(average_log_probs(each))
    return torch.cat(chunks).squeeze(1)
