"""A run that is asked to stop saves at the boundary of an update, says so, and goes on in the very
same bits.

Whoever is asked, whenever, and by which signal: one rank, torchrun, in the middle of a save or of a
validation. Who asks twice gets an end at once, and loses no more than the updates since the last
checkpoint. Nobody is left behind.
"""

import itertools
import os
import signal
import time
from pathlib import Path
from random import Random

from pytest import FixtureRequest, fixture, mark
from support.forks import Start
from support.ground import Ground, check_done, check_readable, check_same, steps_logged
from support.rings import amount
from support.torchrun import Torchrun

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
N_RANKS = amount(1, 2)  # of torchrun; each takes seconds to load torch
SPELLED = [(1, 0), (2, 0), (2, 1)]  # ranks, and which of them is asked
EACH = [(number, size, victim) for number in CODES for size, victim in SPELLED]


@fixture(params=range(amount(1, 10)))
def attempt(request: FixtureRequest) -> int:
    number: int = request.param
    return number


@fixture
def run(ground: Ground, tmp_path: Path) -> RunFolder:
    """One of this test's own."""
    return ground.run(tmp_path.name)


def find_whole(ground: Ground, size: int, *settings: str) -> RunFolder:
    """The run that nobody disturbs, trained once."""
    name = f"whole-{size}-{len(settings)}"
    if ground.run(name).path.exists():
        return ground.run(name)
    return ground.finish(name, *SETTINGS, *settings, size=size)


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
    check_same(run, find_whole(ground, size, *settings))


def check_end(ground: Ground, start: Start, run: RunFolder, code: int, *settings: str) -> int:
    """Every rank leaves with this code, and the run goes on in the same bits. Return where it stopped."""
    size = len(start.processes)
    assert start.wait(is_agent=False) == [code] * size, start.told()
    assert not start.orphans() and "Traceback" not in start.told()
    step = check_preempted(run, code)
    finish(ground, run, size, *settings)
    return step


@mark.parametrize("number, size, victim", amount([EACH[0], EACH[8]], EACH))
def test_a_signal_to_one_rank(
    number: signal.Signals, size: int, victim: int, attempt: int, ground: Ground, run: RunFolder
) -> None:
    rng = Random(f"{number} {size} {victim} {attempt}")
    moment, name = rng.randint(1, STEPS - 6), run.path.name
    start = ground.start(name, *SETTINGS, *QUIET, size=size, slow={"update": 0.1})
    start.until(lambda: steps_logged(run) >= moment)
    time.sleep(rng.uniform(0.0, 0.2))
    before = steps_logged(run)
    start.signal(number, [victim])
    after = steps_logged(run)
    step = check_end(ground, start, run, CODES[number], *QUIET)
    # at the end of the update that was being computed, or of the next one if this rank had
    # already given its word
    assert before <= step <= after + 2, f"asked after update {before} to {after}, saved at {step}"


@mark.parametrize(
    "settings, step, size, victim",
    amount(
        [(QUIET, STEPS, 1, 0)],
        [(*how, *who) for how in (((), 4), (QUIET, STEPS)) for who in SPELLED],
    ),
)
def test_a_signal_during_validation_cuts_it_short(
    settings: tuple[str, ...],
    step: int,
    size: int,
    victim: int,
    attempt: int,
    ground: Ground,
    run: RunFolder,
) -> None:
    """Six sentences take a second each. The validation is made up for when the run goes on, also
    the very last.
    """
    number = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT][size - victim]
    start = ground.start(run.path.name, *SETTINGS, *settings, size=size, slow={"decode": 1.0})
    start.until(lambda: start.is_in("decode"))
    time.sleep(0.1 * attempt)
    start.signal(number, [victim])
    assert check_end(ground, start, run, CODES[number], *settings) == step
    assert all(len(start.told("slow-decode", [rank])) < 6 for rank in range(size))


@mark.parametrize("size, victim", amount(SPELLED[2:], SPELLED))
def test_a_signal_during_a_save(
    size: int, victim: int, attempt: int, ground: Ground, run: RunFolder
) -> None:
    start = ground.start(run.path.name, *SETTINGS, size=size, slow={"save": 0.5})
    start.until(lambda: start.is_in("save"))
    start.signal(signal.SIGUSR1, [victim])
    assert check_end(ground, start, run, 75) <= 4


@mark.parametrize(
    "number, size, slow",
    amount(
        [(signal.SIGINT, 2, "save")],
        list(itertools.product(CODES, (1, 2), ("save", "decode"))),
    ),
)
def test_who_asks_twice_gets_an_end_at_once(
    number: signal.Signals, size: int, slow: str, attempt: int, ground: Ground, run: RunFolder
) -> None:
    """Every rank is asked, as by torchrun, in the middle of what would never end."""
    start = ground.start(run.path.name, *SETTINGS, size=size, slow={slow: 3600.0})
    start.until(lambda: start.is_in(slow))
    time.sleep(0.2 * attempt)
    for _ in range(4):
        start.signal(number)
    time.sleep(TWICE_S[number])
    start.signal(number)
    codes = start.wait(is_agent=False)
    # a rank may lose one that has ended before its own signal comes
    assert 128 + number in codes and set(codes) <= {128 + number, LOST}, start.told()
    assert not start.orphans()
    check_readable(run)
    finish(ground, run, size)


@mark.parametrize("number", amount([signal.SIGKILL], [*CODES, signal.SIGKILL]))
def test_a_signal_to_torchrun(
    number: signal.Signals, attempt: int, ground: Ground, run: RunFolder
) -> None:
    """It hands the signal on. When it is killed, its ranks save and go as if they had been asked
    to.
    """
    name = run.path.name
    argv = ground.argv(name, *SETTINGS[1:], *QUIET, "training.steps=3000")
    start = Torchrun(ground.folder / f"{name}.ranks", argv, N_RANKS)
    try:
        start.until(lambda: steps_logged(run) >= 3)
        before = steps_logged(run)
        os.kill(start.process.pid, number)
        after = steps_logged(run)
        start.process.wait()
        start.until_gone()
    finally:
        start.end()
    step = check_preempted(run, CODES.get(number, 75))
    # No traceback of ours
    assert before <= step and "nmt/commands/train.py" not in start.told(), start.told()
    print(f"{number.name}: asked after update {before} to {after}, saved at {step}")
    settings = (*SETTINGS[1:], *QUIET, f"training.steps={step + 3}")
    straight = ground.finish(f"{name}-straight", *settings, size=N_RANKS)
    check_same(ground.finish(name, *settings, size=N_RANKS), straight)
