"""Brings a model's tensors into the form that other engines take: heads of one size, positions as a
finite table.

Other engines give each head d_model / n_heads columns. Smaller heads (rows A and B of Table 3) are
padded with zeros, and their queries are scaled up because the engine divides by the root of the
larger size: the scores are the same. What no format can express is refused here by the name of its
setting, before anything is written.
"""

import math

import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig, RunConfig
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import MemoryAttention, SelfAttention
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


def list_projections(
    attention: SelfAttention | MemoryAttention, config: ModelConfig
) -> list[Tensor]:
    """Return the matrices of queries, keys, values and output, each (d_model, d_model)."""
    if isinstance(attention, SelfAttention):
        parts = [attention.qkv]
    else:
        parts = [attention.q, attention.kv]
    q, k, v = torch.cat([part.weight.detach() for part in parts]).split(attention.qkv_sizes)

    n_heads = config.n_heads
    size = config.d_model // n_heads
    q = q * math.sqrt(size / config.key_size)  # the engine will divide by sqrt(size)
    inputs = [_widen_heads(matrix, n_heads, size) for matrix in (q, k, v)]
    output = attention.output.weight.detach()  # its columns are the heads'
    return [*inputs, _widen_heads(output.T, n_heads, size).T.contiguous()]


def _widen_heads(matrix: Tensor, n_heads: int, size: int) -> Tensor:
    """Append rows of zeros to each head: (H * D, d_model) -> (H * size, d_model)."""
    heads = matrix.unflatten(0, (n_heads, -1))  # (H, D, d_model)
    wide = heads.new_zeros(n_heads, size, *matrix.shape[1:])
    wide[:, : heads.shape[1]] = heads
    return wide.flatten(0, 1)


def make_position_table(positions: Positions, decoding: DecodingConfig) -> Tensor:
    """Return the table of positions: the learned one, or sinusoids for the longest output that
    decoding allows.
    """
    if positions.is_learned:
        return positions.table.detach()
    longest = decoding.max_source + decoding.max_extra + 1
    return sinusoids(max(MIN_POSITIONS, longest), positions.d_model)


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
