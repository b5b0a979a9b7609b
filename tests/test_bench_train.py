"""The benchmark of training: its arithmetic against torch's own counter of operations, its meter against a loop that
is known, its table against numbers worked out by hand, and one run of it with a process that fails.
"""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nmt.config import load_config
from nmt.data.prepare import prepare
from nmt.data.store import Side, TokenStore, open_store
from nmt.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench_peers  # noqa: E402
import bench_train  # noqa: E402

CEILINGS = {"bf16": 800.0, "fp32": 200.0, "fp32 oneDNN": 400.0}


def pairs_of(*lengths: tuple[int, int]) -> TokenStore:
    """Sentences of so many pieces, without marks."""
    sides = zip(*lengths, strict=True)
    return TokenStore(*(Side(np.ones(sum(side), np.uint16), np.cumsum([0, *side])) for side in sides))


def job(tmp_path: Path, tokens: int = 60, updates: int = 3, seconds: float = 100, skip: int = 2) -> bench_peers.Job:
    return bench_peers.Job("plain", "fp32", str(tmp_path / "text"), str(tmp_path), 50, 16, 32, 2, 2, tokens, updates,
                           seconds, 1, skip)


# ---- arithmetic -------------------------------------------------------------------------------------------------

def test_the_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    n_src, n_tgt = 7, 5  # with marks
    its = job(tmp_path)
    model = bench_peers.Lean(its)
    with FlopCounterMode(display=False) as counter:
        model(torch.full((1, n_src), 4), torch.full((1, n_tgt), 4)).sum().backward()
    masked = 6 * its.n_layers * its.d_model * n_tgt**2  # causal attention computes the half that we do not count
    pairs = pairs_of((n_src - 1, n_tgt - 1))
    ours = bench_train.gflop_per_token(its.d_model, its.d_ff, its.n_layers, its.n_vocab, pairs)
    assert ours * 1e9 * n_tgt == pytest.approx(counter.get_total_flops() - masked, rel=1e-12)


def test_the_operations_of_many_pairs_are_the_sum_of_each() -> None:
    lengths = [(3, 9), (20, 1), (7, 7)]
    together = bench_train.gflop_per_token(8, 16, 2, 30, pairs_of(*lengths)) * sum(tgt + 1 for _, tgt in lengths)
    alone = [bench_train.gflop_per_token(8, 16, 2, 30, pairs_of(pair)) * (pair[1] + 1) for pair in lengths]
    assert together == pytest.approx(sum(alone), rel=1e-12)


def test_a_row_takes_ratios_within_rounds_and_medians_over_them() -> None:
    def results(*rates: list[float]) -> list[bench_train.Result]:
        return [bench_train.Result(each, 4000.0, 2048.0, {}, ceiling) for each, ceiling in
                zip(rates, (100.0, 50.0, 100.0), strict=True)]

    mine = results([90.0, 100.0, 900.0], [40.0, 50.0, 60.0], [200.0, 200.0, 200.0])  # medians 100, 50, 200
    ours = results([300.0] * 3, [200.0] * 3, [400.0] * 3)
    assert bench_train.row("eole-fp32", mine, ours, 0.5) == (
        "eole-fp32", "100 (50 - 200)", "3.00 (2.00 - 4.00)", "50% (50% - 100%)", "4,000", "9", "2.0 GiB")
    assert bench_train.row("eole-fp32", mine, [], 0.5)[2] == "-"


def test_the_ceiling_is_that_of_the_fastest_path_in_the_precision() -> None:
    slower = {path: rate / 2 for path, rate in CEILINGS.items()}
    assert bench_train.ceiling_of("fp32", CEILINGS, slower) == 300
    assert bench_train.ceiling_of("bf16", CEILINGS, slower) == 600


def test_ceilings_are_measured_by_path() -> None:
    found = bench_train.ceilings(1, n=16)
    assert {"bf16", "fp32"} <= set(found) and min(found.values()) > 0


# ---- answers ----------------------------------------------------------------------------------------------------

ANSWER = {"tgt_tokens": [100, 300], "seconds": [0.5, 1.0], "peak_rss_mb": 10.0, "threads": 2, "precision": "bf16",
          "versions": {"torch": "9"}}


def test_an_answer_is_the_last_line() -> None:
    found = bench_train.parse(f"a warning\n{json.dumps(ANSWER)}\n", "bf16", 7.0)
    assert found == bench_train.Result([200.0, 300.0], 200.0, 10.0, {"torch": "9"}, 7.0)


@pytest.mark.parametrize("answer", [
    "", "Killed", "[]", json.dumps(ANSWER | {"precision": "fp32"}), json.dumps(ANSWER | {"seconds": [1.0]}),
    json.dumps(ANSWER | {"tgt_tokens": [], "seconds": []}), json.dumps({"tgt_tokens": [1], "seconds": [1.0]})])
def test_other_answers_are_refused(answer: str) -> None:
    with pytest.raises(UserError, match="not the answer of a bf16 process"):
        bench_train.parse(answer, "bf16", 1.0)


# ---- what the others read and count -----------------------------------------------------------------------------

@pytest.fixture
def store(toy: Path, tmp_path: Path) -> TokenStore:
    """The toy store, and the text made of it."""
    config = load_config(str(toy))
    prepare(config.data, config.vocab, config.seed)
    assert bench_train.write_text(Path(config.data.store), tmp_path / "text") == config.vocab.size
    return open_store(Path(config.data.store), "train")


def test_the_text_is_the_store(store: TokenStore, tmp_path: Path) -> None:
    for name, side in (("src", store.src), ("tgt", store.tgt)):
        lines = (tmp_path / "text" / f"train.{name}").read_text().splitlines()
        assert [len(line.split()) for line in lines] == side.lengths.tolist()
        assert [int(word[1:]) for line in lines for word in line.split()] == np.asarray(side.ids).tolist()
    words = (tmp_path / "text" / "vocab.txt").read_text().split()
    assert len(words) == len(set(words)) == 77 and {"t0", "t2", "t3"}.isdisjoint(words)


def test_an_epoch_has_every_pair_once_in_batches_of_so_many_tokens(store: TokenStore, tmp_path: Path) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []
    sizes: list[int] = []
    batches = bench_peers.batches(job(tmp_path))
    while len(seen) < len(store):
        src, tgt = next(batches)
        sizes.append(int((tgt[:, 1:] != bench_peers.PAD).sum()))
        seen += [tuple(tuple(i for i in line if i > 3 or i == 1) for line in pair)
                 for pair in zip(src.tolist(), tgt.tolist(), strict=True)]
    texts = [[tuple(np.asarray(side.ids)[a:b].tolist()) for a, b in pairwise(side.offsets)]
             for side in (store.src, store.tgt)]
    assert sorted(seen) == sorted(zip(*texts, strict=True))
    assert sum(sizes) == len(store.tgt.ids) + len(store) and max(sizes) <= 60 and np.mean(sizes) > 45


@pytest.fixture
def meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bench_peers.Meter]:
    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", nn.CrossEntropyLoss.forward)  # to be put back
    made = bench_peers.Meter(job(tmp_path))
    yield made
    made.hook.remove()


def test_the_meter_counts_labels_and_times_whole_updates(meter: bench_peers.Meter,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 11.0, 16.0])  # after each update; two are left out
    monkeypatch.setattr(bench_peers.time, "perf_counter", lambda: next(clock))
    meter.watch_losses()
    scores = nn.Parameter(torch.zeros(6, 9))
    optimizer = torch.optim.Adam([scores])
    loss = nn.CrossEntropyLoss(ignore_index=5)
    with pytest.raises(bench_peers.Finished):
        for n_padding in (0, 0, 1, 2, 3, 4):
            for _ in range(2):  # two micro-batches
                labels = torch.tensor([5] * n_padding + [0] * (6 - n_padding))
                loss(scores, labels).backward()
            optimizer.step()
    assert meter.tokens == [10, 8, 6] and meter.seconds == [7.0, 1.0, 5.0]


def test_the_meter_stops_after_the_seconds_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = bench_peers.Meter(job(tmp_path, updates=99, seconds=10, skip=1))
    meter.hook.remove()
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(bench_peers.time, "perf_counter", lambda: next(clock))
    with pytest.raises(bench_peers.Finished):
        for _ in range(99):
            meter.stepped()
    assert meter.seconds == [4, 4, 4]


@pytest.mark.parametrize("make", [bench_peers.Plain, bench_peers.Lean])
def test_the_loops_learn_and_ignore_padding(make: type[nn.Module], store: TokenStore, tmp_path: Path) -> None:
    torch.manual_seed(0)
    its = bench_peers.Job(**{**vars(job(tmp_path)), "n_vocab": 80, "dropout": 0.0})
    model, (src, tgt) = make(its), next(bench_peers.batches(its))
    wide = [nn.functional.pad(side, (0, 3), value=bench_peers.PAD) for side in (src, tgt)]
    torch.testing.assert_close(model(*wide)[:, :tgt.shape[1]], model(src, tgt))
    ahead = torch.cat((tgt[:, :2], tgt[:, 2:] * 0 + 7), 1)  # the future does not show
    torch.testing.assert_close(model(src, ahead)[:, :2], model(src, tgt)[:, :2])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


# ---- the command ------------------------------------------------------------------------------------------------

def test_a_run_measures_in_turn_and_tells_what_failed(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_train, "ceilings", lambda threads: CEILINGS)
    monkeypatch.setattr(bench_train, "settle", lambda: None)  # this process is not to change
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    code = bench_train.main([
        "--quick", "--config", str(toy), "--work", str(tmp_path / "work"), "--threads", "1", "--tokens", "100",
        "--updates", "2", "--systems", "ours-fp32", "plain-bf16", "eole-fp32", "--peer-python", str(broken)])
    out, err = capsys.readouterr()
    assert code == 1, err
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    found = {cells[0]: cells[1:] for cells in rows}
    assert found["ours-fp32"][1] == "1.00 (1.00 - 1.00)" and found["plain-bf16"][1] == "-"
    assert 80 <= int(found["ours-fp32"][3]) <= 100 and 80 <= int(found["plain-bf16"][3]) <= 100
    assert found["ours-fp32"][4] == found["plain-bf16"][4] == "2"
    assert f"torch {torch.__version__}" in found["plain"][1] and found["fp32 oneDNN"] == ["400 (400 - 400)"]
    assert "Failed: eole-fp32, tiny" in out and "no such module" in out and "eole-fp32" not in found


@pytest.mark.parametrize("arguments, complaint", [
    (["--systems", "ours-fp16"], "--systems ours-fp16: give some of ours-bf16"),
    (["--systems", "eole-bf16"], "--systems eole-bf16: --peer-python None is no program"),
    (["--rounds", "0"], "--rounds 0: give more than 0"),
])
def test_mistakes_are_told_in_one_line(arguments: list[str], complaint: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_train.main(arguments) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1
