"""What the tests of pools have done in workers, each of which imports this file alone."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from nmt.system.errors import UserError


def square_late(n: int) -> tuple[int, int]:
    time.sleep(0.02 * (n % 3))
    return n * n, os.getpid()


def refuse(n: int) -> int:
    if n == 3:
        raise UserError("three is too many")
    return n


def die(n: int) -> int:
    if n:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def wait_for_the_second(n: int) -> int:
    time.sleep(2.0 if n == 1 else 0.0)
    return n


class CountingWorker:
    """What it gives back shows which process it was made in, and that it lives as long as that."""

    def __init__(self) -> None:
        self.n_done = 0

    def __call__(self, n: int) -> tuple[int, int, int]:
        time.sleep(0.05)
        self.n_done += 1
        return n, os.getpid(), self.n_done


class FrailWorker:
    """Each process dies by its third task, in the middle of it or at its very beginning; each task says
    in which attempt it was done.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.n_done = folder, 0

    def __call__(self, n: int) -> int:
        self.n_done += 1
        if self.n_done == 3 and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01 * (n % 3))
        with open(self.folder / "done", "a") as file:
            file.write(f"{n}\n")
        return n * n


def weigh_and_die(task: bytes) -> int:
    if multiprocessing.parent_process() and task[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(task)


class StillbornWorker:
    """The first processes die while they prepare."""

    def __init__(self, folder: Path) -> None:
        if multiprocessing.parent_process() and len(list(folder.iterdir())) < 3:
            (folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, n: int) -> int:
        return n


def sleep_long(n: int) -> None:
    time.sleep(3600 if multiprocessing.parent_process() else 0)
