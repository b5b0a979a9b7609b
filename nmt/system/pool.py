"""One function over many tasks, by workers in processes of this machine or of a cluster: results in
the order of the tasks, few tasks in flight.

Tasks are drawn only as fast as results are taken, so that neither side can fill the memory. A
worker that is lost, with its process or its machine, is replaced, and others do its tasks again:
each task has one result, whatever happened to it before. Quick tasks are done in the caller: starting
workers pays off only for slow ones.
"""

import errno
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from nmt.system.errors import UserError
from nmt.system.progress import clock, say
from nmt.system.streams import secure_standard_streams

Given = TypeVar("Given")
Returned = TypeVar("Returned")
TASKS_AHEAD = 2  # of each worker: the one that it works on, and its next
QUICK_S = 0.1
CLUSTER_LOOK_S = 30.0  # between two looks at a cluster
MAX_LOSSES = 4  # of workers, by the same task
FEWER_WORKERS = (
    "perhaps because memory ran out; finished work is kept: run the command again with fewer workers "
    "(data.workers=1, or --workers 1)"
)
# A semaphore, which a process shares with its caller, is a file below /dev/shm.
SHARED_MEMORY_ERRORS = (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOENT)


class Worker(Protocol):
    """A process, here or elsewhere, that does one thing after another."""

    def submit(self, work: Callable[[Any], Any], task: Any) -> "Future[Any]": ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Executor:
    """Starts workers, and replaces those that are lost."""

    n_workers: int
    has_others: bool  # whether a worker has what this process lacks: other cores, or company
    start_worker: Callable[[], Worker]
    losses: tuple[type[Exception], ...]  # what the tasks of a lost worker raise
    # for each worker: tasks that are drawn and whose results are not yet taken
    window: int = TASKS_AHEAD
    # called now and then, with the number of workers that have started: see to the others
    look_after: Callable[[int], None] = lambda _: None


def use_processes(n_workers: int) -> Executor:
    """Have workers in processes of this machine. They are spawned, not forked, because the caller may
    have threads; they end when the caller ends, however it ends.
    """
    return Executor(n_workers, n_workers > 1, _ProcessWorker, (BrokenProcessPool,))


def map_in_order(
    work: Callable[[Given], Returned], tasks: Iterable[Given], executor: Executor
) -> Generator[Returned]:
    """Do `map(work, tasks)` on several processes. `work` must be a top-level function of a module,
    or a partial of one.
    """
    return map_with_workers(partial(partial, work), tasks, executor)


def map_with_workers(
    make_worker: Callable[[], Callable[[Given], Returned]],
    tasks: Iterable[Given],
    executor: Executor,
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
        if executor.has_others and clock() - started_at > QUICK_S:
            break
    worker = None  # its memory is not needed any more
    with closing(_Crew(executor, make_worker)) as crew:
        yield from crew.do_all(tasks)


@dataclass(eq=False)
class _Job:
    content: Any  # a task and, once that is done, its result
    is_done: bool = False
    n_losses: int = 0


class _Crew:
    """The workers of one map."""

    def __init__(self, executor: Executor, make_worker: Callable[[], Callable[[Any], Any]]) -> None:
        self.executor, self.make_worker = executor, make_worker
        self.workers: dict[Worker, bool] = {}  # whether it has made what it works with
        self.free: deque[Worker] = deque()  # each as often as it may get another task
        self.jobs: deque[_Job] = deque()  # in the order of their tasks
        self.waiting: deque[_Job] = deque()  # those that no worker has
        self.n_undone = 0
        self.ended: SimpleQueue[tuple[Future[Any], Worker, _Job | None]] = SimpleQueue()
        self.n_failed_starts = 0
        self.looked_at = clock()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    def do_all(self, tasks: Iterator[Any]) -> Iterator[Any]:
        n_workers = self.executor.n_workers
        mistake = None  # in the tasks: it is raised once those before it are done
        while True:
            while self.jobs and self.jobs[0].is_done:
                yield self.jobs.popleft().content
            n_kept = self.executor.window * n_workers - len(self.jobs)
            try:
                for task in islice(tasks, min(n_kept, TASKS_AHEAD * n_workers - self.n_undone)):
                    self.jobs.append(_Job(task))
                    self.waiting.append(self.jobs[-1])
                    self.n_undone += 1
            except UserError as error:
                mistake, tasks = error, iter(())
            if not self.jobs:
                break
            self.hand_out()
            self.wait()
        if mistake is not None:
            raise mistake

    def hand_out(self) -> None:
        while len(self.workers) < min(self.executor.n_workers, self.n_undone):
            worker = self.executor.start_worker()
            self.workers[worker] = False
            self.submit(worker, None)
        while self.waiting and self.free:
            worker = self.free.popleft()
            if worker in self.workers:  # it is not lost
                self.submit(worker, self.waiting.popleft())

    def submit(self, worker: Worker, job: _Job | None) -> None:
        """Give a worker a job, or have it prepare for the first."""
        work = (_make_worker, self.make_worker) if job is None else (_do_task, job.content)
        try:
            future = worker.submit(*work)
        except self.executor.losses as error:  # it was lost meanwhile
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda ended: self.ended.put((ended, worker, job)))

    def wait(self) -> None:
        """Wait for the end of a job, and take its result."""
        until_look = self.looked_at + CLUSTER_LOOK_S - clock()
        try:
            future, worker, job = self.ended.get(timeout=max(0.0, until_look))
        except Empty:
            self.executor.look_after(sum(self.workers.values()))
            self.looked_at = clock()
            return
        try:
            result = future.result()
        except self.executor.losses:
            self.replace(worker, job)
            return
        if job is None:
            self.n_failed_starts, self.workers[worker] = 0, True
            self.free.extend([worker] * TASKS_AHEAD)
        else:
            job.content, job.is_done = result, True
            self.n_undone -= 1
            self.free.append(worker)

    def replace(self, worker: Worker, job: _Job | None) -> None:
        """Have another worker do a lost worker's task."""
        if worker in self.workers:
            say("a worker was lost; another does its work again")
            del self.workers[worker]
            worker.kill()
        if job is None:
            self.n_failed_starts += 1
        else:
            job.n_losses += 1
            self.waiting.appendleft(job)
        if self.n_failed_starts > MAX_LOSSES or (job and job.n_losses > MAX_LOSSES):
            raise UserError(
                f"{MAX_LOSSES + 1} workers were killed over the same lines, {FEWER_WORKERS}"
            )


_worker: list[Callable[[Any], Any]] = []  # in the process of a worker: the one that it made


def _make_worker(make_worker: Callable[[], Callable[[Any], Any]]) -> None:
    _worker[:] = [make_worker()]


def _do_task(task: Any) -> Any:
    return _worker[0](task)


# ---- processes of this machine ----------------------------------------------------------------------------------


class _ProcessWorker:
    def __init__(self) -> None:
        try:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _init_process)
        except OSError as error:
            if error.errno not in SHARED_MEMORY_ERRORS:
                raise
            raise UserError(
                f"/dev/shm: cannot be written ({error.strerror}), and several processes need it to work "
                "together; make it writable"
            ) from None
        # of our own, because the pool closes its own in another thread
        self._tasks = os.dup(self._pool._call_queue._reader.fileno())  # type: ignore[attr-defined]

    def submit(self, work: Callable[[Any], Any], task: Any) -> "Future[Any]":
        return self._pool.submit(work, task)

    def kill(self) -> None:
        pool: Any = self._pool  # Python 3.14 has a method for some of this
        for process in list((pool._processes or {}).values()):
            process.kill()
        thread = pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        # Python before 3.11.5 waits forever for a large task to go into the pipe that the process read.
        while thread is not None and thread.is_alive():
            if select.select([self._tasks], [], [], 0.01)[0] and not os.read(self._tasks, 1 << 20):
                thread.join()
        os.close(self._tasks)


def run_in_process(work: Callable[[Given], Returned], task: Given) -> Returned:
    """Run `work(task)` in a process of its own, so that its memory is freed with it."""
    worker = _ProcessWorker()
    try:
        returned: Returned = worker.submit(work, task).result()
        return returned
    except BrokenProcessPool:
        raise UserError(f"a process was killed, {FEWER_WORKERS}") from None
    finally:
        worker.kill()


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
