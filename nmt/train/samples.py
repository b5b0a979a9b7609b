"""Translations of the same few dev lines at each validation, and how sharply the model attends.

They are lines that BLEU is computed from, so they cost no search of their own. The attention of a
translation that is finished comes from one more pass through the model. Each sample becomes a line
of metrics.jsonl, so texts are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nmt.train.events import SampleEvent
from nmt.translate.attention_maps import WeightArray, compute_attention_maps
from nmt.translate.translator import Translation, Translator

SAMPLED_LINES = 5
LONGEST_TEXT = 1_000  # characters
LONGEST_SIDE = 160  # pieces of a sentence whose attention is computed


@dataclass(frozen=True)
class Sample:
    """A translated dev line, and the entropy of each layer's attention."""

    event: SampleEvent
    entropies: dict[str, float]  # in nats, such as that of encoder.0 or memory.0


def take_sample(
    translator: Translator,
    step: int,
    line: int,
    source: str,
    reference: str,
    translation: Translation,
) -> Sample:
    """Describe how a dev line was translated; `line` counts from 0 here, and from 1 in the event."""
    event = SampleEvent(
        step=step,
        line=line + 1,
        source=source[:LONGEST_TEXT],
        reference=reference[:LONGEST_TEXT],
        translation=translation.text[:LONGEST_TEXT],
    )
    source_ids = [*translator.tag_ids, *translator.vocab.src.encode([source])[0]]
    target_ids = translation.piece_ids
    # What is longer than translator.longest was cut, or split.
    if max(len(source_ids), len(target_ids)) >= min(LONGEST_SIDE, translator.longest):
        return Sample(event, {})
    (maps,) = compute_attention_maps(translator.model, translator.vocab, [source_ids], [target_ids])
    entropies = {}
    kinds = {"encoder": maps.encoder, "decoder": maps.decoder, "memory": maps.memory}
    for kind, weights in kinds.items():
        assert weights is not None
        for number, layer in enumerate(weights):
            entropies[f"{kind}.{number}"] = _mean_entropy(layer)
    return Sample(event, entropies)


def _mean_entropy(weights: WeightArray) -> float:
    """Average the entropy of the distributions in the last dimension, in nats."""
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return float(-(weights * logs).sum(-1).mean())


def mean_entropies(samples: Sequence[Sample]) -> dict[str, float]:
    """Average the entropies of all samples, layer by layer."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for layer, entropy in sample.entropies.items():
            values.setdefault(layer, []).append(entropy)
    return {layer: sum(some) / len(some) for layer, some in values.items()}
