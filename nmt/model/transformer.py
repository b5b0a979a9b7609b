"""The Transformer of section 3 of "Attention Is All You Need", with the paper's names, for packed
sentences.

By default it is post-norm with ReLU; feed-forward layers have biases, attention has none; dropout
is applied to each sub-layer's output and to embedding + position, and nowhere else; both embeddings
and the projection share one matrix. Options (`ModelConfig`) cover every row of Table 3, the
authors' code of June 2017, which has biases in attention and more rows than pieces, and what the
paper's retellings do otherwise (docs/recipe.md). The model knows nothing about compilation, ranks,
checkpoints or devices; its callers handle those.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig
from nmt.data.batch import Packed
from nmt.model.attention_mask import AttentionMask
from nmt.model.backend import BackendModule
from nmt.model.cache import Cache
from nmt.model.dropout import Dropout
from nmt.model.feed_forward import FeedForward
from nmt.model.multi_head_attention import AttentionWeights, MemoryAttention, SelfAttention
from nmt.model.positions import Positions
from nmt.system.autocast import find_product_type


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in fp32 and returns the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        # A GPU's autocast returns fp32, which would double each layer's memory traffic.
        return super().forward(x).to(x.dtype)


class Residual(nn.Module):
    """The residual connection around a sub-layer f.

    Post-norm, as in section 3.1: LayerNorm(x + Dropout(f(x))). Pre-norm: x + Dropout(f(LayerNorm(x))).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_post = config.norm == "post"
        self.norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.is_post:
            return self.norm(x + self.dropout(sublayer(x)))
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention, self.attention_residual = SelfAttention(config), Residual(config)
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        weights: AttentionWeights,
        rotation: Tensor | None = None,
    ) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention(y, mask, weights, rotation))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention, self.attention_residual = SelfAttention(config), Residual(config)
        self.memory_attention, self.memory_residual = MemoryAttention(config), Residual(config)
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        self_mask: AttentionMask,
        memory_mask: AttentionMask,
        weights: AttentionWeights,
        self_weights: AttentionWeights,
        rotation: Tensor | None,
    ) -> Tensor:
        x = self.attention_residual(
            x, lambda y: self.attention(y, self_mask, self_weights, rotation)
        )
        x = self.memory_residual(
            x, lambda y: self.memory_attention(y, memory, memory_mask, weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)

    def step(self, x: Tensor, cache: Cache, layer: int, rotation: Tensor | None) -> Tensor:
        x = self.attention_residual(x, lambda y: self.attention.step(y, cache, layer, rotation))
        x = self.memory_residual(x, lambda y: self.memory_attention.step(y, cache, layer))
        return self.feed_forward_residual(x, self.feed_forward)


class Transformer(BackendModule):
    encoder: list[EncoderLayer]  # an nn.ModuleList, which mypy cannot see into
    decoder: list[DecoderLayer]

    def __init__(self, config: ModelConfig, vocab_size: int, tgt_size: int | None = None) -> None:
        """`tgt_size`: the size of the target's vocabulary, if it has its own."""
        super().__init__()
        self.sizes = vocab_size, tgt_size or vocab_size
        n_src_rows, n_rows = map(config.count_rows, self.sizes)
        self.config, self.n_pieces, self.n_vocab = config, self.sizes[1], n_rows
        self.writes_unknown = True  # a Translator forbids it if the vocabulary spells in bytes

        # embeddings and projection (section 3.4), positions (section 3.5)
        self.tgt_embedding = nn.Embedding(n_rows, config.d_model)
        self.src_embedding = self.tgt_embedding
        if not config.has_shared_embeddings:
            self.src_embedding = nn.Embedding(n_src_rows, config.d_model)
        self.projection = nn.Linear(config.d_model, n_rows, config.projection_bias)
        if config.has_shared_projection:
            self.projection.weight = self.tgt_embedding.weight
        self.src_positions, self.tgt_positions = Positions(config), Positions(config)
        self.dropout = Dropout(config.dropout)
        # of embeddings, or of logits, applied to the hidden states that they are made of
        self.embedding_scale = self.hidden_scale = 1.0
        if config.scale_embeddings == "embedding":
            self.embedding_scale = math.sqrt(config.d_model)
        elif config.scale_embeddings == "projection":
            self.hidden_scale = config.d_model**-0.5

        def make_norm(is_wanted: bool) -> nn.Module:
            return LayerNorm(config.d_model) if is_wanted else nn.Identity()

        has_norm = config.embedding_norm is not None
        self.src_embedding_norm, self.tgt_embedding_norm = make_norm(has_norm), make_norm(has_norm)

        # stacks of layers (section 3.1)
        encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_depth))
        decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_depth))
        self.encoder, self.decoder = cast(Any, encoder), cast(Any, decoder)
        # Pre-norm layers leave their residual stream unnormalised, so each stack needs a final
        # LayerNorm.
        is_pre = config.norm == "pre"
        self.encoder_norm, self.decoder_norm = make_norm(is_pre), make_norm(is_pre)
        self.reset()

    def reset(self) -> None:
        """Draw the initial weights, which the paper does not specify, as the authors' code did in
        June 2017.

        Embeddings are drawn from N(0, 1/d_model). Linear layers are Xavier-uniform; a fused matrix
        counts as one matrix. Biases are zero.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.projection:
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        drawn: list[Tensor] = [
            self.src_embedding.weight,
            self.tgt_embedding.weight,
            self.projection.weight,
        ]
        for positions in (self.src_positions, self.tgt_positions):
            if positions.is_learned:
                drawn.append(positions.table)
        # A tied matrix is drawn once: a second draw would change all that follow.
        for weight in dict.fromkeys(drawn):
            nn.init.normal_(weight, std=self.config.d_model**-0.5)

    def reserve_positions(self, longest: int) -> None:
        """Make the position tables long enough for sentences of `longest` pieces."""
        self.src_positions.reserve(longest)
        self.tgt_positions.reserve(longest)

    def embed(
        self, embedding: nn.Embedding, positions: Positions, norm: nn.Module, packed: Packed
    ) -> Tensor:
        x = self.backend.look_up(embedding.weight, packed.tokens) * self.embedding_scale
        x = positions(x, packed.positions, packed.longest)
        x = x.to(find_product_type(x))
        if self.config.embedding_norm == "before_dropout":
            return self.dropout(norm(x))
        return norm(self.dropout(x))

    def finish_decoder(self, x: Tensor) -> Tensor:
        """Turn the output of the last layer into what `projection` computes logits from."""
        x = self.decoder_norm(x)
        return x if self.hidden_scale == 1.0 else x * self.hidden_scale

    def encode(self, src: Packed, weights: AttentionWeights = None) -> Tensor:
        """Compute the encoder's output, called the memory: (Ts,) pieces -> (Ts, d_model).

        For each layer, the weights of its self-attention, (S, H, Ls, Ls), are appended to `weights`.
        """
        x = self.embed(self.src_embedding, self.src_positions, self.src_embedding_norm, src)
        is_single_group = weights is not None
        mask = self.backend.make_mask(src, src, False, self.config.window, is_single_group)
        rotation = self.src_positions.find_rotation(src.positions, src.longest)
        for layer in self.encoder:
            x = layer(x, mask, weights, rotation)
        return self.encoder_norm(x)

    def decode(
        self,
        tgt: Packed,
        memory: Tensor,
        src: Packed,
        weights: AttentionWeights = None,
        self_weights: AttentionWeights = None,
    ) -> Tensor:
        """Compute the decoder's hidden states, from which `projection` computes logits: (Tt,)
        pieces -> (Tt, d_model).

        For each layer, the weights of its attention to the memory, (S, H, Lt, Ls), are appended to
        `weights`, and those of its self-attention, (S, H, Lt, Lt), to `self_weights`.
        """
        x = self.embed(self.tgt_embedding, self.tgt_positions, self.tgt_embedding_norm, tgt)
        is_single_group = self_weights is not None
        self_mask = self.backend.make_mask(tgt, tgt, True, self.config.window, is_single_group)
        memory_mask = self.backend.make_mask(tgt, src, is_single_group=weights is not None)
        rotation = self.tgt_positions.find_rotation(tgt.positions, tgt.longest)
        for layer in self.decoder:
            x = layer(x, memory, self_mask, memory_mask, weights, self_weights, rotation)
        return self.finish_decoder(x)

    def forward(self, src: Packed, tgt: Packed) -> Tensor:
        return self.decode(tgt, self.encode(src), src)

    def make_cache(self, src: Packed, beam: int) -> Cache:
        """Encode the source, and return a cache that has not taken a step yet, for `beam`
        hypotheses per sentence.
        """
        memory = self.encode(src)  # (Ts, d_model)
        mask = self.backend.make_mask(src, src, is_single_group=True)
        memory_mask = mask.groups[0].bias
        config = self.config
        n, n_rows = src.n_sentences, src.n_sentences * config.n_heads
        # The memory does not change from step to step, so each layer projects it once.
        projected = [layer.memory_attention.project_memory(memory, mask) for layer in self.decoder]
        return Cache(
            beam=beam,
            n_heads=config.n_heads,
            memory_keys=[keys for keys, _ in projected],
            memory_values=[values for _, values in projected],
            memory_mask=memory_mask,
            keys=[memory.new_empty(n_rows, 0, config.key_size) for _ in projected],
            values=[memory.new_empty(n_rows, 0, config.value_size) for _ in projected],
            mask=memory_mask.new_empty(n, 1, beam, 0),
            small_product=self.backend.small_product,
        )

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Advance by one piece; return hidden states, from which `projection` computes logits: (S *
        B,) -> (S * B, d_model).
        """
        cache.advance()
        x = self.tgt_embedding(tokens) * self.embedding_scale
        positions = torch.full_like(tokens, cache.length - 1)
        x = self.tgt_embedding_norm(self.tgt_positions(x, positions, cache.length))
        rotation = self.tgt_positions.find_rotation(positions, cache.length)
        for index, layer in enumerate(self.decoder):
            x = layer.step(x, cache, index, rotation)
        return self.finish_decoder(x)
