"""The layers of a small model as compiled functions, for one sentence and for steps of few hypotheses.

A step for one sentence is some 30 small operations a layer, and torch takes longer to start them than
they take to compute. Here numba compiles a whole layer, which works on the matrices and the cache of the
model, in fp32, on one core. With more hypotheses or larger matrices the products are what takes time, and
torch's are faster; `cpu_linear.py` decides.

The first use on a machine compiles for some seconds. The result is kept beside torch's compiled code.
"""

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor, nn

from nmt.model.attention import MASKED_SCORE
from nmt.model.cache import Cache
from nmt.model.transformer import DecoderLayer, EncoderLayer, Residual, Transformer

ACTIVATIONS = ("relu", "gelu", "swish")
BLOCK = 4  # inputs multiplied at once
# Kept code names the types of this file, so each version of the file keeps its own.
numba_config: Any = numba.config
if numba_config.CACHE_DIR:
    file_digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    numba_config.CACHE_DIR = str(Path(numba_config.CACHE_DIR) / file_digest[:16])
# Sums may be reordered, but NaN stays NaN: the search must notice it.
compile_function = numba.njit(
    fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, cache=True
)

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Product(NamedTuple):
    """A linear layer: x @ matrix + bias."""

    matrix: Floats  # (inputs, outputs)
    bias: Floats  # (outputs,)


class Norm(NamedTuple):
    weight: Floats
    bias: Floats


class AttentionArrays(NamedTuple):
    inputs: Product  # queries, keys and values in one; of attention to the memory, queries alone
    output: Product
    norm: Norm


class FeedForwardArrays(NamedTuple):
    inner: Product
    outer: Product
    norm: Norm


class EncoderArrays(NamedTuple):
    attention: AttentionArrays
    feed_forward: FeedForwardArrays


class DecoderArrays(NamedTuple):
    attention: AttentionArrays
    memory_attention: AttentionArrays
    feed_forward: FeedForwardArrays


class Shape(NamedTuple):
    """What all layers of a model share."""

    n_heads: int
    key_size: int
    is_post: bool
    activation: int  # an index of ACTIVATIONS
    epsilon: float


class Past(NamedTuple):
    """Keys and values that a layer attends to, of which a mask hides some."""

    keys: Floats  # (S * H, L, K)
    values: Floats  # (S * H, L, V)
    mask: Floats  # (S, 1, B or 1, L): 0 where a place is visible
    first: int  # place that may be visible
    last: int


# ---- what numba compiles -------------------------------------------------------------------------


@compile_function
def multiply(x: Floats, product: Product) -> Floats:
    matrix, bias = product.matrix, product.bias
    n, n_outputs = x.shape[0], matrix.shape[1]
    y = np.empty((n, n_outputs), np.float32)
    for row in range(n):
        y[row] = bias
    n_inputs = x.shape[1]
    whole = n_inputs // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        for row in range(n):
            a, b, c, d = x[row, i], x[row, i + 1], x[row, i + 2], x[row, i + 3]
            for j in range(n_outputs):
                y[row, j] += (
                    a * matrix[i, j]
                    + b * matrix[i + 1, j]
                    + c * matrix[i + 2, j]
                    + d * matrix[i + 3, j]
                )
    for i in range(whole, n_inputs):
        for row in range(n):
            for j in range(n_outputs):
                y[row, j] += x[row, i] * matrix[i, j]
    return y


@compile_function
def normalize(x: Floats, norm: Norm, epsilon: float) -> Floats:
    y = np.empty_like(x)
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = 0.0  # fp64, so that a score differs from torch's by torch's own rounding alone
        for i in range(size):
            total += x[row, i]
        mean = np.float32(total / size)
        square = 0.0
        for i in range(size):
            square += (x[row, i] - mean) ** 2
        scale = np.float32(1.0 / math.sqrt(square / size + epsilon))
        for i in range(size):
            y[row, i] = (x[row, i] - mean) * scale * norm.weight[i] + norm.bias[i]
    return y


@compile_function
def attend_rows(q: Floats, past: Past, n_heads: int) -> Floats:
    """(S * B, H * K) -> (S * B, H * V); further columns of `q` are not read."""
    keys, values, mask = past.keys, past.values, past.mask
    n_sentences, n_masks = mask.shape[0], mask.shape[2]
    beam = q.shape[0] // n_sentences
    k_size, v_size = keys.shape[2], values.shape[2]
    scale = np.float32(1.0 / math.sqrt(k_size))
    output = np.zeros((q.shape[0], n_heads * v_size), np.float32)
    weights = np.empty(keys.shape[1], np.float32)
    for row in range(q.shape[0]):
        sentence = row // beam
        own_mask = min(row % beam, n_masks - 1)
        for head in range(n_heads):
            cells = sentence * n_heads + head
            q_first = head * k_size
            v_first = head * v_size
            top = np.float32(MASKED_SCORE)
            for place in range(past.first, past.last):
                if mask[sentence, 0, own_mask, place] != 0:
                    continue
                score = np.float32(0.0)
                for i in range(k_size):
                    score += q[row, q_first + i] * keys[cells, place, i]
                weights[place] = score * scale
                if not weights[place] <= top:  # NaN too
                    top = weights[place]
            total = 0.0
            for place in range(past.first, past.last):
                if mask[sentence, 0, own_mask, place] != 0:
                    continue
                weight = np.float32(math.exp(weights[place] - top))
                total += float(weight)
                for i in range(v_size):
                    output[row, v_first + i] += weight * values[cells, place, i]
            if total != 0:
                for i in range(v_size):
                    output[row, v_first + i] /= np.float32(total)
    return output


@compile_function
def activate(x: Floats, activation: int) -> None:
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            value = x[row, i]
            if activation == 0:
                x[row, i] = max(value, np.float32(0.0))
            elif activation == 1:
                x[row, i] = np.float32(0.5) * value * np.float32(1 + math.erf(value / math.sqrt(2)))
            else:
                x[row, i] = value / np.float32(1 + math.exp(-value))


@compile_function
def write_to_cache(
    columns: Floats, first_column: int, cells: Floats, first_place: int, n_heads: int
) -> None:
    """Write the keys or values of this step, columns of a product, into those of all steps."""
    size = cells.shape[2]
    beam = columns.shape[0] * n_heads // cells.shape[0]
    for row in range(columns.shape[0]):
        for head in range(n_heads):
            cell, place = row // beam * n_heads + head, first_place + row % beam
            column = first_column + head * size
            for i in range(size):
                cells[cell, place, i] = columns[row, column + i]


@compile_function
def normalize_before(x: Floats, norm: Norm, shape: Shape) -> Floats:
    return x if shape.is_post else normalize(x, norm, shape.epsilon)


@compile_function
def add_and_normalize(x: Floats, y: Floats, norm: Norm, shape: Shape) -> Floats:
    total = x + y
    return normalize(total, norm, shape.epsilon) if shape.is_post else total


@compile_function
def attend_to_self(
    x: Floats, weights: AttentionArrays, past: Past, here: int, shape: Shape
) -> Floats:
    """Write the keys and values of `x` to the places from `here` on, and attend."""
    heads = shape.n_heads
    qkv = multiply(normalize_before(x, weights.norm, shape), weights.inputs)
    write_to_cache(qkv, heads * shape.key_size, past.keys, here, heads)
    write_to_cache(qkv, 2 * heads * shape.key_size, past.values, here, heads)
    y = multiply(attend_rows(qkv, past, heads), weights.output)
    return add_and_normalize(x, y, weights.norm, shape)


@compile_function
def attend_to_memory(x: Floats, weights: AttentionArrays, memory: Past, shape: Shape) -> Floats:
    q = multiply(normalize_before(x, weights.norm, shape), weights.inputs)
    y = multiply(attend_rows(q, memory, shape.n_heads), weights.output)
    return add_and_normalize(x, y, weights.norm, shape)


@compile_function
def feed_forward(x: Floats, weights: FeedForwardArrays, shape: Shape) -> Floats:
    inner = multiply(normalize_before(x, weights.norm, shape), weights.inner)
    activate(inner, shape.activation)
    return add_and_normalize(x, multiply(inner, weights.outer), weights.norm, shape)


@compile_function
def apply_encoder_layer(x: Floats, layer: EncoderArrays, mask: Floats, shape: Shape) -> Floats:
    """Apply one layer of the encoder to a sentence, (L, d_model), with a mask (1, 1, 1 or L, L)."""
    length, heads = x.shape[0], shape.n_heads
    value_size = layer.attention.output.matrix.shape[0] // heads
    keys = np.empty((heads, length, shape.key_size), np.float32)
    values = np.empty((heads, length, value_size), np.float32)
    own = Past(keys, values, mask, 0, length)
    x = attend_to_self(x, layer.attention, own, 0, shape)
    return feed_forward(x, layer.feed_forward, shape)


@compile_function
def apply_decoder_layer(
    x: Floats, layer: DecoderArrays, past: Past, memory: Past, here: int, shape: Shape
) -> Floats:
    """Apply one layer of the decoder to the newest position of each hypothesis, (S * B, d_model)."""
    x = attend_to_self(x, layer.attention, past, here, shape)
    x = attend_to_memory(x, layer.memory_attention, memory, shape)
    return feed_forward(x, layer.feed_forward, shape)


# ---- the model and its cache ---------------------------------------------------------------------


def copy_product(linear: nn.Linear) -> Product:
    matrix = linear.weight.detach().numpy().T.copy()
    bias = np.zeros(matrix.shape[1], np.float32)
    if linear.bias is not None:
        bias[:] = linear.bias.detach().numpy()
    return Product(matrix, bias)


def copy_norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy())


def copy_attention(inputs: nn.Linear, output: nn.Linear, residual: Residual) -> AttentionArrays:
    return AttentionArrays(copy_product(inputs), copy_product(output), copy_norm(residual.norm))


def copy_feed_forward(layer: EncoderLayer | DecoderLayer) -> FeedForwardArrays:
    weights = layer.feed_forward
    norm = copy_norm(layer.feed_forward_residual.norm)
    return FeedForwardArrays(copy_product(weights.inner), copy_product(weights.outer), norm)


def copy_self_attention(layer: EncoderLayer | DecoderLayer) -> AttentionArrays:
    weights = layer.attention
    return copy_attention(weights.qkv, weights.output, layer.attention_residual)


def copy_decoder_layer(layer: DecoderLayer) -> DecoderArrays:
    weights = layer.memory_attention
    memory = copy_attention(weights.q, weights.output, layer.memory_residual)
    return DecoderArrays(copy_self_attention(layer), memory, copy_feed_forward(layer))


def copy_encoder_layer(layer: EncoderLayer) -> EncoderArrays:
    return EncoderArrays(copy_self_attention(layer), copy_feed_forward(layer))


class CompiledLayers:
    """The layers of a model, in fp32."""

    def __init__(self, model: Transformer) -> None:
        config = model.config
        self.encoder = [copy_encoder_layer(layer) for layer in model.encoder]
        self.decoder = [copy_decoder_layer(layer) for layer in model.decoder]
        self.window = config.window
        self.shape = Shape(
            n_heads=config.n_heads,
            key_size=config.key_size,
            is_post=config.norm == "post",
            activation=ACTIVATIONS.index(config.activation),
            epsilon=model.decoder[0].attention_residual.norm.eps,
        )

    def encode(self, x: Tensor) -> Tensor:
        """Apply the encoder's layers to the embeddings of one sentence, (L, d_model)."""
        length = len(x)
        mask = np.zeros((1, 1, 1, length), np.float32)
        if self.window is not None:
            places = np.arange(length)
            is_far = abs(places[:, None] - places) > self.window
            mask = is_far[None, None].astype(np.float32)
        y = x.numpy()
        for layer in self.encoder:
            y = apply_encoder_layer(y, layer, mask, self.shape)
        return torch.from_numpy(y)

    def step(self, x: Tensor, cache: Cache) -> Tensor:
        """Apply the decoder's layers to this step's embeddings, (S * B, d_model)."""
        last = cache.length * cache.beam
        first = 0
        if self.window is not None:
            first = max(0, last - (self.window + 1) * cache.beam)
        mask, memory_mask = cache.mask.numpy(), cache.memory_mask.numpy()
        n_source = memory_mask.shape[3]
        y = x.numpy()
        for number, layer in enumerate(self.decoder):
            past = Past(cache.keys[number].numpy(), cache.values[number].numpy(), mask, first, last)
            memory = Past(
                cache.memory_keys[number].numpy(),
                cache.memory_values[number].numpy(),
                memory_mask,
                0,
                n_source,
            )
            y = apply_decoder_layer(y, layer, past, memory, last - cache.beam, self.shape)
        return torch.from_numpy(y)
