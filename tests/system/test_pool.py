"""use_processes for many tasks: the results of a plain map, in order, few tasks ahead, and no process
left behind.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest import mark, raises
from support.capture import Capture, read_stderr
from support.checkout import ROOT, TESTS
from support.pool_tasks import (
    CountingWorker,
    FrailWorker,
    StillbornWorker,
    die,
    refuse,
    sleep_long,
    square_late,
    wait_for_the_second,
    weigh_and_die,
)
from support.waiting import is_alive, until

from nmt.system.errors import UserError
from nmt.system.pool import (
    MAX_LOSSES,
    TASKS_AHEAD,
    map_in_order,
    map_with_workers,
    run_in_process,
    use_processes,
)


@mark.parametrize("workers, n", [(1, 12), (2, 0), (2, 1), (2, 2), (3, 12)])
def test_is_map_in_order(workers: int, n: int) -> None:
    results = list(map_in_order(square_late, range(n), use_processes(workers)))
    assert [result for result, _ in results] == [i * i for i in range(n)]
    assert len({pid for _, pid in results} - {os.getpid()}) <= (workers if workers > 1 else 0)


def test_draws_no_more_tasks_than_it_can_work_on() -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for i in range(50):
            drawn.append(i)
            yield i

    for taken, _ in enumerate(map_in_order(square_late, tasks(), use_processes(2)), 1):
        assert len(drawn) <= taken + 2 * TASKS_AHEAD
    assert len(drawn) == 50


def test_a_slow_task_holds_up_the_others_only_at_the_end_of_the_window() -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for n in range(50):
            drawn.append(n)
            yield n

    executor = replace(use_processes(2), window=6)
    results = map_in_order(wait_for_the_second, tasks(), executor)
    assert [next(results), next(results)] == [0, 1]
    assert len(drawn) == 1 + 2 * 6  # the first was done here
    assert list(results) == list(range(2, 50))


def test_one_task_starts_no_process() -> None:
    assert [pid for _, pid in map_in_order(square_late, range(1), use_processes(2))] == [
        os.getpid()
    ]


def test_a_worker_is_made_once_in_each_process() -> None:
    results = list(map_with_workers(CountingWorker, range(7), use_processes(2)))
    assert [n for n, _, _ in results] == list(range(7))
    for process in {pid for _, pid, _ in results}:
        counts = [n_done for _, pid, n_done in results if pid == process]
        assert sorted(counts) == list(range(1, len(counts) + 1))


def test_a_user_error_in_a_task_is_raised_as_one() -> None:
    results = map_in_order(refuse, range(9), use_processes(2))
    with raises(UserError, match="three is too many"):
        list(results)


def test_a_task_that_kills_every_worker_is_a_message() -> None:
    with raises(UserError, match=rf"{MAX_LOSSES + 1} workers were killed.*data\.workers=1"):
        list(map_in_order(die, range(9), use_processes(2)))


N_TASKS = 14


def test_killed_workers_lose_no_task_and_double_none(tmp_path: Path, capsys: Capture) -> None:
    frail = partial(FrailWorker, tmp_path)
    results = list(map_with_workers(frail, range(N_TASKS), use_processes(2)))
    assert results == [n * n for n in range(N_TASKS)]
    n_lost = read_stderr(capsys).count("a worker was lost")
    assert n_lost >= N_TASKS // 3 - 2 > 0
    done = list(map(int, (tmp_path / "done").read_text().split()))
    assert set(done) == set(range(N_TASKS))


def test_one_process_that_is_killed_is_a_message() -> None:
    with raises(UserError, match=r"^a process was killed.*data\.workers=1"):
        run_in_process(die, 1)


def test_a_large_task_on_its_way_to_a_killed_worker_holds_nothing_up() -> None:
    """The pipe to a worker is full when it dies."""
    tasks = [bytes([i == 3]) * 3_000_000 for i in range(12)]
    with raises(UserError, match="workers were killed"):
        list(map_in_order(weigh_and_die, tasks, use_processes(2)))


def test_a_worker_that_dies_while_it_starts_is_replaced(tmp_path: Path) -> None:
    start = partial(StillbornWorker, tmp_path)
    assert list(map_with_workers(start, range(9), use_processes(2))) == list(range(9))


def test_what_precedes_a_mistake_in_the_input_is_done() -> None:
    def tasks() -> Iterator[int]:
        yield from range(6)
        raise UserError("line 7 is too long")

    results = map_in_order(square_late, tasks(), use_processes(2))
    assert [next(results)[0] for _ in range(6)] == [n * n for n in range(6)]
    with raises(UserError, match="line 7"):
        next(results)


PARENT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import nmt.system.pool
from support.pool_tasks import square_late
for n, pid in nmt.system.pool.map_in_order(square_late, iter(int, 1), nmt.system.pool.use_processes(2)):
    print(pid, flush=True)
"""


def test_no_worker_outlives_a_killed_caller() -> None:
    program = PARENT.format(tests=str(TESTS), root=str(ROOT))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        pids = {int(caller.stdout.readline()) for _ in range(9)} - {caller.pid}
        caller.kill()
    assert pids
    until(lambda: not any(map(is_alive, pids)))


@mark.parametrize("is_alone", [False, True])
def test_whoever_leaves_waits_for_nobody(is_alone: bool) -> None:
    with raises(Leave):
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        if is_alone:
            run_in_process(sleep_long, 0)
        else:
            list(map_in_order(sleep_long, range(5), use_processes(2)))
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


class Leave(Exception):
    pass


def leave(*_: object) -> None:
    raise Leave


SCRIPT = """
from nmt.system.pool import map_in_order, use_processes
from nmt.system.progress import say

print("begun", flush=True)
def work():
    print(list(map_in_order(say, "abc", use_processes(2))), flush=True)
"""


def test_a_script_that_workers_would_run_again_is_told_before_they_start(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"{SCRIPT}work()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout == "begun\n"
    assert f"{script}:8: each worker would run this script again" in done.stderr
    script.write_text(f'{SCRIPT}if __name__ == "__main__":\n    work()\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert "[None, None, None]" in done.stdout
    assert sorted(done.stderr.split()) == ["a", "b", "c"]  # and nothing of what workers left behind
