"""One function over many tasks, by workers in processes of this machine or of a cluster: results in
the order of the tasks, few tasks in flight.

Tasks are drawn only as fast as results are taken, so that neither side can fill the memory. A
worker that is lost, with its process or its machine, is replaced, and others do its tasks again:
each task has one result, whatever happened to it before. The first task is done in the caller:
starting workers pays off only if there are more.
"""

import ast
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.streams import secure_standard_streams

Given = TypeVar("Given")
Returned = TypeVar("Returned")
Work = Callable[[Any], Any]  # what is done with each task
TASKS_AHEAD = 2  # of each worker: the one that it works on, and its next
MAX_LOSSES = 4  # of workers, by the same task
FEWER_WORKERS = (
    "perhaps because memory ran out; finished work is kept: run the command again with fewer workers "
    "(data.workers=1, or --workers 1)"
)


class Worker(Protocol):
    """A process, here or elsewhere, that does one task after another."""

    def prepare(self, make_work: Callable[[], Work]) -> None:
        """Have it make what it does with the tasks."""

    def do(self, task: Any) -> Any: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Executor:
    """Starts workers, and replaces those that are lost."""

    n_workers: int
    needs_workers: bool  # whether a worker has what this process lacks: other cores, or company
    start_worker: Callable[[], Worker]
    losses: tuple[type[Exception], ...]  # what the tasks of a lost worker raise
    # for each worker: tasks that are drawn and whose results are not yet taken
    window: int = TASKS_AHEAD
    runs_script: bool = False  # whether a worker runs the script of the caller, as `spawn` does


def use_processes(n_workers: int) -> Executor:
    """Have workers in processes of this machine. They are spawned, not forked, because the caller may
    have threads; they end when the caller ends, however it ends.
    """
    return Executor(n_workers, n_workers > 1, _ProcessWorker, (ProcessLost,), runs_script=True)


def map_in_order(
    work: Callable[[Given], Returned], tasks: Iterable[Given], executor: Executor
) -> Generator[Returned]:
    """Do `map(work, tasks)` on several processes. `work` must be a top-level function of a module,
    or a partial of one.
    """
    return map_with_workers(partial(partial, work), tasks, executor)


def map_with_workers(
    make_work: Callable[[], Callable[[Given], Returned]],
    tasks: Iterable[Given],
    executor: Executor,
    work: Callable[[Given], Returned] | None = None,
) -> Generator[Returned]:
    """Do `map_in_order` for work that must load something first: each process makes it once.

    A caller that already has the `work` passes it, for what is done in the caller.
    """
    tasks = iter(tasks)
    for task in tasks:
        work = work or make_work()
        yield work(task)
        if executor.needs_workers:
            break
    work = None  # its memory is not needed any more
    with closing(_WorkerPool(executor, make_work)) as pool:
        yield from pool.do_all(tasks)


@dataclass(eq=False)
class _Job:
    content: Any  # a task and, once that is done, its result
    is_done: bool = False
    n_losses: int = 0


class _WorkerPool:
    """The workers of one map, each looked after by a thread of this process."""

    def __init__(self, executor: Executor, make_work: Callable[[], Work]) -> None:
        self.executor, self.make_work = executor, make_work
        self.workers: set[Worker] = set()
        self.threads: list[threading.Thread] = []
        self.jobs: deque[_Job] = deque()  # in the order of their tasks
        self.n_undone = 0
        self.waiting: SimpleQueue[_Job | None] = SimpleQueue()  # jobs that no worker has
        self.ended: SimpleQueue[Exception | None] = (
            SimpleQueue()
        )  # for each done job None, or a failure
        self.is_closed = False
        self.lock = threading.Lock()

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            workers = list(self.workers)
        for worker in workers:
            worker.kill()
        for _ in self.threads:
            self.waiting.put(None)
        for thread in self.threads:
            thread.join()

    def do_all(self, tasks: Iterator[Any]) -> Iterator[Any]:
        n_workers = self.executor.n_workers
        mistake = None  # in the tasks: it is raised once those before it are done
        while True:
            while self.jobs and self.jobs[0].is_done:
                yield self.jobs.popleft().content
            n_kept = self.executor.window * n_workers - len(self.jobs)
            try:
                for task in islice(tasks, min(n_kept, TASKS_AHEAD * n_workers - self.n_undone)):
                    self.add(_Job(task))
            except UserError as error:
                mistake, tasks = error, iter(())
            if not self.jobs:
                break
            failure = self.ended.get()
            if failure is not None:
                raise failure
            self.n_undone -= 1
        if mistake is not None:
            raise mistake

    def add(self, job: _Job) -> None:
        if self.executor.runs_script and not self.threads:
            check_script()
        self.jobs.append(job)
        self.n_undone += 1
        self.waiting.put(job)
        if len(self.threads) < min(self.executor.n_workers, self.n_undone):
            thread = threading.Thread(target=self.keep_worker, daemon=True)
            thread.start()
            self.threads.append(thread)

    def keep_worker(self) -> None:
        """In a thread: have a worker do jobs, and replace it whenever it is lost."""
        start = _Job(None)  # counts the workers that are lost while they prepare
        try:
            while not self.is_closed:
                worker, job = self.start_worker(), start
                try:
                    worker.prepare(self.make_work)
                    start.n_losses = 0
                    for job in iter(self.waiting.get, None):
                        job.content = worker.do(job.content)
                        job.is_done = True
                        self.ended.put(None)
                except self.executor.losses:
                    if not self.is_closed:
                        self.count_loss(worker, job)
                        if job is not start:
                            self.waiting.put(job)
        except Exception as failure:
            self.ended.put(failure)

    def start_worker(self) -> Worker:
        with self.lock:
            worker = self.executor.start_worker()
            self.workers.add(worker)
        if self.is_closed:  # `close` may not have seen it
            worker.kill()
        return worker

    def count_loss(self, worker: Worker, job: _Job) -> None:
        say("a worker was lost; another does its work again")
        worker.kill()
        self.workers.discard(worker)
        job.n_losses += 1
        if job.n_losses > MAX_LOSSES:
            raise UserError(
                f"{MAX_LOSSES + 1} workers were killed over the same lines, {FEWER_WORKERS}"
            )


# ---- processes of this machine ----------------------------------------------------------------------------------


class ProcessLost(Exception):
    """A worker's process has ended before its task."""


def check_script() -> None:
    """Refuse to start workers from a script that each of them would run again, from its top to this call."""
    main = sys.modules["__main__"]
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>":
            continue
        try:
            with open(main.__file__ or "", "rb") as file:
                statements = ast.parse(file.read()).body
        except (AttributeError, OSError, SyntaxError, ValueError):  # a notebook has no file
            return
        for statement in statements:
            if not statement.lineno <= line <= (statement.end_lineno or line):
                continue
            if not (isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)):
                raise UserError(
                    f"{main.__file__}:{line}: each worker would run this script again from its top; put what it "
                    'does into a function main() and end it with: if __name__ == "__main__": main()'
                )


class _ProcessWorker:
    """A process at the other end of a pipe."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, its_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_pipe,))
        self._process.start()
        its_pipe.close()  # so that the end of the process is the end of the pipe
        weakref.finalize(self, self._process.kill)  # at exit too: Python waits for its processes

    def prepare(self, make_work: Callable[[], Work]) -> None:
        self.do(make_work)

    def do(self, task: Any) -> Any:
        try:
            self._pipe.send(task)
            returned, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise ProcessLost from None
        if error is not None:
            raise error
        return returned

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def run_in_process(work: Callable[[Given], Returned], task: Given) -> Returned:
    """Run `work(task)` in a process of its own, so that its memory is freed with it."""
    check_script()
    worker = _ProcessWorker()
    try:
        worker.prepare(partial(partial, work))
        returned: Returned = worker.do(task)
        return returned
    except ProcessLost:
        raise UserError(f"a process was killed, {FEWER_WORKERS}") from None
    finally:
        worker.kill()


def _serve(pipe: Connection) -> None:
    """Make what this process does with tasks, then do it with each, until the caller ends."""
    _init_process()
    work: Work | None = None
    while True:
        try:
            given = pipe.recv()
        except (EOFError, ConnectionError):
            return
        returned = None
        try:
            if work is None:
                work = given()
            else:
                returned = work(given)
            answer = pickle.dumps((returned, None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = pickle.dumps((None, error))
        pipe.send_bytes(answer)


def _init_process() -> None:
    """Ignore signals, which the caller handles, and exit when the caller dies."""
    secure_standard_streams()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    caller = parent_process()
    if caller is not None:
        threading.Thread(target=_exit_after, args=(caller.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
