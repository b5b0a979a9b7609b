"""A function over many tasks in processes of its own: results in the order of the tasks, few tasks in flight.

Tasks are drawn only as fast as results are taken, so that neither side can fill the memory. The processes are spawned,
not forked, because the caller may have threads; they end when the caller ends, however it ends. Quick tasks are done in
the caller: only after a slow one processes are worth their start.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from nmt.system.errors import UserError
from nmt.system.progress import clock

Task = TypeVar("Task")
Result = TypeVar("Result")
AHEAD = 2  # tasks that wait for a free process
QUICK_S = 0.1
KILLED = (
    "a worker process was killed, perhaps for want of memory; what is finished is kept: run it again, with one "
    "worker if it happens again (data.workers=1, of nmt-translate --workers 1)"
)


def ordered(
    work: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
    """`map(work, tasks)` on so many processes. `work` is a function of a module, or a partial of one."""
    return ordered_with(partial(_same, work), tasks, workers)


def _same(work: Callable[[Task], Result]) -> Callable[[Task], Result]:
    return work


def ordered_with(
    start: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    workers: int,
    work: Callable[[Task], Result] | None = None,
) -> Iterator[Result]:
    """The same for work that has something to load first: `start` makes the function, once in each process.

    A caller that has the function already gives it as `work`, for the quick tasks that are done in the caller.
    """
    tasks = iter(tasks)
    for task in tasks:
        work = work or start()
        began = clock()
        yield work(task)
        if workers > 1 and clock() - began > QUICK_S:
            break
    work = None  # the processes make their own
    second = next(tasks, None)
    if second is None:
        return
    flying: deque[Future[Result]] = deque()
    with _processes(workers) as pool:
        for task in chain([second], tasks):
            flying.append(pool.submit(_work_in_process, start, task))
            if len(flying) == workers + AHEAD:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


_works: list[Callable[[Any], Any]] = []  # in a worker process: the one function of its pool


def _work_in_process(start: Callable[[], Callable[[Task], Result]], task: Task) -> Result:
    if not _works:
        _works.append(start())
    result: Result = _works[0](task)
    return result


def apart(work: Callable[[Task], Result], task: Task) -> Result:
    """`work(task)` in a process of its own, so that its memory goes with it."""
    with _processes(1) as pool:
        return pool.submit(work, task).result()


@contextmanager
def _processes(n: int) -> Iterator[ProcessPoolExecutor]:
    """`n` processes, killed where the caller does not want to wait for them: on an error, on Ctrl-C, on a left loop."""
    pool = ProcessPoolExecutor(n, get_context("spawn"), _settle)
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):  # Python 3.14 has a method for it
            process.kill()  # also where one was killed: the others may wait for a lock that it held
        if isinstance(error, BrokenProcessPool):
            raise UserError(KILLED) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _settle() -> None:
    """In a new process: who asks for an end asks the caller, and no worker outlives its caller."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    caller = parent_process()
    if caller is not None:
        threading.Thread(target=_follow, args=(caller.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
