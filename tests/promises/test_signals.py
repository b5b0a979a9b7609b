"""A run that is asked to stop saves at the boundary of an update, says so, and goes on in the very
same bits.

Whoever is asked, whenever, and by which signal: one rank, torchrun, in the middle of a save or of a
validation. Who asks twice gets an end at once, and loses no more than the updates since the last
checkpoint. Nobody is left behind.
"""

import itertools
import os
import random
import shutil
import signal
import time

import pytest
from support.soaking import (
    Ground,
    Order,
    Start,
    Torchrun,
    check_done,
    check_readable,
    check_same,
    counted,
    make_ground,
    steps_logged,
)

from nmt.system.files import read_json
from nmt.system.run_folder import RunFolder

STEPS = 12
# A sentence a batch
SETTINGS = (f"training.steps={STEPS}", "training.log_every=1", "decoding.batch_tokens=8")
QUIET = ("training.validate_every=1000", "training.checkpoint_every=null")
CODES = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
LOST = 75  # the exit code of a rank that lost another one
# Sooner it is the same request, handed on by several; Ctrl-C is nobody's to hand on.
TWICE_S = {signal.SIGTERM: 5.1, signal.SIGUSR1: 5.1, signal.SIGINT: 0.6}
N_RANKS = counted(1, 2)  # of torchrun; each takes seconds to load torch
SPELLED = [(1, 0), (2, 0), (2, 1)]  # ranks, and which of them is asked
EACH = [(number, size, victim) for number in CODES for size, victim in SPELLED]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return make_ground(tmp_path_factory.mktemp("signals"))


def whole(ground: Ground, size: int, *settings: str) -> RunFolder:
    """The run that nobody disturbs, trained once."""
    name = f"whole-{size}-{len(settings)}"
    return (
        ground.run(name)
        if ground.run(name).path.exists()
        else ground.finish(name, *SETTINGS, *settings, size=size)
    )


def check_preempted(run: RunFolder, code: int) -> int:
    """The last checkpoint's update, which is the one that status.json tells of."""
    step = check_readable(run)[-1]
    status = read_json(run.status)
    assert (status["state"], status["exit_code"], status["step"]) == ("preempted", code, step), (
        status
    )
    assert status["steps"] >= step and status["message"] and "\n" not in status["message"]
    assert (run.checkpoints / "last").resolve() == run.checkpoint(step).resolve()
    return step


def finish(ground: Ground, run: RunFolder, size: int, *settings: str) -> None:
    ground.finish(run.path.name, *SETTINGS, *settings, size=size)
    check_done(run, STEPS)
    assert read_json(run.status)["state"] == "done" and read_json(run.status)["exit_code"] == 0
    check_same(run, whole(ground, size, *settings))
    shutil.rmtree(run.path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "size", "victim"), counted([EACH[0], EACH[8]], EACH))
def test_a_signal_to_one_rank(
    number: signal.Signals, size: int, victim: int, ground: Ground
) -> None:
    rng = random.Random(f"{number} {size} {victim}")
    for attempt in range(counted(1, 10)):
        run, moment = (
            ground.run(f"asked-{number}-{size}-{victim}-{attempt}"),
            rng.randint(1, STEPS - 6),
        )
        start = ground.start(
            run.path.name, *SETTINGS, *QUIET, size=size, order=Order([], "", slow={"update": 0.1})
        )
        start.until(lambda: steps_logged(run) >= moment)  # noqa: B023 (it is over before the next attempt)
        time.sleep(rng.uniform(0.0, 0.2))
        before = steps_logged(run)
        start.signal(number, [victim])
        after = steps_logged(run)
        assert start.wait(is_agent=False) == [CODES[number]] * size, start.told()
        step = check_preempted(run, CODES[number])
        # at the end of the update that was being computed, or of the next one if this rank had
        # already given its word
        assert before <= step <= after + 2, (
            f"asked after update {before} to {after}, saved at {step}"
        )
        assert not start.orphans() and "Traceback" not in start.told()
        finish(ground, run, size, *QUIET)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "step", "size", "victim"),
    counted(
        [(QUIET, STEPS, 1, 0)],
        [(*how, *who) for how in (((), 4), (QUIET, STEPS)) for who in SPELLED],
    ),
)
def test_a_signal_during_validation_cuts_it_short(
    settings: tuple[str, ...], step: int, size: int, victim: int, ground: Ground
) -> None:
    """Six sentences take a second each. The validation is made up for when the run goes on, also
    the very last.
    """
    number = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT][size - victim]
    for attempt in range(counted(1, 10)):
        run = ground.run(f"validating-{step}-{size}-{victim}-{attempt}")
        start = ground.start(
            run.path.name,
            *SETTINGS,
            *settings,
            size=size,
            order=Order([], "", slow={"decode": 1.0}),
        )
        start.until(lambda: start.is_in("decode"))  # noqa: B023
        time.sleep(0.1 * attempt)
        start.signal(number, [victim])
        assert start.wait(is_agent=False) == [CODES[number]] * size, start.told()
        decoded = [folder / "slow-decode" for folder in start.folders]
        assert max(path.stat().st_size for path in decoded if path.exists()) < 6
        assert check_preempted(run, CODES[number]) == step
        assert not start.orphans()
        finish(ground, run, size, *settings)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "victim"), counted(SPELLED[2:], SPELLED))
def test_a_signal_during_a_save(size: int, victim: int, ground: Ground) -> None:
    for attempt in range(counted(1, 10)):
        run = ground.run(f"saving-{size}-{victim}-{attempt}")
        start = ground.start(
            run.path.name, *SETTINGS, size=size, order=Order([], "", slow={"save": 0.5})
        )
        start.until(lambda: start.is_in("save"))  # noqa: B023
        start.signal(signal.SIGUSR1, [victim])
        assert start.wait(is_agent=False) == [75] * size, start.told()
        assert check_preempted(run, 75) <= 4
        assert not start.orphans()
        finish(ground, run, size)


def end_at_once(start: Start, number: signal.Signals) -> None:
    for _ in range(3):
        start.signal(number)
    time.sleep(TWICE_S[number])
    start.signal(number)
    codes = start.wait(is_agent=False)
    # a rank may lose one that has ended before its own signal comes
    assert 128 + number in codes and set(codes) <= {128 + number, LOST}, start.told()
    assert not start.orphans()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "size", "slow"),
    counted(
        [(signal.SIGINT, 2, "save")],
        list(itertools.product(CODES, (1, 2), ("save", "decode"))),
    ),
)
def test_who_asks_twice_gets_an_end_at_once(
    number: signal.Signals, size: int, slow: str, ground: Ground
) -> None:
    """Every rank is asked, as by torchrun, in the middle of what would never end."""
    for attempt in range(counted(1, 10)):
        run = ground.run(f"twice-{number}-{size}-{slow}-{attempt}")
        start = ground.start(
            run.path.name,
            *SETTINGS,
            size=size,
            order=Order([], "", slow={slow: 3600.0}),
        )
        start.until(lambda: start.is_in(slow))  # noqa: B023
        time.sleep(0.2 * attempt)
        start.signal(number)
        end_at_once(start, number)
        check_readable(run)
        finish(ground, run, size)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", counted([signal.SIGKILL], [*CODES, signal.SIGKILL]))
def test_a_signal_to_torchrun(number: signal.Signals, ground: Ground) -> None:
    """It hands the signal on. When it is killed, its ranks save and go as if they had been asked
    to.
    """
    for attempt in range(counted(1, 10)):
        run = ground.run(f"torchrun-{number}-{attempt}")
        settings = (*SETTINGS[1:], *QUIET, "training.steps=3000")
        start = Torchrun(
            ground.folder / f"{run.path.name}.ranks", ground.argv(run.path.name, *settings), N_RANKS
        )
        try:
            start.until(lambda: steps_logged(run) >= 3)  # noqa: B023
            before = steps_logged(run)
            os.kill(start.process.pid, number)
            after = steps_logged(run)
            start.process.wait(60)
            start.until_gone(30)
        finally:
            start.end()
        step = check_preempted(run, CODES.get(number, 75))
        # No traceback of ours
        assert before <= step and "nmt/commands/train.py" not in start.told(), start.told()
        print(f"{number.name}: asked after update {before} to {after}, saved at {step}")
        more = (*SETTINGS[1:], *QUIET, f"training.steps={step + 3}")
        ground.finish(run.path.name, *more, size=N_RANKS)
        straight = ground.finish(f"{run.path.name}-straight", *more, size=N_RANKS)
        check_same(run, straight)
