"""Multi-head attention of section 3.2.2: the projections of queries, keys and values, and of what the
heads return.

Encoder and decoder have self-attention; the decoder also attends to the encoder's output, which is
called the memory. Each has two ways through: `forward` takes whole sentences (`packed_attention.py`),
and `step` the newest piece of each hypothesis, whose past is in a cache (`cache.py`).
"""

from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.model.attention_mask import AttentionMask
from nmt.model.backend import BackendModule
from nmt.model.cache import Cache, attend_memory, attend_past, pad_memory
from nmt.model.packed_attention import rotate

# Pass a list to collect attention weights in; with None they are not kept.
AttentionWeights = list[Tensor] | None


class Attention(BackendModule):
    """The parts of multi-head attention (section 3.2.2) that self-attention and memory attention
    share.
    """

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        self.n_heads, self.window, self.dropout = config.n_heads, window, config.attention_dropout
        keys, values = config.n_heads * config.key_size, config.n_heads * config.value_size
        self.qkv_sizes = [keys, keys, values]  # of all heads' queries, keys and values
        self.output = nn.Linear(self.qkv_sizes[2], config.d_model, config.attention_bias)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1))  # (T, H, D)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        weights: AttentionWeights,
        rotation: Tensor | None = None,
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        heads = self.backend.attend(q, k, v, mask, weights, dropout, rotation)
        return self.output(heads.flatten(1))


class SelfAttention(Attention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.window)
        self.qkv = nn.Linear(config.d_model, sum(self.qkv_sizes), config.attention_bias)

    def project_qkv(self, x: Tensor) -> list[Tensor]:
        return [self.split_heads(part) for part in self.qkv(x).split(self.qkv_sizes, dim=-1)]

    def forward(
        self, x: Tensor, mask: AttentionMask, weights: AttentionWeights, rotation: Tensor | None
    ) -> Tensor:
        q, k, v = self.project_qkv(x)
        return self.attend(q, k, v, mask, weights, rotation)

    def step(self, x: Tensor, cache: Cache, layer: int, rotation: Tensor | None) -> Tensor:
        q, k, v = self.project_qkv(x)
        q, k = rotate(q, rotation), rotate(k, rotation)
        return self.output(attend_past(cache, q, k, v, layer, self.window))


class MemoryAttention(Attention):
    """The decoder's attention over the encoder's output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q = nn.Linear(config.d_model, self.qkv_sizes[0], config.attention_bias)
        self.kv = nn.Linear(config.d_model, sum(self.qkv_sizes[1:]), config.attention_bias)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv(memory).split(self.qkv_sizes[1:], dim=-1)
        return self.split_heads(k), self.split_heads(v)

    def project_memory(self, memory: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Compute this layer's keys and values for a cache."""
        return pad_memory(*self.keys_values(memory), mask)

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, weights: AttentionWeights
    ) -> Tensor:
        k, v = self.keys_values(memory)
        return self.attend(self.split_heads(self.q(x)), k, v, mask, weights)

    def step(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        return self.output(attend_memory(cache, self.split_heads(self.q(x)), layer))
