"""Workers on other machines: actors of Ray, in a cluster that runs already or in one that lasts as
long as the command, whose nodes are the tasks of an array job of Slurm.

Ray places the actors, carries tasks and results, and notices what is lost; Slurm lends machines and
queues lost jobs again. All machines have the same installation and see the same files under the same
names.
"""

import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from nmt.system.errors import UserError
from nmt.system.extras import import_extra
from nmt.system.pool import Executor, use_processes
from nmt.system.progress import say, say_once

MAX_JOBS = 5  # for each worker: that Slurm gets before one of them is at work
# Results are taken in order. In a simulation of 1,000 workers of which 1 % are ten times slower than the others, a
# window of 8 keeps 37 % of them busy, one of 32 97 % (scripts/bench/workers.py).
WINDOW_ELSEWHERE = 32
HEAD_LOOK_S = 10.0  # between two looks at Ray's head
NODE = "nmt_worker"  # what a node of ours offers to Ray, once
# Whoever reaches Ray's ports could otherwise run programs as this user.
NODE_SCRIPT = """\
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$SLURM_CPUS_ON_NODE}} RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
exec {python} -m ray.scripts.scripts start --address {address} --resources '{{"{node}": 1}}' --num-cpus 1 \
--disable-usage-stats --block"""


@contextmanager
def open_executor(on: str | None, n_workers: int, uses_gpu: bool) -> Iterator[Executor]:
    """Open what `--on` names: ray, "slurm" with options of sbatch, or this machine."""
    if on is None:
        yield use_processes(n_workers)
        return
    engine, *options = shlex.split(on) or [""]
    if engine not in ("ray", "slurm") or (engine == "ray" and options):
        raise UserError(f"--on {on}: give ray, or 'slurm' followed by options of sbatch")
    is_slurm = engine == "slurm"
    if is_slurm:  # ray reads these when it is imported
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = import_extra("ray")
    # Ray's own search for an address waits long for a cluster of this machine that has died.
    address = "local" if is_slurm else os.environ.get("RAY_ADDRESS", "local")
    options_of_head = {"num_cpus": 0, "include_dashboard": False} if is_slurm else {}
    quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    try:
        ray.init(address, **quiet, **options_of_head)
    except Exception as error:  # of many kinds
        reason = str(error).partition("\n")[0]
        raise UserError(f"--on {on}: Ray cannot be reached ({reason}); see RAY_ADDRESS") from None
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
            if is_slurm:
                jobs = SlurmJobs(options, n_workers, head)
                stack.callback(jobs.cancel)
                jobs.submit(n_workers)
                needs, look_after = {"num_cpus": 0, "resources": {NODE: 1}}, jobs.replace_ended
            else:
                needs = share_cluster(ray, n_workers, uses_gpu)
                look_after = partial(_wait_for_place, needs)
            start_worker = partial(_RayWorker, ray, needs)
            losses = list_losses(ray)
            yield Executor(n_workers, True, start_worker, losses, WINDOW_ELSEWHERE, look_after)
    except ray.exceptions.RayError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        reason = str(cause).partition("\n")[0]
        raise UserError(
            f"--on {on}: {reason}; all machines need the same installation and the same files"
        ) from None


def share_cluster(ray: Any, n_workers: int, uses_gpu: bool) -> dict[str, Any]:
    """Give each worker a GPU, if there are any, or else an equal share of all cores that fits a node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(node.get("CPU", 0)) for node in nodes]
    smallest = min(filter(None, cores), default=1)
    share = min(max(1, sum(cores) // n_workers), smallest)
    if uses_gpu and any(node.get("GPU") for node in nodes):
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": share}


def list_losses(ray: Any) -> tuple[type[Exception], ...]:
    known = ray.exceptions
    return (known.RayActorError, known.ObjectLostError, known.OutOfMemoryError, known.NodeDiedError)


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


def _wait_for_place(needs: dict[str, Any], n_started: int) -> None:
    if n_started == 0:
        say_once(f"waiting for Ray to find a place for a worker with {needs}")


class _RayWorker:
    def __init__(self, ray: Any, needs: dict[str, Any]) -> None:
        self._ray, self._folder = ray, os.getcwd()
        # An actor that Ray started again would wait for a machine with the tasks that it had.
        self._actor = ray.remote(_Actor).options(max_restarts=0, **needs).remote()

    def submit(self, work: Callable[[Any], Any], task: Any) -> "Future[Any]":
        future: Future[Any] = self._actor.run.remote(self._folder, work, task).future()
        return future

    def kill(self) -> None:
        self._ray.kill(self._actor)


class _Actor:
    def run(self, folder: str, work: Callable[[Any], Any], task: Any) -> Any:
        try:
            os.chdir(folder)  # so that relative names mean the same there
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be entered on {socket.gethostname()} ({error.strerror}); all machines "
                "need the same files"
            ) from None
        return work(task)


class SlurmJobs:
    """The jobs of Slurm that are nodes of Ray: as many as workers, replaced as they end."""

    def __init__(self, options: list[str], n_workers: int, address: str) -> None:
        self.n_workers, self.options = n_workers, options
        words = {"python": shlex.quote(sys.executable), "address": address, "node": NODE}
        self.script = NODE_SCRIPT.format(**words)
        self.name = f"nmt-{secrets.token_hex(4)}"
        self.log = Path.cwd() / f"{self.name}.log"
        self.n_submitted = 0  # since a worker was last at work

    def cancel(self) -> None:
        run_slurm("scancel", f"--name={self.name}", f"--user={os.getuid()}")

    def submit(self, n: int) -> None:
        self.n_submitted += n
        if self.n_submitted > MAX_JOBS * self.n_workers:
            raise UserError(f"--on slurm: the jobs end too often; see {self.log}")
        own = [f"--array=1-{n}", f"--job-name={self.name}", "--requeue", "--nodes=1"]
        own += ["--open-mode=append", f"--output={self.log}", f"--wrap={self.script}"]
        run_slurm("sbatch", *own, *self.options)

    def replace_ended(self, n_started: int) -> None:
        if n_started:
            self.n_submitted = 0
        listed = run_slurm("squeue", "--noheader", "--array", f"--name={self.name}", "--me")
        n_lost = self.n_workers - len(listed.splitlines())
        if n_lost > 0:
            say(f"{n_lost} jobs of Slurm have ended; submitting as many again")
            self.submit(n_lost)


def run_slurm(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]}: not found; give --on slurm where Slurm's commands are installed"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().partition("\n")[0]
        raise UserError(f"{words[0]}: {reason}; check the options after --on slurm") from None
    return done.stdout
