"""The benchmark of growth: what it times is an update of the size it says, its operations are those of the sentences
one by one, and the plain softmax that it compares with gives the same loss and gradients as ours.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nmt.config import ModelConfig, TrainingConfig
from nmt.dist import World
from nmt.errors import UserError
from nmt.model.transformer import Transformer
from nmt.train.cost import flop_per_token

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench_growth  # noqa: E402

TINY = ModelConfig(16, 32, 2, 1, dropout=0.0)
ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("n", [1, 2, 100, 4_096, 32_768])
def test_drawn_lengths_fill_a_micro_batch_exactly(n: int) -> None:
    lengths = bench_growth.drawn_lengths(n)
    assert lengths.sum() == n and lengths.min() >= 1 and lengths.max() <= 128
    assert n < 4_096 or 26 < lengths.mean() < 33


@pytest.mark.parametrize("name", bench_growth.SWEEPS)
def test_a_sweep_varies_one_thing(name: str) -> None:
    cases = bench_growth.sweep(name, *bench_growth.MODELS["small"])
    varied = {"micro-batch": [case.lengths.sum() for case in cases], "length": [case.lengths.max() for case in cases],
              "layers": [case.model.n_layers for case in cases], "vocabulary": [case.n_vocab for case in cases]}
    values = [case.value for case in cases]
    assert varied.pop(name) == values == sorted(set(values))
    varied.pop("length") if name == "micro-batch" else None  # a longer draw has a longer longest
    assert all(len(set(others)) == 1 for others in varied.values())


def test_an_update_has_the_sentences_of_its_case() -> None:
    lengths = np.array([5, 1, 9])
    update = bench_growth.made_update(bench_growth.Case(0, TINY, 50, lengths), ALONE)
    batch = update.micros[0].batch
    assert batch.src.lengths.tolist() == batch.tgt.lengths.tolist() == [5, 1, 9]
    assert update.n_tgt == update.n_src == int((batch.labels >= 0).sum()) == 15
    assert not torch.equal(batch.src.tokens, batch.labels) and batch.labels.max() < 50


def test_the_operations_are_the_sum_over_sentences() -> None:
    lengths = np.array([5, 1, 9, 30])
    cases = [bench_growth.Case(n, TINY, n, lengths) for n in (50, 60)]
    for case, row in zip(cases, bench_growth.measure(cases, TrainingConfig(precision="fp32"), 3, ALONE), strict=True):
        each = [flop_per_token(TINY, case.n_vocab, n, n) for n in lengths]
        total = sum((one.src + one.tgt) * n for one, n in zip(each, lengths, strict=True))
        assert row.flop * 45 == pytest.approx(total, rel=1e-12)
        assert row.value == case.value and len(row.seconds) == 3 and row.rate == 45 / sorted(row.seconds)[1]


def test_the_plain_softmax_has_the_loss_and_gradients_of_ours() -> None:
    update = bench_growth.made_update(bench_growth.Case(0, TINY, 50, np.array([5, 1, 9])), ALONE)
    model, found = Transformer(TINY, 50).double(), []
    for objective in bench_growth.SOFTMAXES.values():
        model.zero_grad()
        loss, _ = objective(model, 0.1)(update.micros[0].batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_all_tables_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    case = bench_growth.Case(7, TINY, 50, np.array([5, 1, 9]))
    monkeypatch.setattr(bench_growth, "sweep", lambda name, *_: [case, case._replace(value=8)])
    args = bench_growth.parsed(["--updates", "1", "--out", str(tmp_path / "made")])
    assert bench_growth.main(args) == 0
    out = capsys.readouterr().out
    assert out.count("\n| 7 | ") == out.count("\n| 8 | ") == 4 and "small fp32" in out
    assert (tmp_path / "made" / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="nmt\\[plot\\]"):
        bench_growth.main(bench_growth.parsed([]))


@pytest.mark.parametrize(("code", "told", "cell", "ratio"), [
    (0, "", "5.00", True), (-9, "", "does not fit, or killed", False),
    (1, "torch.OutOfMemoryError: CUDA out of memory", "does not fit, or killed", False)])
def test_memory_is_told_for_both(code: int, told: str, cell: str, ratio: bool, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    ends = iter([subprocess.CompletedProcess([], 0, "2000000000\n", ""),
                 subprocess.CompletedProcess([], code, "" if code else "5000000000\n", told)])
    monkeypatch.setattr(bench_growth.subprocess, "run", lambda *_, **__: next(ends))
    assert bench_growth.main(bench_growth.parsed(["--memory"])) == 0
    out = capsys.readouterr().out
    assert "| softmax in chunks | 2.00 |" in out and f"| full logits | {cell} |" in out
    assert ("| ratio | 2.50 |" in out) == ratio


def test_a_failure_of_another_kind_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ValueError: no")
    monkeypatch.setattr(bench_growth.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="ValueError: no"):
        bench_growth.main(bench_growth.parsed(["--memory"]))
