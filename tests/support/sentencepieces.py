"""Models that SentencePiece learns by itself, from lines."""

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece

from nmt.data.vocab import BOS, EOS, PAD, UNK
from nmt.system.strict_json import Fields


def train_sentencepiece(lines: Iterable[str], size: int, **options: Any) -> bytes:
    """Learn a BPE with the ids of nmt, which normalises nothing unless `options` say otherwise."""
    model = io.BytesIO()
    defaults: Fields = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "pad_id": PAD,
        "unk_id": UNK,
        "bos_id": BOS,
        "eos_id": EOS,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=size,
        num_threads=1,
        minloglevel=2,
        **(defaults | options),
    )
    return model.getvalue()
