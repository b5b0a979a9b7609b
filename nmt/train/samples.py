"""Translations of the same few dev lines at each validation, with what the model attends to.

They are lines that BLEU is computed from, so they cost no search of their own. The attention of a
translation that is finished comes from one more pass through the model. Each sample becomes a line
of metrics.jsonl, so texts are cut, and long sentences have no attention there.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS
from nmt.train.metrics_log import LONGEST_LINE
from nmt.translate.translator import Translation, Translator

N_SAMPLES = 5
LONGEST_TEXT = 1_000  # characters
LONGEST_SIDE = 160  # pieces of a sentence whose attention is computed


@dataclass(frozen=True)
class Sample:
    """A translated dev line: its event for metrics.jsonl, and the entropy of each layer's attention."""

    event: dict[str, Any]
    entropies: dict[str, float]  # in nats, such as that of encoder.0 or memory.0


def take_sample(
    translator: Translator, line: int, source: str, reference: str, translation: Translation
) -> Sample:
    """Describe how a dev line was translated; `line` counts from 0 here, and from 1 in the event."""
    event: dict[str, Any] = {
        "line": line + 1,
        "source": source[:LONGEST_TEXT],
        "reference": reference[:LONGEST_TEXT],
        "translation": translation.text[:LONGEST_TEXT],
    }
    source_ids = [*translator.tag_ids, *translator.vocab.src.encode([source])[0], EOS]
    target_ids = [*translation.piece_ids, EOS]
    longest = min(LONGEST_SIDE, translator.longest)  # what is longer was cut or split
    if max(len(source_ids), len(target_ids)) > longest:
        return Sample(event, {})
    weights = _compute_attention(translator, source_ids, target_ids)
    entropies = {}
    for kind, layers in weights.items():
        for number, layer in enumerate(layers):
            entropies[f"{kind}.{number}"] = torch.special.entr(layer).sum(-1).mean().item()
    attention = _describe_attention(translator, source_ids, target_ids, weights["memory"])
    described = event | {"attention": attention}
    is_short = len(json.dumps(described)) < LONGEST_LINE // 2
    return Sample(described if is_short else event, entropies)


@torch.inference_mode()
def _compute_attention(
    translator: Translator, source_ids: Sequence[int], target_ids: Sequence[int]
) -> dict[str, list[Tensor]]:
    """Compute the weights of each kind and layer, (H, queries, keys)."""
    model = translator.model
    weights: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "memory": []}
    source = pack([source_ids]).to(translator.device)
    # each position predicts the next piece
    target = pack([[BOS, *target_ids[:-1]]]).to(translator.device)
    was_training = model.training
    model.eval()
    memory = model.encode(source, weights["encoder"])
    model.decode(target, memory, source, weights["memory"], weights["decoder"])
    model.train(was_training)
    return {kind: [layer[0].float().cpu() for layer in layers] for kind, layers in weights.items()}


def _describe_attention(
    translator: Translator,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    layers: Sequence[Tensor],
) -> dict[str, Any]:
    """Describe the attention to the source of the layer that follows it best, mean of its heads, a
    byte for each weight.
    """
    weights = layers[max(0, len(layers) - 2)].mean(0)  # (target, source)
    cells = (255 * weights).round().to(torch.uint8).numpy().tobytes()
    vocab = translator.vocab
    return {
        "source": vocab.src.pieces(source_ids),
        "target": vocab.tgt.pieces(target_ids),
        # the end mark gets much attention and means nothing
        "alignment": weights[:-1, : max(1, len(source_ids) - 1)].argmax(1).tolist(),
        "attention": {"memory": [[base64.b64encode(cells).decode()]]},
    }


def mean_entropies(samples: Sequence[Sample]) -> dict[str, float]:
    """Average the entropies of all samples, layer by layer."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for layer, entropy in sample.entropies.items():
            values.setdefault(layer, []).append(entropy)
    return {layer: sum(some) / len(some) for layer, some in values.items()}
