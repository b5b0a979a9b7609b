"""Checkpoints that Marian can compute, for what nmt-export writes for it and for Bergamot.

Their weights are whole numbers divided by powers of two, so that all that an export adds up is exact, and the same
on every machine. None is 0 or 1, so that a forgotten or exchanged tensor shows.
"""

import random
from dataclasses import replace
from pathlib import Path

import torch

from nmt.checkpoint.checkpoint import Average, Checkpoint, Snapshot, save_checkpoint
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import DecodingConfig, ModelConfig, RunConfig, VocabConfig
from nmt.data.vocab import BOS, PAD, VocabPair, Vocabulary
from nmt.model.transformer import Transformer
from support.toy_corpus import sentences
from support.untrained import make_vocab

PAIRS = sentences(8, seed=5)
LINES = [src for src, _ in PAIRS]
PLAIN = ModelConfig(
    d_model=64, d_ff=128, n_heads=4, n_layers=2, positions="marian", projection_bias=True
)
SHAPES = {
    "tied": PLAIN,
    "tied-unscaled-biased": replace(PLAIN, scale_embeddings="none", attention_bias=True),
    "decoder-tied-swish-uneven": replace(
        PLAIN, tied="decoder", activation="swish", encoder_layers=3, decoder_layers=1
    ),
    "embeddings-tied-unscaled": replace(PLAIN, tied="embeddings", scale_embeddings="none"),
    "embeddings-tied-logits-scaled": replace(
        PLAIN, tied="embeddings", scale_embeddings="projection"
    ),
    "untied-small-heads": replace(
        PLAIN,
        tied=False,
        d_k=3,
        d_v=5,
    ),
    "tied-logits-scaled-rows": replace(PLAIN, scale_embeddings="projection", vocab_rows=90),
    "pair": replace(PLAIN, tied="decoder", scale_embeddings="projection", attention_bias=True),
}


def make_exportable(
    shape: ModelConfig, folder: Path, pieces: Vocabulary, decoding: DecodingConfig | None = None
) -> Checkpoint:
    """Write an average into a folder that does not exist yet."""
    rng, weights = random.Random(2), {}
    for name, p in Transformer(shape, *pieces.sizes).named_parameters():
        noise = torch.tensor(rng.choices(range(-127, 128), k=p.numel())) / 1024
        weights[name] = noise.view_as(p) + (1.0 if name.endswith("norm.weight") else 0.0)
    if shape.projection_bias:  # no piece is likely that our search forbids: Marian forbids none
        bias = weights["projection.bias"]
        bias[[PAD, BOS, *range(pieces.tgt.size, len(bias))]] = -16.0
    else:
        weights["tgt_embedding.weight"][[PAD, BOS]] = 0.0
    config = RunConfig(
        name="toy",
        vocab=VocabConfig(size=pieces.src.size),
        model=shape,
        decoding=decoding or DecodingConfig(),
    )
    if isinstance(pieces, VocabPair):
        sizes = VocabConfig(joint=False, size=pieces.src.size, tgt_size=pieces.tgt.size)
        config = replace(config, vocab=sizes)
    save_checkpoint(folder, Snapshot(weights, {}), Average(["step-10"], 10), config, pieces)
    return open_checkpoint(folder)


def make_shaped(name: str, folder: Path) -> Checkpoint:
    """Write an average of one of SHAPES, with a vocabulary whose size is no multiple of 8."""
    pieces: Vocabulary = make_vocab(folder, 83)
    if name == "pair":
        pieces = VocabPair(make_vocab(folder, 70), pieces.tgt)
    return make_exportable(SHAPES[name], folder / "average", pieces)
