"""A Transformer's layers as compiled functions, for searching on a CPU.

A step of a small model is some 30 small operations a layer, and torch takes longer to start them than
they take to compute. Here the layers are plain loops that numba compiles, so a step starts nothing.

Sentences are packed: the rows of one follow those of the one before. Keys and values are columns of one
row, called a cell, for each piece and layer; a list of cells says what a row attends to.

The first use on a machine compiles for some seconds. The result is kept beside torch's compiled code.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nmt.engines.cpu.compiled_code import make_compiler
from nmt.engines.cpu.compiled_products import (
    PRODUCT_FILES,
    Floats,
    Products,
    exp,
    multiply,
    pack_products,
)
from nmt.engines.cpu.compiled_tiles import LANES, add_weighted_rows, point_at
from nmt.engines.cpu.packed_linear import find_activation
from nmt.model.feed_forward import apply_activation
from nmt.model.positions import Positions
from nmt.model.transformer import DecoderLayer, EncoderLayer, Transformer

ACTIVATIONS = ("relu", "gelu", "swish")
NO_WINDOW = 1 << 30

LAYER_FILES = (__file__, *PRODUCT_FILES)
compile_layer = make_compiler(*LAYER_FILES)
Integers = np.ndarray[Any, np.dtype[np.int64]]
Layers = Sequence[EncoderLayer] | Sequence[DecoderLayer]


class Norms(NamedTuple):
    """A LayerNorm of each layer."""

    weight: Floats  # (n, d_model)
    bias: Floats  # (n, d_model)


class AttentionArrays(NamedTuple):
    inputs: Products  # queries, keys and values in one; of attention to the memory, queries alone
    output: Products
    norm: Norms


class FeedForwardArrays(NamedTuple):
    inner: Products
    outer: Products
    norm: Norms


class EncoderArrays(NamedTuple):
    attention: AttentionArrays
    feed_forward: FeedForwardArrays


class DecoderArrays(NamedTuple):
    attention: AttentionArrays
    memory_inputs: Products  # the memory's keys and values in one
    memory_attention: AttentionArrays
    feed_forward: FeedForwardArrays


class StackBoundaries(NamedTuple):
    """The parts before and after the layers of a stack."""

    embedding: Floats  # (pieces, d_model)
    positions: Floats  # (positions, d_model); rotary ones are as wide as a key
    embedding_norm: Norms  # used if the shape says so
    final_norm: Norms  # used with pre-norm


class LayerShape(NamedTuple):
    """The sizes and options that all layers of a model share."""

    n_heads: int
    key_size: int
    value_size: int
    is_post: bool
    activation: int  # an index of ACTIVATIONS
    epsilon: float
    window: int
    embedding_scale: float
    hidden_scale: float
    has_embedding_norm: bool
    is_rotary: bool


# ---- what numba compiles -------------------------------------------------------------------------


@compile_layer
def normalize(x: Floats, norm: Norms, layer: int, epsilon: float) -> Floats:
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
            y[row, i] = (x[row, i] - mean) * scale * norm.weight[layer, i] + norm.bias[layer, i]
    return y


@compile_layer
def normalize_before(x: Floats, norm: Norms, layer: int, shape: LayerShape) -> Floats:
    if shape.is_post:
        return x
    return normalize(x, norm, layer, shape.epsilon)


@compile_layer
def add_and_normalize(x: Floats, y: Floats, norm: Norms, layer: int, shape: LayerShape) -> Floats:
    """Add the first columns of `y`."""
    total = np.empty_like(x)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            total[row, i] = x[row, i] + y[row, i]
    if shape.is_post:
        return normalize(total, norm, layer, shape.epsilon)
    return total


@compile_layer
def embed(
    piece: int, position: int, boundaries: StackBoundaries, shape: LayerShape, x: Floats
) -> None:
    """Write the embedding of a piece into the row `x`."""
    scale = np.float32(shape.embedding_scale)
    for i in range(x.shape[0]):
        x[i] = boundaries.embedding[piece, i] * scale
    if not shape.is_rotary:
        for i in range(x.shape[0]):
            x[i] += boundaries.positions[position, i]


@compile_layer
def rotate_cells(qkv: Floats, row: int, position: int, table: Floats, shape: LayerShape) -> None:
    """Rotate a row's queries and keys by the angles of its position, if positions are rotary."""
    if not shape.is_rotary:
        return
    half = shape.key_size // 2
    for head in range(2 * shape.n_heads):
        first = head * shape.key_size
        for i in range(half):
            sine, cosine = table[position, i], table[position, half + i]
            a, b = qkv[row, first + i], qkv[row, first + half + i]
            qkv[row, first + i] = a * cosine - b * sine
            qkv[row, first + half + i] = b * cosine + a * sine


@compile_layer
def normalize_embeddings(x: Floats, boundaries: StackBoundaries, shape: LayerShape) -> Floats:
    if shape.has_embedding_norm:
        return normalize(x, boundaries.embedding_norm, 0, shape.epsilon)
    return x


@compile_layer
def normalize_at_the_end(x: Floats, boundaries: StackBoundaries, shape: LayerShape) -> Floats:
    if shape.is_post:
        return x
    return normalize(x, boundaries.final_norm, 0, shape.epsilon)


@compile_layer
def store_keys_values(
    columns: Floats, first_column: int, cells: Floats, first_cell: int, layer: int
) -> None:
    """Write keys and values, columns of a product, into the cells from `first_cell` on."""
    for row in range(columns.shape[0]):
        for i in range(cells.shape[2]):
            cells[first_cell + row, layer, i] = columns[row, first_column + i]


@compile_layer
def add_values(
    weights: Floats,
    cell_numbers: Integers,
    cells: Floats,
    layer: int,
    first_column: int,
    sums: Floats,
) -> None:
    """Set `sums` to the weighted sum of some columns of the cells of these numbers."""
    sums[:] = 0
    if len(cell_numbers) == 0:
        return
    n_columns = len(sums)
    n_in_vectors = n_columns - n_columns % LANES
    stride = cells.shape[1] * cells.shape[2]
    weight, cell_number, first = (
        point_at(weights, 0),
        point_at(cell_numbers, 0),
        layer * cells.shape[2],
    )
    for column in range(0, n_in_vectors, LANES):
        table = point_at(cells, first + first_column + column)
        add_weighted_rows(
            weight, cell_number, len(cell_numbers), table, stride, point_at(sums, column)
        )
    for column in range(n_in_vectors, n_columns):
        for number, cell in enumerate(cell_numbers):
            sums[column] += weights[number] * cells[cell, layer, first_column + column]


@compile_layer
def attend_to_cells(
    q: Floats,
    row: int,
    cells: Floats,
    layer: int,
    cell_numbers: Integers,
    shape: LayerShape,
    output: Floats,
) -> None:
    """Attend from one row of `q` to the cells of these numbers; write the same row of `output`."""
    key_size, value_size = shape.key_size, shape.value_size
    scale = np.float32(1.0 / math.sqrt(key_size))
    weights = np.empty(len(cell_numbers), np.float32)
    for head in range(shape.n_heads):
        first_key = head * key_size
        first = head * value_size
        last = first + value_size
        first_value_column = shape.n_heads * key_size + first
        top = np.float32(-np.inf)
        for number, cell in enumerate(cell_numbers):
            score = np.float32(0.0)
            for i in range(key_size):
                score += q[row, first_key + i] * cells[cell, layer, first_key + i]
            weights[number] = score * scale
            if not weights[number] <= top:  # NaN too
                top = weights[number]
        total = 0.0
        for number in range(len(cell_numbers)):
            weights[number] = exp(weights[number] - top)
            total += weights[number]
        for number in range(len(cell_numbers)):
            weights[number] = np.float32(weights[number] / total)
        add_values(weights, cell_numbers, cells, layer, first_value_column, output[row, first:last])


@compile_layer
def activate(x: Floats, activation: int) -> None:
    for row in range(x.shape[0]):
        if activation == 0:
            for i in range(x.shape[1]):
                x[row, i] = max(x[row, i], np.float32(0.0))
        elif activation == 1:
            for i in range(x.shape[1]):
                value = x[row, i]
                x[row, i] = np.float32(0.5) * value * np.float32(1 + math.erf(value / math.sqrt(2)))
        else:
            for i in range(x.shape[1]):
                value = x[row, i]
                x[row, i] = value / np.float32(1 + math.exp(-value))


@compile_layer
def feed_forward(x: Floats, weights: FeedForwardArrays, layer: int, shape: LayerShape) -> Floats:
    inner = multiply(normalize_before(x, weights.norm, layer, shape), weights.inner, layer)
    activate(inner, shape.activation)
    y = multiply(inner, weights.outer, layer)
    return add_and_normalize(x, y, weights.norm, layer, shape)


@compile_layer
def encode(
    pieces: Integers,
    starts: Integers,
    boundaries: StackBoundaries,
    layers: EncoderArrays,
    shape: LayerShape,
) -> Floats:
    """Compute the encoder's output for packed sentences, which begin at `starts`; the last start is the end
    of all.
    """
    attention = layers.attention
    n_keys = shape.n_heads * shape.key_size
    n_values = shape.n_heads * shape.value_size
    cells = np.empty((len(pieces), 1, n_keys + n_values), np.float32)
    every_cell = np.arange(len(pieces))
    heads = np.empty((len(pieces), n_values), np.float32)
    x = np.empty((len(pieces), boundaries.embedding.shape[1]), np.float32)
    for sentence in range(len(starts) - 1):
        for row in range(starts[sentence], starts[sentence + 1]):
            embed(pieces[row], row - starts[sentence], boundaries, shape, x[row])
    x = normalize_embeddings(x, boundaries, shape)

    for layer in range(attention.norm.weight.shape[0]):
        before = normalize_before(x, attention.norm, layer, shape)
        qkv = multiply(before, attention.inputs, layer)
        for sentence in range(len(starts) - 1):
            for row in range(starts[sentence], starts[sentence + 1]):
                rotate_cells(qkv, row, row - starts[sentence], boundaries.positions, shape)
        store_keys_values(qkv, n_keys, cells, 0, 0)
        for sentence in range(len(starts) - 1):
            start, end = starts[sentence], starts[sentence + 1]
            for row in range(start, end):
                first = max(start, row - shape.window)
                last = min(end, row + shape.window + 1)
                attend_to_cells(qkv, row, cells, 0, every_cell[first:last], shape, heads)
        y = multiply(heads, attention.output, layer)
        x = add_and_normalize(x, y, attention.norm, layer, shape)
        x = feed_forward(x, layers.feed_forward, layer, shape)
    return normalize_at_the_end(x, boundaries, shape)


@compile_layer
def project_memory(memory: Floats, layers: DecoderArrays, shape: LayerShape) -> Floats:
    """Compute each layer's keys and values of the memory: one cell for each of its rows."""
    n_layers = layers.memory_inputs.bias.shape[0]
    n_columns = shape.n_heads * (shape.key_size + shape.value_size)
    cells = np.empty((len(memory), n_layers, n_columns), np.float32)
    for layer in range(n_layers):
        store_keys_values(multiply(memory, layers.memory_inputs, layer), 0, cells, 0, layer)
    return cells


class DecodingCells(NamedTuple):
    """The cells that the rows of a step attend to."""

    own: Floats  # of earlier pieces and, from `first_new` on, of this step
    first_new: int
    own_numbers: Integers  # (rows, steps): the cells of each row's hypothesis
    memory_cells: Floats
    memory_numbers: Integers  # all of them
    memory_starts: Integers  # (rows,): where each row's sentence begins
    memory_ends: Integers  # (rows,)


@compile_layer
def step(
    x: Floats, cells: DecodingCells, positions: Floats, layers: DecoderArrays, shape: LayerShape
) -> Floats:
    """Apply the decoder's layers to the newest piece of each hypothesis."""
    attention, memory_attention = layers.attention, layers.memory_attention
    n_rows = x.shape[0]
    n_steps = cells.own_numbers.shape[1]
    first_step = max(0, n_steps - 1 - shape.window)
    heads = np.empty((n_rows, shape.n_heads * shape.value_size), np.float32)
    for layer in range(attention.norm.weight.shape[0]):
        qkv = multiply(normalize_before(x, attention.norm, layer, shape), attention.inputs, layer)
        for row in range(n_rows):
            rotate_cells(qkv, row, n_steps - 1, positions, shape)
        store_keys_values(qkv, shape.n_heads * shape.key_size, cells.own, cells.first_new, layer)
        for row in range(n_rows):
            attend_to_cells(
                qkv, row, cells.own, layer, cells.own_numbers[row, first_step:], shape, heads
            )
        y = multiply(heads, attention.output, layer)
        x = add_and_normalize(x, y, attention.norm, layer, shape)

        before = normalize_before(x, memory_attention.norm, layer, shape)
        q = multiply(before, memory_attention.inputs, layer)
        for row in range(n_rows):
            memory_numbers = cells.memory_numbers[cells.memory_starts[row] : cells.memory_ends[row]]
            attend_to_cells(q, row, cells.memory_cells, layer, memory_numbers, shape, heads)
        y = multiply(heads, memory_attention.output, layer)
        x = add_and_normalize(x, y, memory_attention.norm, layer, shape)

        x = feed_forward(x, layers.feed_forward, layer, shape)
    return x


# ---- the model's weights -------------------------------------------------------------------------


class CompiledWeights:
    """The weights of a model, laid out for the functions above; matrices in bf16 if asked for.

    The model's own linear layers read them too from then on, so there is one copy.
    """

    def __init__(self, model: Transformer, is_bf16: bool) -> None:
        self.model, self.is_bf16 = model, is_bf16
        memory_attentions = [layer.memory_attention for layer in model.decoder]
        self.encoder = EncoderArrays(
            self._pack_self_attention(model.encoder), self._pack_feed_forward(model.encoder)
        )
        self.decoder = DecoderArrays(
            attention=self._pack_self_attention(model.decoder),
            memory_inputs=self._pack(memory_attentions, "kv"),
            memory_attention=AttentionArrays(
                inputs=self._pack(memory_attentions, "q"),
                output=self._pack(memory_attentions, "output"),
                norm=copy_norms([layer.memory_residual.norm for layer in model.decoder]),
            ),
            feed_forward=self._pack_feed_forward(model.decoder),
        )
        self.projection = self._pack([model], "projection")
        config = model.config
        self.shape = LayerShape(
            n_heads=config.n_heads,
            key_size=config.key_size,
            value_size=config.value_size,
            is_post=config.norm == "post",
            activation=ACTIVATIONS.index(config.activation),
            epsilon=model.decoder[0].attention_residual.norm.eps,
            window=NO_WINDOW if config.window is None else config.window,
            embedding_scale=model.embedding_scale,
            hidden_scale=model.hidden_scale,
            has_embedding_norm=config.embedding_norm is not None,
            is_rotary=config.positions == "rotary",
        )

    def describe_source(self, longest: int) -> StackBoundaries:
        """Describe what is around the encoder, for sentences of at most `longest` pieces."""
        model = self.model
        norms = model.src_embedding_norm, model.encoder_norm
        return describe_boundaries(model.src_embedding, model.src_positions, longest, *norms)

    def describe_target(self, longest: int) -> StackBoundaries:
        """Describe what is around the decoder, for sentences of at most `longest` pieces."""
        model = self.model
        norms = model.tgt_embedding_norm, model.decoder_norm
        return describe_boundaries(model.tgt_embedding, model.tgt_positions, longest, *norms)

    def _pack(self, modules: Sequence[nn.Module], name: str) -> Products:
        """Pack the linear layer `name` of each module, and replace it by one that reads what is packed."""
        linears: list[nn.Linear] = [getattr(module, name) for module in modules]
        weights = [linear.weight.detach() for linear in linears]
        biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
        products = pack_products(weights, biases, self.is_bf16)
        for number, (module, linear) in enumerate(zip(modules, linears, strict=True)):
            setattr(module, name, ProductLinear(linear, products, number))
        return products

    def _pack_self_attention(self, layers: Layers) -> AttentionArrays:
        attentions = [layer.attention for layer in layers]
        return AttentionArrays(
            inputs=self._pack(attentions, "qkv"),
            output=self._pack(attentions, "output"),
            norm=copy_norms([layer.attention_residual.norm for layer in layers]),
        )

    def _pack_feed_forward(self, layers: Layers) -> FeedForwardArrays:
        networks = [layer.feed_forward for layer in layers]
        return FeedForwardArrays(
            inner=self._pack(networks, "inner"),
            outer=self._pack(networks, "outer"),
            norm=copy_norms([layer.feed_forward_residual.norm for layer in layers]),
        )


class ProductLinear(nn.Module):
    """A linear layer of the model for what is not compiled: attention weights, and scores of given pairs."""

    def __init__(self, linear: nn.Linear, products: Products, number: int) -> None:
        super().__init__()
        self.products, self.number = products, number
        self.n_outputs, self.activation = linear.out_features, find_activation(linear)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        y = torch.from_numpy(multiply(rows, self.products, self.number)[:, : self.n_outputs])
        return apply_activation(y, self.activation).view(*x.shape[:-1], self.n_outputs)


def describe_boundaries(
    embedding: nn.Embedding,
    positions: Positions,
    longest: int,
    embedding_norm: nn.Module,
    final_norm: nn.Module,
) -> StackBoundaries:
    table = positions.table
    if longest > len(table):
        table = positions.make_longer_table(longest)
    return StackBoundaries(
        embedding.weight.detach().numpy(),
        table.detach().numpy(),
        copy_norms([embedding_norm]),
        copy_norms([final_norm]),
    )


def copy_norms(norms: Sequence[nn.Module]) -> Norms:
    """Copy the weights of one LayerNorm of each layer; for a model without it, nothing."""
    layer_norms = [norm for norm in norms if isinstance(norm, nn.LayerNorm)]
    if not layer_norms:
        return Norms(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))
    weights = torch.stack([norm.weight.detach() for norm in layer_norms])
    biases = torch.stack([norm.bias.detach() for norm in layer_norms])
    return Norms(weights.numpy(), biases.numpy())
