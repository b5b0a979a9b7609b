"""kill -9 at any moment of a run's life loses at most the updates since its last checkpoint, and nothing else.

Killed and started again until it is done, a run ends in the bits and the metrics of a run that nobody disturbed; what a
kill leaves behind can be read at once. Moments are random, from a seed, and in turn each change that a save makes to a
file. Starts are forks (support/forks.py); one test holds them against a start from the shell.
"""

import collections
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from random import Random

from pytest import mark
from support.ground import Ground, check_done, check_readable, check_same, steps_logged
from support.rings import amount
from support.torchrun import Torchrun
from support.waiting import until

from nmt.system.run_folder import RunFolder

STEPS = 16
BLEU, NLL = "evaluation.bleu=true", "evaluation.bleu=false"


def list_traces(run: RunFolder) -> frozenset[object]:
    """What the next start can see: names and sizes, where links lead; of what is hidden and
    half-written, its kind.
    """
    traces: set[object] = set()
    for path in run.path.rglob("*"):
        name = re.sub(r"\.\d+\.tmp", ".tmp", str(path.relative_to(run.path)))
        if not any(part[0] == "." for part in path.relative_to(run.path).parts[:-1]):
            kind = os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else "file"
            is_whole = kind == "file" and path.name[0] != "."
            traces.add((name, path.stat().st_size if is_whole else kind))
    return frozenset(traces)


@mark.timeout(3600)
@mark.parametrize(
    "size, score, kills",
    amount([(2, BLEU, 1)], [(1, BLEU, 70), (1, NLL, 50), (2, BLEU, 80)]),
)
def test_kills_at_random_moments(size: int, score: str, kills: int, ground: Ground) -> None:
    """The moments are drawn over what is left of the run's life, so late ones come as often as early ones."""
    rng = Random(f"{size} {score} {kills}")
    ground.finish(f"first-{size}-{score}", score, size=size)
    started_at = time.monotonic()
    whole = ground.finish(f"whole-{size}-{score}", score, size=size)
    life = time.monotonic() - started_at
    check_same(whole, ground.run(f"first-{size}-{score}"))
    struck: collections.Counter[str] = collections.Counter()
    # How those ranks ended that were not killed
    left: collections.Counter[int] = collections.Counter()
    runs = 0
    while struck.total() < kills:
        runs += 1
        name = f"killed-{size}-{score}-{runs}"
        run, done = ground.run(name), 0
        for _ in range(6):
            start = ground.start(name, score, size=size)
            time.sleep(rng.uniform(0.0, 1.05) * life * (1 - 0.7 * done / STEPS))
            victims = rng.choice([[0], [1], [0, 1]]) if size == 2 else [0]
            start.signal(signal.SIGKILL, victims)
            codes = start.wait()
            assert {codes[rank] for rank in victims} <= {0, -signal.SIGKILL} or len(
                victims
            ) < size, start.told()
            if any(codes[rank] == -signal.SIGKILL for rank in victims):
                struck[start.told("phase", victims[:1]).strip() or "start"] += 1
                left.update(code for rank, code in enumerate(codes) if rank not in victims)
            assert not start.orphans()
            done = (check_readable(run) or [0])[-1] if run.checkpoints.exists() else 0
            if struck.total() == kills:
                break
        ground.finish(name, score, size=size)
        check_done(run, STEPS)
        check_same(run, whole)
        shutil.rmtree(run.path)
    print(
        f"\n{size} ranks, {score}: {struck.total()} kills in {runs} runs, while {dict(struck.most_common())}; "
        f"exit codes of the other rank: {dict(left)}"
    )


@mark.timeout(3600)
def test_kills_at_every_change_that_a_save_makes_to_a_file(ground: Ground) -> None:
    """One update, a validation, a checkpoint, pruning: killed before the first change of a file, the second, ...

    In `make test` every ninth of those in the checkpoints' folder, and the run goes on from each
    state that is new; in `make soak` all changes from the first to the report, and it goes on from each.
    """
    settings = (
        BLEU,
        "evaluation.sentences=1",
        "training.keep_checkpoints=1",
        "training.checkpoint_every=2",
    )
    begun, longer = ground.finish("begun", "training.steps=6", *settings), "training.steps=7"
    whole, run = ground.run("whole"), ground.run("changed")
    shutil.copytree(begun.path, whole.path, symlinks=True)
    ground.finish("whole", longer, *settings)
    watched = str(amount(run.checkpoints, run.path))
    seen: set[frozenset[object]] = set()
    changes: list[str] = []
    for n in range(1, 1000, amount(9, 1)):
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(begun.path, run.path, symlinks=True)
        start = ground.start("changed", longer, *settings, watched=watched, die_at=n)
        codes = start.wait()
        check_readable(run)
        changes = (start.folders[0] / "changes").read_text().replace(str(run.path), "").splitlines()
        if codes == [0]:  # it ended before it came to change n
            break
        assert codes == [-signal.SIGKILL], start.told()
        assert len(changes) == n
        state = list_traces(run)
        if amount(state not in seen, True):
            seen.add(state)
            ground.finish("changed", longer, *settings)
            check_done(run, 7)
            check_same(run, whole)
    print(
        f"\nkilled before each of {len(changes)} changes, with {len(seen)} outcomes:",
        *changes,
        sep="\n  ",
    )
    assert len(changes) > 12 and len(seen) > amount(2, 5)
    assert any("within a removal" in change for change in changes)  # pruning was among them


@mark.soak  # of the harness, not of the run
def test_a_fork_ends_in_the_bits_of_a_start_from_the_shell(ground: Ground) -> None:
    command = [sys.executable, "-m", "nmt.commands.train", *ground.argv("shell")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ground.folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check_same(ground.finish("forked"), ground.run("shell"))


def test_of_many_starts_at_once_one_trains(ground: Ground) -> None:
    """The others leave with a line that names it; when it is killed, nothing is in the way of the next one."""
    whole, run = ground.finish("alone"), ground.run("crowded")
    # Updates are slow: nobody is done before all have come
    starts = [
        ground.start("crowded", at=f"-{n}", slow={"update": 2.0}) for n in range(amount(5, 20))
    ]
    until(lambda: sum(start.codes == [None] for start in starts) == 1)
    (winner,) = [start for start in starts if start.codes == [None]]
    holder = re.compile(
        rf"nmt-train on {re.escape(socket.gethostname())}, pid {winner.processes[0].pid}, "
        r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    )
    for start in starts:
        if start is not winner:
            assert start.codes == [2] and len(start.told().strip().splitlines()) == 1, start.told()
            assert holder.search(start.told()) and str(run.path) in start.told(), start.told()
    winner.until(lambda: steps_logged(run) >= 1)
    winner.signal(signal.SIGKILL)
    assert winner.wait() == [-signal.SIGKILL]
    check_same(ground.finish("crowded"), whole)


@mark.soak  # half a minute; test_launch.py starts torchrun
@mark.timeout(900)
@mark.parametrize("attempt", range(5))
def test_torchrun_starts_ranks_again_after_a_kill(attempt: int, ground: Ground) -> None:
    steps = amount(30, 120)
    settings = (
        NLL,
        "training.log_every=1",
        f"training.steps={steps}",
        f"training.validate_every={steps // 3}",
    )
    whole, run = ground.folder / "calm", ground.run(f"restarted-{attempt}")
    if not whole.exists():
        ground.finish("calm", *settings, size=2)
    rng = Random(attempt)
    start = Torchrun(
        ground.folder / f"torchrun-{attempt}",
        ground.argv(run.path.name, *settings),
        options=["--max-restarts=2"],
    )
    try:
        start.until(lambda: steps_logged(run) >= 1)
        victim, moment = start.rank((attempt + 1) % 2), rng.randint(4, steps // 2)
        assert victim
        start.until(lambda: steps_logged(run) >= moment)
        os.kill(victim, signal.SIGKILL)
        assert start.process.wait() == 0, start.told()
        start.until_gone()
        assert "continuing after update" in start.told()
    finally:
        start.end()
    check_done(run, steps)
    check_same(run, RunFolder(whole))
