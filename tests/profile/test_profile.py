"""The profile of a toy run: it accounts for the whole update, and leaves nothing but its trace."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from support.prepared_toy import prepare_toy

import nmt.profile.profile
from nmt.config import RunConfig
from nmt.data.loader import Loader, Update
from nmt.profile import cost
from nmt.profile.profile import profile_training
from nmt.system.errors import UserError
from nmt.system.ranks import World

ALONE = World(0, 1, torch.device("cpu"))
PARTS = {
    "attention",
    "matrix products",
    "embedding, norm, dropout",
    "softmax and loss",
    "optimizer",
    "other",
    "waiting for data",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return prepare_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def config(prepared: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(cost, "MEASURED_S", 0.05)
    monkeypatch.setattr(nmt.profile.profile, "PROFILED_MICROS", 1)
    return prepared


def test_it_accounts_for_the_whole_update_and_leaves_only_its_trace(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(Path(config.data.root).rglob("*"))
    trace = tmp_path / "trace.json.gz"
    result = profile_training(config, ALONE, seconds=0.2, trace=trace)
    assert set(Path(config.data.root).rglob("*")) == before
    assert list(tmp_path.iterdir()) == [trace]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}

    assert result.parts.keys() == PARTS and min(result.parts.values()) > 0
    timing, store = result.timing, result.setup.store
    assert sum(result.parts.values()) == pytest.approx(1000 * timing.mean_s, rel=1e-9)
    assert timing.n_updates >= 3
    assert 200 < timing.n_tgt / timing.n_updates <= config.training.tgt_tokens
    ratio = timing.n_src / timing.n_tgt
    assert ratio == pytest.approx(store.src.n_tokens / store.tgt.n_tokens, rel=0.05)
    # which is larger depends on what else the machine does
    assert result.flop_per_s > 0 and result.ceiling > 0
    out = capsys.readouterr().out
    assert all(part in out for part in PARTS)
    assert f"{timing.n_tgt / sum(timing.seconds):,.0f}" in out and "fp32" in out


def test_waiting_for_data_is_shown(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Loader.__next__

    def wait(self: Loader) -> Update:
        time.sleep(0.1)
        return ready(self)

    monkeypatch.setattr(Loader, "__next__", wait)
    result = profile_training(config, ALONE, seconds=0.0)
    assert 100 <= result.parts["waiting for data"] < 1000 * result.timing.mean_s


def test_a_trace_that_cannot_be_written_is_refused_before_the_work(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nmt.profile.profile, "open_dry_run", None)  # what would begin it
    with pytest.raises(UserError, match="nowhere/t.json"):
        profile_training(config, ALONE, trace=tmp_path / "nowhere" / "t.json")
