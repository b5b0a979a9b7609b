"""Checkpoints that take no training: random weights over the vocabulary of the toy corpus, sharp
enough to say something else for each line."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nmt.config import DataConfig, DecodingConfig, ModelConfig, RunConfig, VocabConfig
from nmt.config_files import format_config, load_config
from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
from nmt.data.vocab import BOS, EOS, PAD, Vocab
from nmt.model.transformer import Transformer
from nmt.system.files import seal, write_json, write_text
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE, STATE_FILE, VOCAB_FILE
from support.toy_corpus import sentences

SHAPE = ModelConfig(d_model=32, d_ff=48, n_heads=4, n_layers=1, tied=False)
DECODING = DecodingConfig(beam=2, max_extra=3)
DATA = DataConfig()
TINY = ModelConfig(d_model=16, d_ff=24, n_heads=2, n_layers=2)


def list_shapes(max_positions: int, shape: ModelConfig = TINY) -> dict[str, ModelConfig]:
    """One small shape for each option of the model that decoding can meet."""
    return {
        "post": shape,
        "pre": replace(shape, norm="pre", tied=False),
        "learned": replace(shape, positions="learned", max_positions=max_positions),
        "rotary": replace(shape, norm="pre", positions="rotary", max_positions=max_positions),
        "window": replace(shape, window=2),
        "small-heads": replace(shape, d_k=3, d_v=5),
        "switches": replace(
            shape,
            scale_embeddings="projection",
            embedding_norm="after_dropout",
            activation="swish",
            encoder_layers=3,
            decoder_layers=1,
        ),
        "gelu": replace(shape, activation="gelu", embedding_norm="before_dropout"),
        "released": replace(
            shape,
            positions="marian",
            attention_bias=True,
            projection_bias=True,
            vocab_rows=350,
        ),
    }


def make_vocab(
    folder: Path, size: int = 80, byte_fallback: bool = False, tags: Sequence[str] = ()
) -> Vocab:
    words = [side.encode() for pair in sentences(200, seed=1) for side in pair]
    write_word_counts(folder / "words", tally_words([*words, b"a. b, c! d;"]))
    config = VocabConfig(size=size, byte_fallback=byte_fallback)
    return Vocab(train_bpe(folder / "words", config, tags))


def make_random_model(
    shape: ModelConfig, n_pieces: int, seed: int = 1, spread: float = 0.3
) -> Transformer:
    """Make a model whose biases and norms matter too."""
    torch.manual_seed(seed)
    model = Transformer(shape, n_pieces).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=spread)
    return model


def make_model(vocab: Vocab, shape: ModelConfig = SHAPE, seed: int = 2) -> Transformer:
    model = make_random_model(shape, vocab.size, seed)
    if not shape.tied:  # pad and bos are as unlikely as in trained ones
        bias = model.decoder[-1].feed_forward_residual.norm.bias
        model.projection.weight[EOS], model.projection.weight[[PAD, BOS]] = 2 * bias, -5 * bias
    return model


def make_checkpoint(
    folder: Path,
    vocab: Vocab,
    shape: ModelConfig = SHAPE,
    decoding: DecodingConfig = DECODING,
    seed: int = 2,
    data: DataConfig = DATA,
) -> Path:
    """As an average is one."""
    folder.mkdir()
    weights = {name: p.detach() for name, p in make_model(vocab, shape, seed).named_parameters()}
    save_file(weights, folder / MODEL_FILE)
    write_json(folder / STATE_FILE, {"averaged": ["step-0000010", "step-0000020"], "step": 20})
    config = RunConfig(
        name="toy",
        data=data,
        vocab=VocabConfig(size=vocab.size),
        model=shape,
        decoding=decoding,
    )
    write_text(folder / CONFIG_FILE, format_config(config))
    (folder / VOCAB_FILE).write_bytes(vocab.model)
    seal(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Give a checkpoint other sections of its config, and seal it anew."""
    config = load_config(str(folder / CONFIG_FILE))
    write_text(folder / CONFIG_FILE, format_config(replace(config, **changes)))
    seal(folder)
