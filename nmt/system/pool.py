"""One function over many tasks in several processes: results in the order of the tasks, few tasks
in flight.

Tasks are drawn only as fast as results are taken, so that neither side can fill the memory. The
processes are spawned, not forked, because the caller may have threads; they end when the caller
ends, however it ends. Quick tasks are done in the caller: processes are worth their start only
after a slow one.
"""

import errno
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from nmt.system.errors import UserError
from nmt.system.progress import clock
from nmt.system.streams import secure_standard_streams

Given = TypeVar("Given")
Returned = TypeVar("Returned")
WAITING_TASKS = 2  # beyond those that are worked on, so that no process waits for its next task
QUICK_S = 0.1
KILLED = (
    "a worker process was killed, perhaps because memory ran out; finished work is kept: "
    "run the command again, and if it happens again, with one worker "
    "(data.workers=1, or nmt-translate --workers 1)"
)
# A semaphore, which all processes of a pool share, is a file below /dev/shm.
SHARED_MEMORY_ERRORS = (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOENT)


def map_in_order(
    work: Callable[[Given], Returned], tasks: Iterable[Given], workers: int
) -> Generator[Returned]:
    """Do `map(work, tasks)` on several processes. `work` must be a top-level function of a module,
    or a partial of one.
    """
    return map_with_workers(partial(_return_it, work), tasks, workers)


def _return_it(work: Callable[[Given], Returned]) -> Callable[[Given], Returned]:
    return work


def map_with_workers(
    make_worker: Callable[[], Callable[[Given], Returned]],
    tasks: Iterable[Given],
    workers: int,
    worker: Callable[[Given], Returned] | None = None,
) -> Generator[Returned]:
    """Do `map_in_order` for work that must load something first: each process makes its worker
    once.

    A caller that already has a `worker` passes it, for the quick tasks that are done in the caller.
    """
    # here, as long as tasks are quick
    tasks = iter(tasks)
    for task in tasks:
        worker = worker or make_worker()
        started_at = clock()
        yield worker(task)
        if workers > 1 and clock() - started_at > QUICK_S:
            break
    worker = None  # its memory is not needed any more
    next_task = next(tasks, None)
    if next_task is None:
        return
    # in processes
    in_flight: deque[Future[Returned]] = deque()
    with _start_processes(workers) as pool:
        for task in chain([next_task], tasks):
            in_flight.append(pool.submit(_work_in_process, make_worker, task))
            if len(in_flight) == workers + WAITING_TASKS:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()


_worker: list[Callable[[Any], Any]] = []  # in a process of a pool: the one that it made


def _work_in_process(
    make_worker: Callable[[], Callable[[Given], Returned]], task: Given
) -> Returned:
    if not _worker:
        _worker.append(make_worker())
    returned: Returned = _worker[0](task)
    return returned


def run_in_process(work: Callable[[Given], Returned], task: Given) -> Returned:
    """Run `work(task)` in a process of its own, so that its memory is freed with it."""
    with _start_processes(1) as pool:
        return pool.submit(work, task).result()


@contextmanager
def _start_processes(n: int) -> Iterator[ProcessPoolExecutor]:
    """Start `n` processes. They are killed if the caller does not wait for them: on an error, on
    Ctrl-C, or when a loop is left early.
    """
    try:
        pool = ProcessPoolExecutor(n, get_context("spawn"), _init_process)
    except OSError as error:
        if error.errno not in SHARED_MEMORY_ERRORS:
            raise
        raise UserError(
            f"/dev/shm: cannot be written ({error.strerror}), and several processes need it to work "
            "together; make it writable"
        ) from None
    try:
        yield pool
    except BaseException as error:
        # Also where one of them was killed: the others may wait for a lock that it held.
        for process in list((pool._processes or {}).values()):  # Python 3.14 has a method for it
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(KILLED) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _init_process() -> None:
    """Ignore signals, which the caller handles, and exit when the caller dies."""
    secure_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    caller = parent_process()
    if caller is not None:
        threading.Thread(target=_exit_after, args=(caller.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
