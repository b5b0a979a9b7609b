"""Dropout: rate, scale, independence, that the seed governs it, and that numba changes no mask."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt.engines.cpu.backend import CpuBackend
from nmt.engines.cpu.compiled_dropout import fill_compiled, load_loop
from nmt.model.dropout import Dropout
from nmt.model.dropout_masks import BITS, fill_by_arrays
from nmt.system.progress import say_once
from nmt.train.update import dropout_seed


def test_neighbours_rows_and_calls_are_independent() -> None:
    torch.manual_seed(2)
    layer, x = Dropout(0.5), torch.ones(1024, 1024)
    a, b = (layer(x) != 0).float() - 0.5, (layer(x) != 0).float() - 0.5
    limit = 4 * 0.25 / 1024  # four standard errors of the mean of a million products of +-1/2
    pairs = [(a, b), (a[1:], a[:-1])] + [(a[:, lag:], a[:, :-lag]) for lag in (1, 2, 3, 4, 8)]
    assert all((p * q).mean().abs() < limit for p, q in pairs)


def test_the_seed_decides_and_the_gradient_passes_the_same_mask() -> None:
    layer, x = Dropout(0.3), torch.randn(37, 5, requires_grad=True)
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    assert torch.equal(y, layer(x))
    assert not torch.equal(y, layer(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad * x, y)


def test_silent_in_evaluation_and_at_rate_zero() -> None:
    x = torch.randn(4, 4)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x


@pytest.mark.parametrize("rate", [1e-4, 0.1, 1 / 3, 0.9])
@pytest.mark.parametrize("shape", [(1_000_003,), (1001, 333)])
def test_what_is_kept_has_the_scale_of_the_share_that_is_kept(
    rate: float, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(3)
    y = Dropout(rate)(torch.ones(shape))
    share = 1 - round(rate * 2**BITS) / 2**BITS
    assert y[y != 0].unique().tolist() == [torch.tensor(1 / share).item()]
    assert (
        abs((y != 0).double().mean().item() - share) < 4 * (share * (1 - share) / y.numel()) ** 0.5
    )


def uncorrelated(masks: list[Tensor]) -> bool:
    """No two of these random masks agree more often than chance lets them, five standard errors
    wide.
    """
    rows = torch.stack([mask.flatten().double() for mask in masks])
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    among = rows @ rows.T / rows.shape[1] - torch.eye(len(rows))
    return bool(among.abs().max() < 5 / rows.shape[1] ** 0.5)


def test_masks_of_seeds_updates_and_micro_batches_are_independent() -> None:
    masks = []
    for seed, step, number in [
        (1, 1, 0),
        (1, 1, 1),
        (1, 2, 0),
        (1, 2, 1),
        (2, 1, 0),
        (1, 11, 0),
        (11, 1, 0),
    ]:
        torch.manual_seed(dropout_seed(seed, step, number))
        masks.append(Dropout(0.1)(torch.ones(300, 512)) != 0)
    assert uncorrelated(masks)


@pytest.fixture
def fresh_fill() -> Iterator[None]:
    """Forget which function fills masks, before and after a test that breaks numba."""
    load_loop.cache_clear()
    yield
    load_loop.cache_clear()


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1 - 2**-BITS])
def test_compiled_masks_are_those_of_numpy(dtype: type[np.signedinteger], rate: float) -> None:
    """numba's loop and numpy's arrays give identical masks."""
    assert load_loop(np.dtype(dtype)) is not None
    random = np.random.default_rng(3)
    for size in (0, 1, 17, 100_003):
        seed, threshold = int(random.integers(2**63)), round(rate * 2**BITS)
        compiled, plain = np.full(size, 5, dtype), np.full(size, 6, dtype)
        fill_compiled(compiled, np.array([7], dtype), seed, threshold)
        fill_by_arrays(plain, np.array([7], dtype), seed, threshold)
        assert np.array_equal(compiled, plain) and set(compiled.tolist()) <= {0, 7}


@pytest.mark.usefixtures("fresh_fill")
def test_without_numba_the_masks_are_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw() -> Tensor:
        torch.manual_seed(6)
        return CpuBackend().drop(torch.ones(50, 60, dtype=torch.bfloat16), 0.3)

    compiled = draw()
    load_loop.cache_clear()
    say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it fails
    assert torch.equal(draw(), compiled)
    assert load_loop(np.dtype(np.int16)) is None
    assert capsys.readouterr().err.count("without numba, CPUs train and translate more slowly") == 1


@pytest.mark.usefixtures("fresh_fill")
def test_damaged_compiled_code_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = np.dtype(np.int32)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    load_loop(dtype)
    kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert len(kept) == 2
    content = {path: path.read_bytes() for path in kept}
    for path in kept:
        path.write_bytes(content[path][:-9])
    (tmp_path / "of the user").touch()
    load_loop.cache_clear()
    assert load_loop(dtype) is not None
    # Numba counts what it has compiled and writes the number down, so other bytes may come out.
    assert all(path.read_bytes() != content[path][:-9] for path in kept)
    assert (tmp_path / "of the user").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_drops_the_same(dtype: torch.dtype) -> None:
    layer, x = Dropout(0.3), torch.ones(40, 50, dtype=dtype, requires_grad=True)
    layer.backend = CpuBackend()

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        y = call(x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    plain, compiled = run(layer), run(torch.compile(layer, backend="aot_eager"))
    assert torch.equal(plain[0], compiled[0]) and torch.equal(plain[1], compiled[1])
