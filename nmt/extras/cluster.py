"""Workers on other machines: actors of Ray.

Ray places the actors, carries tasks and results, and notices what is lost. All machines have the same
installation and see the same files under the same names.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any

from nmt.system.errors import UserError, describe_error
from nmt.system.extras import import_extra
from nmt.system.pool import Executor, Work
from nmt.system.progress import say, say_once

# Results are taken in order. In a simulation of 1,000 workers of which 1 % are ten times slower than the others, a
# window of 8 keeps 37 % of them busy, one of 32 97 % (docs/clusters.md).
WINDOW_ELSEWHERE = 32
HEAD_LOOK_S = 10.0  # between two looks at Ray's head


@contextmanager
def open_cluster(n_workers: int, uses_gpu: bool) -> Iterator[Executor]:
    """Open the Ray cluster at RAY_ADDRESS."""
    ray = import_extra("ray")
    # Ray's own search for an address waits long for a cluster of this machine that has died.
    address = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(address, log_to_driver=False, logging_level="error", configure_logging=False)
    except Exception as error:  # of many kinds
        reason = describe_error(error)
        raise UserError(f"--on ray: Ray cannot be reached ({reason}); see RAY_ADDRESS") from None
    try:
        with ExitStack() as stack:
            # Ray prints its losses there, between the lines of the result.
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.callback(ray.shutdown)
            head = ray.get_runtime_context().gcs_address
            is_over = threading.Event()
            stack.callback(is_over.set)
            threading.Thread(target=watch_head, args=(head, is_over), daemon=True).start()
            needs = share_cluster(ray, n_workers, uses_gpu)
            start_worker = partial(_RayWorker, ray, needs)
            known = ray.exceptions
            losses = (
                known.RayActorError,
                known.ObjectLostError,
                known.OutOfMemoryError,
                known.NodeDiedError,
            )
            yield Executor(n_workers, True, start_worker, losses, WINDOW_ELSEWHERE)
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise UserError(
            f"--on ray: {describe_error(cause)}; all machines need the same installation and the same files"
        ) from None


def share_cluster(ray: Any, n_workers: int, uses_gpu: bool) -> dict[str, Any]:
    """Give each worker a GPU, if there are any, or else an equal share of all cores that fits a node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(node.get("CPU", 0)) for node in nodes]
    smallest = min(filter(None, cores), default=1)
    share = min(max(1, sum(cores) // n_workers), smallest)
    free = ray.available_resources()
    if uses_gpu and any(node.get("GPU") for node in nodes):
        needs, is_full = {"num_cpus": 1, "num_gpus": 1}, free.get("GPU", 0) < 1
    else:
        needs, is_full = {"num_cpus": share}, free.get("CPU", 0) < share
    if is_full:
        say(f"waiting for Ray to find a place for a worker with {needs}")
    return needs


def watch_head(address: str, is_over: threading.Event) -> None:
    """Warn when Ray's head has gone. Requests to it then wait for a minute, after which Ray ends
    this process, with a message for its developers. A head that is kept elsewhere may come back
    before.
    """
    host, _, port = address.rpartition(":")
    while not is_over.wait(HEAD_LOOK_S):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            say_once(
                f"warning: Ray's head, {address}, cannot be reached ({error.strerror or error}); unless it "
                "comes back within a minute, Ray ends this command; the same command with --resume continues"
            )


class _RayWorker:
    def __init__(self, ray: Any, needs: dict[str, Any]) -> None:
        self._ray = ray
        # An actor that Ray started again would wait for a machine with the tasks that it had.
        self._actor = ray.remote(_Actor).options(max_restarts=0, **needs).remote()

    def prepare(self, make_work: Callable[[], Work]) -> None:
        self._actor.prepare.remote(os.getcwd(), make_work).future().result()

    def do(self, task: Any) -> Any:
        return self._actor.do.remote(task).future().result()

    def kill(self) -> None:
        self._ray.kill(self._actor)


class _Actor:
    def prepare(self, folder: str, make_work: Callable[[], Work]) -> None:
        try:
            os.chdir(folder)  # so that relative names mean the same there
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be entered on {socket.gethostname()} ({error.strerror}); all machines "
                "need the same files"
            ) from None
        self.work = make_work()

    def do(self, task: Any) -> Any:
        return self.work(task)
