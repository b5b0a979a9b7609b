"""Computes the size of a model from its settings alone, and refuses one that cannot fit into memory.

Otherwise a typing mistake that asks for 10^12 weights, or 10^9 layers, would use up the memory only
after hours of preparing data. So weights are counted first, with Python's integers, which do not
overflow, and without torch. Only a model that can never fit is refused, so what activations or other
programs need is not counted.
"""

from dataclasses import asdict

from nmt.config import ModelConfig, VocabConfig
from nmt.model.moments import MOMENT_BYTES, WEIGHT_BYTES
from nmt.system.errors import UserError
from nmt.system.memory import MemoryLimit, find_memory_limit, format_memory

LAYER_BYTES = 10_000  # of the Python objects of a layer, at the very least


def count_weights(config: ModelConfig, vocab_sizes: tuple[int, int]) -> int:
    """Count the weights of a model, as `Transformer` makes them."""
    d = config.d_model
    keys, values = config.n_heads * config.key_size, config.n_heads * config.value_size
    attention = d * (2 * keys + values) + values * d
    if config.attention_bias:
        attention += 2 * keys + values + d
    feed_forward = d * config.d_ff + config.d_ff + config.d_ff * d + d
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    n = config.encoder_depth * encoder_layer + config.decoder_depth * decoder_layer
    src_rows, tgt_rows = (config.vocab_rows or size for size in vocab_sizes)
    n_rows = tgt_rows
    if not config.has_shared_embeddings:
        n_rows += src_rows
    if not config.has_shared_projection:
        n_rows += tgt_rows
    n += n_rows * d
    if config.projection_bias:
        n += tgt_rows
    if config.positions == "learned":
        n += 2 * config.max_positions * d
    if config.norm == "pre":
        n += 2 * norm
    if config.embedding_norm is not None:
        n += 2 * norm
    return n


def count_model_bytes(config: ModelConfig, vocab_sizes: tuple[int, int], weight_bytes: int) -> int:
    """Return the bytes of a model's tensors, with this number for each weight."""
    n_bytes = weight_bytes * count_weights(config, vocab_sizes)
    if config.positions in ("sinusoidal", "marian"):  # two tables that are not trained
        n_bytes += 2 * WEIGHT_BYTES * config.max_positions * config.d_model
    return n_bytes


def check_weights_fit(model: ModelConfig, vocab: VocabConfig) -> None:
    """Raise UserError if the model of a run could never be made in the memory of this process."""
    n_bytes = count_model_bytes(model, _bound_vocab_sizes(vocab), WEIGHT_BYTES)
    n_bytes += LAYER_BYTES * (model.encoder_depth + model.decoder_depth)
    _check_limit(model, "weights alone", n_bytes, find_memory_limit())


def check_moments_fit(
    model: ModelConfig, vocab: VocabConfig, has_average: bool, limit: MemoryLimit, n_ranks: int
) -> None:
    """Raise UserError if the weights of a run's model and a rank's share of Adam's moments, and of the
    moving average if it has one, exceed the limit.
    """
    shared_bytes = MOMENT_BYTES
    if has_average:
        shared_bytes += WEIGHT_BYTES
    weight_bytes = WEIGHT_BYTES + shared_bytes // n_ranks
    n_bytes = count_model_bytes(model, _bound_vocab_sizes(vocab), weight_bytes)
    _check_limit(model, "weights and Adam's moments", n_bytes, limit)


def _bound_vocab_sizes(vocab: VocabConfig) -> tuple[int, int]:
    """Return the sizes of the vocabulary, or the smallest where they are not known yet."""
    return vocab.sizes if vocab.model is None else (1, 1)


def _check_limit(model: ModelConfig, what: str, n_bytes: int, limit: MemoryLimit) -> None:
    if n_bytes <= limit.n_bytes:
        return
    sizes = {key: size for key, size in asdict(model).items() if type(size) is int}
    # Settings far beyond anything usual are named first.
    largest = sorted(sizes, key=lambda key: sizes[key], reverse=True)[:3]
    named = ", ".join(f"model.{key} ({sizes[key]:,})" for key in largest)
    raise UserError(
        f"model: its {what} would take {format_memory(n_bytes)}, and there are at most "
        f"{format_memory(limit.n_bytes)} ({limit.name}); lower what is too large, such as {named}"
    )
