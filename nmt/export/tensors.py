"""A model's tensors as other engines take them: heads of one size, and positions as a table with an end.

Other engines give each head d_model / n_heads columns. Smaller heads (rows A and B of Table 3) become such ones by
columns of zeros, queries grown by as much as the larger size would shrink the scores: the same numbers come out. What
no format can say is refused here, before anything is written, by the name of its setting.
"""

import math

import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig, RunConfig
from nmt.model.positions import Positions, sinusoids
from nmt.model.transformer import MemoryAttention, SelfAttention
from nmt.system.errors import UserError

LEAST_POSITIONS = 1024


def check_expressible(config: ModelConfig) -> None:
    if config.window is not None:
        raise UserError(
            f"model.window is {config.window}: neither CTranslate2 nor Hugging Face has restricted "
            "self-attention for such a model; only --to safetensors takes it"
        )
    if config.d_model % config.n_heads:
        raise UserError(
            f"model.n_heads {config.n_heads} does not divide model.d_model {config.d_model}, as "
            "CTranslate2 and Hugging Face ask for; only --to safetensors takes it"
        )
    size = config.d_model // config.n_heads
    for name, value in (("d_k", config.key_size), ("d_v", config.value_size)):
        if value > size:
            raise UserError(
                f"model.{name} is {value}: CTranslate2 and Hugging Face have room for d_model / n_heads = "
                f"{size}; only --to safetensors takes it"
            )


def list_projections(
    attention: SelfAttention | MemoryAttention, config: ModelConfig
) -> list[Tensor]:
    """Return the matrices of queries, keys, values and output, each (d_model, d_model)."""
    parts = [attention.qkv] if isinstance(attention, SelfAttention) else [attention.q, attention.kv]
    size = config.d_model // config.n_heads
    q, k, v = torch.cat([part.weight.detach() for part in parts]).split(attention.sizes)
    output = _widen_heads(attention.output.weight.detach().T, config.n_heads, size).T.contiguous()
    return [
        *(
            _widen_heads(part, config.n_heads, size)
            for part in (q * math.sqrt(size / config.key_size), k, v)
        ),
        output,
    ]


def _widen_heads(x: Tensor, n_heads: int, size: int) -> Tensor:
    """(H * D, d_model) -> (H * size, d_model), zeros beneath each head's rows."""
    heads = x.unflatten(0, (n_heads, -1))
    room = heads.new_zeros(n_heads, size, *x.shape[1:])
    room[:, : heads.shape[1]] = heads
    return room.flatten(0, 1)


def make_position_table(positions: Positions, decoding: DecodingConfig) -> Tensor:
    """Return what is added to the embeddings: a learned table, or sinusoids as far as decoding can go."""
    if positions.is_learned:
        return positions.table.detach()
    return sinusoids(
        max(LEAST_POSITIONS, decoding.max_source + decoding.max_extra + 1), positions.d_model
    )


def explain_length_penalty(config: RunConfig) -> str:
    """Return the note in a card about a search that CTranslate2 and Hugging Face cannot repeat; empty if they can."""
    if config.decoding.penalty != "gnmt":
        return ""
    return (
        "\nThis engine divides by n^alpha, where n counts the pieces of an output with its end mark. It does not know "
        "the formula above, so a beam search can choose another output than nmt does.\n"
    )
