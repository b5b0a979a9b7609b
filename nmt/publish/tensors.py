"""A model's tensors as other engines take them: heads of one size, and positions as a table with an end.

Other engines give each head d_model / n_heads columns. Smaller heads (rows A and B of Table 3) become such ones by
columns of zeros, queries grown by as much as the larger size would shrink the scores: the same numbers come out. What
no format can say is refused here, before anything is written, by the name of its setting.
"""

import math

import torch
from torch import Tensor

from nmt.config import DecodingConfig, ModelConfig
from nmt.errors import UserError
from nmt.model.transformer import MemoryAttention, Positions, SelfAttention, sinusoids

LEAST_POSITIONS = 1024


def check_expressible(config: ModelConfig) -> None:
    if config.window is not None:
        raise UserError(f"model.window is {config.window}: neither CTranslate2 nor Hugging Face has restricted "
                        "self-attention for such a model; only --to safetensors takes it")
    if config.d_model % config.n_heads:
        raise UserError(f"model.n_heads {config.n_heads} does not divide model.d_model {config.d_model}, as "
                        "CTranslate2 and Hugging Face ask for; only --to safetensors takes it")
    size = config.d_model // config.n_heads
    for name, value in (("d_k", config.key_size), ("d_v", config.value_size)):
        if value > size:
            raise UserError(f"model.{name} is {value}: CTranslate2 and Hugging Face have room for d_model / n_heads = "
                            f"{size}; only --to safetensors takes it")


def projections(attention: SelfAttention | MemoryAttention, config: ModelConfig) -> list[Tensor]:
    """The matrices of queries, keys, values and output, each (d_model, d_model)."""
    joined = (attention.qkv.weight if isinstance(attention, SelfAttention) else
              torch.cat((attention.q.weight, attention.kv.weight)))
    q, k, v = joined.detach().split(attention.sizes)
    size = config.d_model // config.n_heads
    q = q * math.sqrt(size / config.key_size)
    widened = [_widened(x, config.n_heads, size) for x in (q, k, v, attention.output.weight.detach().T)]
    return [*widened[:3], widened[3].T.contiguous()]


def _widened(x: Tensor, n_heads: int, size: int) -> Tensor:
    """(H * D, d_model) -> (H * size, d_model), zeros beneath each head's rows."""
    heads = x.unflatten(0, (n_heads, -1))
    return torch.nn.functional.pad(heads, (0, 0, 0, size - heads.shape[1])).flatten(0, 1)


def position_table(positions: Positions, decoding: DecodingConfig) -> Tensor:
    """What is added to the pieces' embeddings: a learned table, or sinusoids as far as decoding can go."""
    if positions.is_learned:
        return positions.table.detach()
    return sinusoids(max(LEAST_POSITIONS, decoding.max_source + decoding.max_extra + 1), positions.d_model)
