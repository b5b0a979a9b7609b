"""scripts/bench/learning.py: trainers judged in the same way while they learn."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmt.config import OptimizerConfig
from nmt.train.optimizer import learning_rate

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import learning  # noqa: E402
import learning_peers  # noqa: E402
from learning_peers import BOS, EOS, PAD  # noqa: E402


def test_ours_and_a_plain_loop(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two short trainings become curves and a table; the NLL of ours is the one that nmt-train logs."""
    line = ["--config", str(toy), "--systems", "ours-fp32", "plain-fp32", "--seeds", "1"]
    line += ["--every", "2", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--"]
    line += ["training.steps=4", "training.validate_every=2", "evaluation.bleu=false"]
    assert learning.main(line) == 0
    table = capsys.readouterr().out
    ours, plain = learning.read_runs(tmp_path / "out" / "runs.jsonl")

    metrics = (tmp_path / "work" / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [row for row in map(json.loads, metrics) if row["kind"] == "valid"]
    assert [(row["step"], row["nll"]) for row in logged] == [
        (2, pytest.approx(ours["points"][0]["nll"], rel=1e-4))
    ]

    rates = [learning_rate(n, 16, 4, OptimizerConfig(warmup_steps=20)) for n in (2, 4)]
    for run in (ours, plain):
        assert [point["update"] for point in run["points"]] == [2, 4]
        assert [point["rate"] for point in run["points"]] == pytest.approx(rates)
        assert 3 < run["points"][-1]["nll"] < run["points"][0]["nll"] < 6
        assert 0 < run["points"][0]["cpu_s"] < run["points"][1]["cpu_s"]
        assert 600 < run["points"][-1]["tokens"] <= 1200
        assert 0 <= run["bleu"] < 100
    assert table == (tmp_path / "out" / "table.md").read_text()
    assert f"| plain-fp32 | 1 | {plain['points'][0]['nll']:.3f} |" in table
    assert "<svg" in (tmp_path / "out" / "plot.svg").read_text()

    # the same command again starts nothing
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a run was repeated"))
    assert learning.main(line) == 0


N_PIECES, WIDTH = 7, 5


class Bigrams(learning_peers.Probe):
    """A model whose next piece depends on the last one and on the sentence; its own ids are ours in
    reverse."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity(), torch.arange(N_PIECES).flip(0))
        torch.manual_seed(1)
        self.logits = 3 * torch.randn(N_PIECES, N_PIECES, N_PIECES)

    def encode(self, src: Tensor) -> Tensor:
        return src[:, :1]

    def decode(self, memory: Tensor, src: Tensor, tgt: Tensor) -> Tensor:
        return self.logits[memory, tgt]

    def project(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.ids.argsort()]


def test_search_finds_the_best_of_all() -> None:
    """With a beam that holds every prefix and a limit of three pieces, it is exhaustive."""
    probe = Bigrams()
    src = torch.tensor([[piece, EOS] for piece in range(4, N_PIECES)])
    pieces = [piece for piece in range(N_PIECES) if piece not in (PAD, BOS, EOS)]
    found = learning_peers.translate(probe, src, beam=70, alpha=0.6, extra=2)
    for (first, _), ids in zip(src.tolist(), found, strict=True):
        logs = probe.logits[first].log_softmax(1)
        best: tuple[float, list[int]] = (-torch.inf, [])
        for length in range(4):
            for sentence in itertools.product(pieces, repeat=length):
                path = [BOS, *sentence, EOS]
                score = float(sum(logs[a, b] for a, b in itertools.pairwise(path)))
                best = max(best, (score / ((5 + length + 1) / 6) ** 0.6, list(sentence)))
        assert ids == best[1]


def test_nll_counts_labels_with_their_end_marks() -> None:
    probe = Bigrams()
    pairs = [([4], [5, 6]), ([5, 6, 4], [4])]
    logs = probe.logits.log_softmax(2)
    labels = [logs[4, 2, 5], logs[4, 5, 6], logs[4, 6, 3], logs[5, 2, 4], logs[5, 4, 3]]
    nll = -float(sum(labels)) / 5
    assert learning_peers.measure_nll(probe, pairs) == pytest.approx(nll, rel=1e-6)


def run_of(seed: int, nlls: list[float]) -> learning.Run:
    points = [
        {"update": 10 * n, "tokens": 100 * n, "cpu_s": 60.0 * n * seed, "nll": nll}
        for n, nll in enumerate(nlls, 1)
    ]
    return {
        "corpus": "c",
        "system": "ours",
        "precision": "fp32",
        "seed": seed,
        "points": points,
        "bleu": 10.0 * seed,
        "signature": "s",
        "n_parameters": 5,
        "versions": {"torch": "1"},
        "machine": "m",
        "told": {},
    }


def test_table() -> None:
    """Means and deviations over seeds; at equal times, values between two points."""
    report = learning.format_report([run_of(1, [4.0, 3.0]), run_of(2, [5.0, 3.5])])
    assert "| 2 | 4.500 ± 0.707 | 3.250 ± 0.354 | 15.00 ± 7.07 | 10 | 3.0 | 5 |" in report
    assert "| system | NLL, 1.0 min | updates | NLL, 2.0 min | updates |" in report
    assert "| ours-fp32 | - | - | 4.000 ± 1.414 | 15 ± 7 |" in report


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("ours", "each with -fp32 or -bf16"), ("eole-bf16", "--make-peers"), ("fairseq-fp32", "3.10")],
)
def test_refuses_what_cannot_run(
    name: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learning.main(["--systems", name, "--out", str(tmp_path / "out")]) == 2
    assert remedy in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
