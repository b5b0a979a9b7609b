"""Brings a model's tensors into the form that other engines take: heads of one size, positions as a
finite table.

Other engines give each head d_model / n_heads columns. Smaller heads (rows A and B of Table 3) are
padded with zeros, and their queries are scaled up because the engine divides by the root of the
larger size: the scores are the same. A setting that no format can express is refused here by name,
before anything is written.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig, RunConfig
from nmt.model.multi_head_attention import MemoryAttention, SelfAttention
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import DecoderLayer, EncoderLayer, Transformer
from nmt.system.errors import UserError

MIN_POSITIONS = 1024  # for other settings of decoding than those of the config


def check_expressible(config: ModelConfig) -> None:
    """Refuse a model that neither CTranslate2 nor Hugging Face can express."""
    if config.window is not None:
        raise UserError(
            f"model.window is {config.window}: neither CTranslate2 nor Hugging Face supports "
            "restricted self-attention in such a model; use --to safetensors"
        )
    if config.d_model % config.n_heads:
        raise UserError(
            f"model.n_heads {config.n_heads} does not divide model.d_model {config.d_model}, as "
            "CTranslate2 and Hugging Face require; use --to safetensors"
        )
    size = config.d_model // config.n_heads
    for name, value in (("d_k", config.key_size), ("d_v", config.value_size)):
        if value > size:
            raise UserError(
                f"model.{name} is {value}: CTranslate2 and Hugging Face support at most "
                f"d_model / n_heads = {size}; use --to safetensors"
            )


class LayerPart(NamedTuple):
    """One matrix of a layer with its bias, or the factors and terms of a LayerNorm."""

    weight: Tensor
    bias: Tensor | None


def split_layers(model: Transformer) -> dict[str, LayerPart]:
    """Return the parts of all layers by their names in Hugging Face's Marian and Pegasus."""
    sides: dict[str, Sequence[EncoderLayer | DecoderLayer]] = {
        "encoder": model.encoder,
        "decoder": model.decoder,
    }
    parts = {}
    for side, layers in sides.items():
        for i, layer in enumerate(layers):
            for name, part in _split_layer(layer, model.config).items():
                parts[f"{side}.layers.{i}.{name}"] = part
    if model.config.norm == "pre":
        parts["encoder.layer_norm"] = read_part(model.encoder_norm)
        parts["decoder.layer_norm"] = read_part(model.decoder_norm)
    return parts


def _split_layer(layer: EncoderLayer | DecoderLayer, config: ModelConfig) -> dict[str, LayerPart]:
    parts = _split_attention("self_attn", layer.attention, config)
    parts["self_attn_layer_norm"] = read_part(layer.attention_residual.norm)
    parts["fc1"] = read_part(layer.feed_forward.inner)
    parts["fc2"] = read_part(layer.feed_forward.outer)
    parts["final_layer_norm"] = read_part(layer.feed_forward_residual.norm)
    if isinstance(layer, DecoderLayer):
        parts |= _split_attention("encoder_attn", layer.memory_attention, config)
        parts["encoder_attn_layer_norm"] = read_part(layer.memory_residual.norm)
    return parts


def read_part(module: Any) -> LayerPart:
    return LayerPart(module.weight.detach(), module.bias.detach())


def _split_attention(
    name: str, attention: SelfAttention | MemoryAttention, config: ModelConfig
) -> dict[str, LayerPart]:
    """Return the matrices of queries, keys, values and output, (d_model, d_model), and their
    biases, if it has them.
    """
    if isinstance(attention, SelfAttention):
        fused = [attention.qkv]
    else:
        fused = [attention.q, attention.kv]
    weights = _widen_qkv([linear.weight for linear in fused], attention, config)
    output = attention.output.weight.detach()  # its columns are the heads'
    size = config.d_model // config.n_heads
    weights.append(_widen_heads(output.T, config.n_heads, size).T.contiguous())
    biases: list[Tensor | None] = [None] * 4
    if config.attention_bias:
        biases = [*_widen_qkv([linear.bias for linear in fused], attention, config)]
        biases.append(attention.output.bias.detach())
    names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
    return dict(zip(names, map(LayerPart, weights, biases), strict=True))


def _widen_qkv(
    fused: list[Tensor], attention: SelfAttention | MemoryAttention, config: ModelConfig
) -> list[Tensor]:
    """Split fused weights or biases into those of queries, keys and values, with heads of one
    size.
    """
    q, k, v = torch.cat(fused).detach().split(attention.qkv_sizes)
    size = config.d_model // config.n_heads
    q = q * math.sqrt(size / config.key_size)  # the engine will divide by sqrt(size)
    return [_widen_heads(rows, config.n_heads, size) for rows in (q, k, v)]


def _widen_heads(rows: Tensor, n_heads: int, size: int) -> Tensor:
    """Append zeros to the rows of each head: (H * D, ...) -> (H * size, ...)."""
    heads = rows.unflatten(0, (n_heads, -1))  # (H, D, ...)
    wide = heads.new_zeros(n_heads, size, *rows.shape[1:])
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
    return sinusoids(max(MIN_POSITIONS, longest), positions.width)


def explain_length_penalty(config: RunConfig) -> str:
    """Return a note for the card if CTranslate2 and Hugging Face do not have the length penalty of
    the config.
    """
    if config.decoding.penalty != "gnmt":
        return ""
    return (
        "\nThis engine divides by n^alpha, where n counts the pieces of an output with its end mark. It does not know "
        "the formula above, so a beam search can choose another output than nmt does.\n"
    )


def quote_tags(tags: Sequence[str]) -> str:
    return " or ".join(f"`{tag}`" for tag in tags)
