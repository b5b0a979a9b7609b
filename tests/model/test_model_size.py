"""Weights are counted without making them, and what no memory can hold is refused."""

from dataclasses import replace

from pytest import mark, raises

from nmt.config import ModelConfig, RunConfig
from nmt.config_files import load_config
from nmt.model.size import check_moments_fit, check_weights_fit, count_model_bytes, count_weights
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.memory import MemoryLimit

SMALL = ModelConfig(d_model=8, d_ff=12, n_heads=2, n_layers=3)


@mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, tied=False, norm="pre"),
        replace(SMALL, tied="decoder", encoder_layers=5, decoder_layers=1),
        replace(SMALL, embedding_norm="after_dropout", scale_embeddings="projection"),
        replace(SMALL, tied="embeddings"),
        replace(SMALL, d_k=3, d_v=5, attention_bias=True, projection_bias=True),
        replace(SMALL, positions="learned", max_positions=30, vocab_rows=50),
    ],
)
def test_the_count_is_that_of_the_model(config: ModelConfig) -> None:
    model = Transformer(config, 40)
    assert count_weights(config, model.sizes) == sum(
        weight.numel() for weight in model.parameters()
    )
    n_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert count_model_bytes(config, model.sizes, 4) == n_bytes


@mark.parametrize(
    "sizes",
    [
        ["model.d_model=1000000000"],
        [f"model.d_model={2**40}"],
        [f"model.d_model={2**62}"],
        [f"model.d_ff={2**62}"],
        ["model.n_layers=1000000000000"],
        ["model.encoder_layers=1000000000000"],
        [f"model.n_heads={2**61}", "model.d_k=1", "model.d_v=1"],
        [f"model.d_k={2**61}", "model.d_v=1"],
        [f"model.d_v={2**61}", "model.d_k=1"],
        [f"model.max_positions={2**60}"],
        [f"model.max_positions={2**60}", "model.positions=learned"],
        [f"model.vocab_rows={2**62}"],
    ],
)
def test_what_no_memory_can_hold_is_refused_at_once(sizes: list[str]) -> None:
    config = load_config("base.yaml", sizes)
    with raises(UserError, match=r"model: its weights alone would take .+ GiB, and") as caught:
        check_weights_fit(config.model, config.vocab)
    key, _, value = sizes[0].partition("=")
    assert f"{key} ({int(value):,})" in str(caught.value) and len(str(caught.value)) < 400


@mark.parametrize(
    "name, is_averaged",
    [("base.yaml", False), ("base.yaml", True), ("big.yaml", False), ("demo.yaml", False)],
)
def test_a_model_that_fits_is_not_refused(name: str, is_averaged: bool) -> None:
    """A moving average takes as much as the weights."""
    config = load_config(name)
    check_weights_fit(config.model, config.vocab)
    n_bytes = count_model_bytes(config.model, config.vocab.sizes, 16 if is_averaged else 12)
    given = config.model, config.vocab, is_averaged
    check_moments_fit(*given, MemoryLimit(n_bytes, "a limit"), 1)
    with raises(UserError, match="weights and Adam's moments would take .+ \\(a limit\\)"):
        check_moments_fit(*given, MemoryLimit(n_bytes - 1, "a limit"), 1)


def test_a_given_vocabulary_is_not_counted() -> None:
    config = RunConfig()
    given = replace(config, vocab=replace(config.vocab, model="x.model"))
    limit = MemoryLimit(count_model_bytes(config.model, (1, 1), 12), "a limit")
    check_moments_fit(given.model, given.vocab, False, limit, 1)
