"""Brings a model's tensors into the form that other engines take: Marian's names, heads of one size,
positions as a finite table.

Other engines give each head d_model / n_heads columns. Smaller heads (rows A and B of Table 3) are
padded with zeros, and their queries are scaled up because the engine divides by the root of the
larger size: the scores are the same. A setting that no format can express is refused here by name,
before anything is written.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.vocab import BOS, PAD, UNK, Vocab
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError

MIN_POSITIONS = 1024  # for other settings of decoding than those of the config
# The linear layers and LayerNorms of one of our layers, and what Hugging Face's Marian and Pegasus call
# the matrices that lie in them, one below the other. The encoder has none that begins with "memory".
MARIAN_NAMES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.out_proj",),
    "attention_residual.norm": ("self_attn_layer_norm",),
    "memory_attention.q": ("encoder_attn.q_proj",),
    "memory_attention.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "memory_attention.output": ("encoder_attn.out_proj",),
    "memory_residual.norm": ("encoder_attn_layer_norm",),
    "feed_forward.inner": ("fc1",),
    "feed_forward.outer": ("fc2",),
    "feed_forward_residual.norm": ("final_layer_norm",),
}


def check_expressible(config: ModelConfig) -> None:
    """Refuse a model that no other engine can express."""
    if config.window is not None:
        raise UserError(
            f"model.window is {config.window}: no other engine supports restricted self-attention "
            "in such a model; use --to safetensors"
        )
    if config.d_model % config.n_heads:
        raise UserError(
            f"model.n_heads {config.n_heads} does not divide model.d_model {config.d_model}, as "
            "other engines require; use --to safetensors"
        )
    size = config.d_model // config.n_heads
    for name, value in (("d_k", config.key_size), ("d_v", config.value_size)):
        if value > size:
            raise UserError(
                f"model.{name} is {value}: other engines support at most "
                f"d_model / n_heads = {size}; use --to safetensors"
            )


def list_layer_parts(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield our name for each linear layer and LayerNorm in the layers, and Marian's for its matrices."""
    for side, depth in (("encoder", config.encoder_depth), ("decoder", config.decoder_depth)):
        for layer in range(depth):
            for ours, theirs in MARIAN_NAMES.items():
                if side == "decoder" or not ours.startswith("memory"):
                    names = [f"{side}.layers.{layer}.{name}" for name in theirs]
                    yield f"{side}.{layer}.{ours}", names
        if config.norm == "pre":
            yield f"{side}_norm", [f"{side}.layer_norm"]


def read_part(model: Transformer, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the matrix of a linear layer, in which all heads have d_model / n_heads rows or columns,
    and its bias, if it has one; or the factors and terms of a LayerNorm.
    """
    module: Any = model.get_submodule(name)
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    kind = name.rpartition(".")[2]
    if kind in ("qkv", "q", "kv"):
        weight = _widen_qkv(weight, kind, model.config)
        bias = None if bias is None else _widen_qkv(bias, kind, model.config)
    elif name.endswith("attention.output"):  # its columns are the heads'
        weight = _widen_heads(weight.T, model.config).T
    return weight, bias


def _widen_qkv(fused: Tensor, kind: str, config: ModelConfig) -> Tensor:
    """Widen the heads of queries, keys and values, which lie in `fused` one below the other, in the order
    of the letters of `kind`.
    """
    sizes = [config.value_size if letter == "v" else config.key_size for letter in kind]
    projections = list(fused.split([config.n_heads * size for size in sizes]))
    if kind.startswith("q"):  # the engine will divide by the root of the larger size
        projections[0] = projections[0] * math.sqrt(
            config.d_model // config.n_heads / config.key_size
        )
    return torch.cat([_widen_heads(rows, config) for rows in projections])


def _widen_heads(rows: Tensor, config: ModelConfig) -> Tensor:
    """Append zeros to the rows of each head: (H * D, ...) -> (d_model, ...)."""
    heads = rows.unflatten(0, (config.n_heads, -1))  # (H, D, ...)
    size = config.d_model // config.n_heads
    wide = heads.new_zeros(config.n_heads, size, *rows.shape[1:])
    wide[:, : heads.shape[1]] = heads
    return wide.flatten(0, 1)


def scale_projection(model: Transformer) -> Tensor:
    """Return the matrix of the projection with the scale of its logits folded in, because no format
    stores it separately.
    """
    return model.projection.weight.detach() * model.hidden_scale


def make_position_table(positions: Positions, decoding: DecodingConfig) -> Tensor:
    """Return the table of positions: the learned one, or sinusoids for the longest output that
    decoding allows.
    """
    if positions.is_learned:
        return positions.table.detach()
    longest = decoding.max_source + decoding.max_extra + 1
    return sinusoids(max(MIN_POSITIONS, longest), positions.width, positions.is_marian)


def list_forbidden(vocab: Vocab) -> list[int]:
    """Return the pieces that our search never chooses, so that another engine does not either."""
    return [PAD, BOS, UNK] if vocab.has_bytes else [PAD, BOS]


def find_alpha(decoding: DecodingConfig) -> float:
    """Return the power of the length by which another engine divides scores."""
    return 0.0 if decoding.penalty == "none" else decoding.length_penalty


def explain_penalty_and_tags(decoding: DecodingConfig, tags: Sequence[str], use_of_tag: str) -> str:
    """Return notes for the card: on a length penalty that CTranslate2 and Hugging Face do not have, and
    on tags, which go where `use_of_tag` says.
    """
    notes = ""
    if decoding.penalty == "gnmt":
        notes += (
            "\nThis engine divides by n^alpha, where n counts the pieces of an output with its end mark. It does not "
            "know the formula above, so a beam search can choose another output than nmt does.\n"
        )
    if tags:
        quoted = " or ".join(f"`{tag}`" for tag in tags)
        notes += f"\nIt was trained with a tag in front of the source, {quoted}. "
        notes += use_of_tag.format(tag=tags[0])
    return notes
