"""The profile of a toy run: its figures are of the updates, and it leaves nothing."""

import time
from pathlib import Path

from pytest import MonkeyPatch, approx, fixture, mark
from support.capture import Capture, read_stderr
from support.processor import ALONE

import nmt.extras.profile.profile
from nmt.config import RunConfig
from nmt.data.loader import Loader, Update
from nmt.extras.profile.dry_run import DryRun, Timing, open_dry_run
from nmt.extras.profile.profile import profile_training


@fixture
def config(prepared: RunConfig, monkeypatch: MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(nmt.extras.profile.profile, "PROFILED_MICROS", 1)
    return prepared


def test_it_times_updates_and_leaves_nothing(
    config: RunConfig, tmp_path: Path, capsys: Capture
) -> None:
    before = set(Path(config.data.root).rglob("*"))
    dry_run = open_dry_run(config, ALONE)
    timing = profile_training(dry_run, seconds=0.0)
    assert set(Path(config.data.root).rglob("*")) == before
    assert not list(tmp_path.iterdir())

    store = dry_run.setup.store
    assert timing.n_updates == 1  # any takes too long
    assert 200 < timing.n_tgt / timing.n_updates <= config.training.tgt_tokens
    ratio = timing.n_src / timing.n_tgt
    assert ratio == approx(store.src.n_tokens / store.tgt.n_tokens, rel=0.05)
    out = capsys.readouterr().out
    for operation in ("Self CPU", "aten::mm", "_FusedLoss", "waiting for data"):
        assert operation in out
    assert f"{timing.n_tgt / sum(timing.seconds):,.0f}" in out and "fp32" in out


@mark.parametrize("update_s, counts", [(10.0, [1, 1]), (5.9, [1, 1, 3, 5]), (0.1, [1, 1, 3, 300])])
def test_slow_updates_are_timed_once(
    update_s: float, counts: list[int], config: RunConfig, monkeypatch: MonkeyPatch
) -> None:
    """The first warms up; where three more fit into half a minute, the time is that of at least three."""
    asked = []

    def run(dry_run: DryRun, updates: object, n: int, what: str) -> Timing:
        asked.append(n)
        return Timing([update_s] * n)

    monkeypatch.setattr(DryRun, "run", run)
    timing = open_dry_run(config, ALONE).run_for(iter(()), 30.0, "timing")
    assert asked == counts and timing.n_updates == counts[-1]


def test_a_busy_machine_is_named(
    config: RunConfig, monkeypatch: MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load in (3, 9):
        monkeypatch.setattr("os.getloadavg", lambda load=load: [load])
        open_dry_run(config, ALONE)
        said = read_stderr(capsys)
        assert ("warning: this machine is busy: load 9 on 2 cores" in said) == (load == 9)


def test_waiting_for_data_is_shown(config: RunConfig, monkeypatch: MonkeyPatch) -> None:
    ready = Loader.__next__

    def wait(self: Loader) -> Update:
        time.sleep(0.1)
        return ready(self)

    monkeypatch.setattr(Loader, "__next__", wait)
    timing = profile_training(open_dry_run(config, ALONE), seconds=0.0)
    assert 0.1 * timing.n_updates <= timing.waited_s < sum(timing.seconds)
