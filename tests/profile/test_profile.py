"""The profile of a toy run: its figures are of the updates, and it leaves nothing."""

import time
from pathlib import Path

import pytest
import torch
from support.prepared_toy import prepare_toy

import nmt.extras.profile.profile
from nmt.config import RunConfig
from nmt.data.loader import Loader, Update
from nmt.extras.profile.dry_run import open_dry_run
from nmt.extras.profile.profile import profile_training
from nmt.system.ranks import World

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return prepare_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def config(prepared: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(nmt.extras.profile.profile, "PROFILED_MICROS", 1)
    return prepared


def test_it_times_updates_and_leaves_nothing(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(Path(config.data.root).rglob("*"))
    dry_run = open_dry_run(config, ALONE)
    timing = profile_training(dry_run, seconds=0.2)
    assert set(Path(config.data.root).rglob("*")) == before
    assert not list(tmp_path.iterdir())

    store = dry_run.setup.store
    assert timing.n_updates == 1 or timing.n_updates >= 3  # one, where three take too long
    assert 200 < timing.n_tgt / timing.n_updates <= config.training.tgt_tokens
    ratio = timing.n_src / timing.n_tgt
    assert ratio == pytest.approx(store.src.n_tokens / store.tgt.n_tokens, rel=0.05)
    out = capsys.readouterr().out
    for operation in ("Self CPU", "aten::", "waiting for data"):
        assert operation in out
    assert f"{timing.n_tgt / sum(timing.seconds):,.0f}" in out and "fp32" in out


def test_waiting_for_data_is_shown(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Loader.__next__

    def wait(self: Loader) -> Update:
        time.sleep(0.1)
        return ready(self)

    monkeypatch.setattr(Loader, "__next__", wait)
    timing = profile_training(open_dry_run(config, ALONE), seconds=0.0)
    assert 0.1 * timing.n_updates <= timing.waited_s < sum(timing.seconds)
