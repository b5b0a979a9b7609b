"""A Transformer of torch's own modules with the weights of one of ours: what ours is held against.

It has no dropout; LayerNorm's epsilon is torch's on both sides.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nmt.system.strict_json import Fields


def make_torch_twin(model: Any) -> tuple[nn.Module, nn.Module]:
    """torch.nn's encoder and decoder with the model's weights."""
    c, is_pre = model.config, model.config.norm == "pre"
    functions: Fields = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}
    activation = functions[c.activation]
    encoder_layer = nn.TransformerEncoderLayer(
        c.d_model, c.n_heads, c.d_ff, 0.0, activation, batch_first=True, norm_first=is_pre
    )
    decoder_layer = nn.TransformerDecoderLayer(
        c.d_model, c.n_heads, c.d_ff, 0.0, activation, batch_first=True, norm_first=is_pre
    )
    encoder_norm, decoder_norm = (nn.LayerNorm(c.d_model) if is_pre else None for _ in range(2))
    encoder = nn.TransformerEncoder(
        encoder_layer, c.encoder_depth, encoder_norm, enable_nested_tensor=False
    ).double()
    decoder = nn.TransformerDecoder(decoder_layer, c.decoder_depth, decoder_norm).double()

    def copy_attention(
        theirs: nn.MultiheadAttention, inputs: list[nn.Linear], output: nn.Linear
    ) -> None:
        theirs.in_proj_weight.data.copy_(torch.cat([linear.weight for linear in inputs]))
        theirs.out_proj.weight.data.copy_(output.weight)
        theirs.in_proj_bias.data.zero_()
        theirs.out_proj.bias.data.zero_()
        if c.attention_bias:
            theirs.in_proj_bias.data.copy_(torch.cat([linear.bias for linear in inputs]))
            theirs.out_proj.bias.data.copy_(output.bias)

    layers: list[Any] = [*encoder.layers, *decoder.layers]
    for ours, theirs in zip([*model.encoder, *model.decoder], layers, strict=True):
        copy_attention(theirs.self_attn, [ours.attention.qkv], ours.attention.output)
        theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())
        norms = [ours.attention_residual.norm, ours.feed_forward_residual.norm]
        if hasattr(theirs, "multihead_attn"):
            memory = ours.memory_attention
            copy_attention(theirs.multihead_attn, [memory.q, memory.kv], memory.output)
            norms.insert(1, ours.memory_residual.norm)
        for i, norm in enumerate(norms, 1):
            getattr(theirs, f"norm{i}").load_state_dict(norm.state_dict())
    for theirs, ours in ((encoder_norm, model.encoder_norm), (decoder_norm, model.decoder_norm)):
        if theirs is not None:
            theirs.load_state_dict(ours.state_dict())
    return encoder.eval(), decoder.eval()
