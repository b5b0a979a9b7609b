"""Real starts of nmt-train and other commands by the hundred, and what may happen to them: kills, signals, slow disks.

A start costs three seconds because torch is imported. Here one process imports everything and
trains nothing, and each start is a fork of it: a process and a group of its own that calls the
real command, with the environment that torchrun would give a rank. test_kills.py shows that it ends
in the bits of a start from the shell. Faults are armed in the fork alone, and where they strike
follows from a seed or from a number. `make soak` asks for more of everything.
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file

from nmt.checkpoint.checkpoint import COMMON_FILES
from nmt.checkpoint.run_checkpoints import find_newest, list_steps
from nmt.system import files
from nmt.system.files import read_json, verify
from nmt.system.run_folder import OPTIMIZER_FILE, VOCAB_FILE, RunFolder
from support.toy_words import WORDS
from support.waiting import HANG_S

IS_SOAK = os.environ.get("NMT_SOAK") == "1"
# Else ranks started again look for dead ones, for hours
SEPARATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
T = TypeVar("T")
RANK = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def counted(usual: T, soak: T) -> T:
    """What to take in `make test`, and what in `make soak`."""
    return soak if IS_SOAK else usual


@dataclass(frozen=True)
class Order:
    """One process to be forked, and what is to happen to it."""

    argv: list[str]
    folder: str  # of its own: stderr, phase, updates.jsonl, changes
    environment: dict[str, str] = field(default_factory=dict)
    watched: str = ""  # the folder in which changes of files are counted
    die_at: int = 0  # kill -9 before the change of this number; 0: never
    # Seconds more for each save, decode, update
    slow: dict[str, float] = field(default_factory=dict)
    is_recorded: bool = False  # each update to updates.jsonl
    command: str = "train"
    imports: list[str] = field(default_factory=list)  # more of what the command imports
    program: str = ""  # a file to run instead of a command, with `argv`


# In the process that forks, and in its forks.


def serve() -> None:
    """Fork a child for each line of standard input; tell its pid, later its exit code, on standard
    output.
    """
    _import_all()
    gc.collect()
    gc.freeze()  # what is never collected is never copied
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, awake], [], [])
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = Order(**json.loads(line))
                for name in order.imports:
                    importlib.import_module(name)
                pid = os.fork()
                if not pid:
                    _run(order)
                children.add(pid)
                _tell(pid=pid)
        if awake in ready:
            os.read(awake, 1 << 12)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                children.remove(pid)
                _tell(gone=pid, code=os.waitstatus_to_exitcode(status))
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _tell(**message: int) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _import_all() -> None:
    """All that a start imports sooner or later."""
    for name in (
        "lxml.etree",
        "numpy.ctypeslib",
        "sacrebleu",
        "nmt.commands.train",
        "nmt.corpus.prepare",
        "nmt.train.run_start",
        "nmt.engines.cuda.training",
        "nmt.extras.report.page",
    ):
        importlib.import_module(name)
    import torch

    from nmt.engines.cpu.backend import load_compiled

    torch.set_num_threads(1)
    load_compiled(torch.float32)  # imports numba, which is to have its types ready


def _run(order: Order) -> None:
    """Be a start from the shell, to the end, except that the modules are not taken down, which
    takes a second.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    folder = Path(order.folder)
    for number, name in enumerate(("/dev/null", "stdout", "stderr")):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    for name in RANK:
        os.environ.pop(name, None)
    os.environ.update(order.environment)
    code = 1
    try:
        if order.program:
            sys.argv = [order.program, *order.argv]
            runpy.run_path(order.program, run_name="__main__")
            raise SystemExit(0)
        command = importlib.import_module(f"nmt.commands.{order.command}")
        _arm(order, folder)
        code = command.main(order.argv)
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arm(order: Order, folder: Path) -> None:
    import nmt.translate.engine
    from nmt.train.events import Listener

    _tell_phases(os.open(folder / "phase", os.O_WRONLY | os.O_CREAT))
    if order.is_recorded:
        _record(folder / "updates.jsonl")
    rooms = {
        "decode": (nmt.translate.engine, "search"),
        "update": (Listener, "hear_update"),
    }
    for what in order.slow.keys() & rooms.keys():
        _slow_down(*rooms[what], order.slow[what], folder / f"slow-{what}")
    _exchange(files, "on_change", DiskFaults(order, folder).meet)


def _exchange(module: Any, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(module, name), (
        f"{module.__name__} has no {name} any more; the harness must learn the new one"
    )
    setattr(module, name, function)


def _slow_down(module: Any, name: str, seconds: float, mark: Path) -> None:
    """Have each call take so many seconds more, and append a byte to the file `mark`."""
    function = getattr(module, name)

    def slow(*args: Any, **named: Any) -> Any:
        _wait(seconds, mark)
        return function(*args, **named)

    _exchange(module, name, slow)


def _wait(seconds: float, mark: Path) -> None:
    with mark.open("ab") as file:
        file.write(b".")
    time.sleep(seconds)


def _tell_phases(file: int) -> None:
    """Keep in `file` what the process is at."""
    from nmt.train.events import Listener

    def enter(_: Listener, phase: str) -> None:
        os.pwrite(file, phase.ljust(12).encode(), 0)

    _exchange(Listener, "enter", enter)


def _record(path: Path) -> None:
    """Append each update as this rank sees it: what its micro-batches say, their sums, the target
    tokens of all.
    """
    from nmt.train.events import Listener

    def hear_update(_: Listener, step: int, update: Any, micro_sums: Any) -> None:
        micros = {
            micro.number: (content(micro.batch), sums)
            for micro, sums in zip(update.micros, micro_sums.tolist(), strict=True)
            if micro.batch.n_tokens
        }
        line = {
            "step": step,
            "n_tgt": update.n_tgt,
            "blanks": len(update.micros) - len(micros),
            "micros": micros,
        }
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    _exchange(Listener, "hear_update", hear_update)


def content(batch: Any) -> str:
    """What the pairs of a micro-batch are, in order."""
    sides = [
        (side.tokens[: side.n_live].tolist(), side.offsets.tolist())
        for side in (batch.src, batch.tgt)
    ]
    return hashlib.sha256(
        repr((sides, batch.labels[batch.labels >= 0].tolist())).encode()
    ).hexdigest()


class DiskFaults:
    """What a process meets before it changes a file: a slow disk, or its end.

    Each change under `watched` is a line of the file `changes`. So is the moment within the removal of a
    folder, when half of it is gone, and that within a write of tensors, when half of them are there.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self.watched, self.die_at = order.watched, order.die_at
        self.save_s, self.mark = order.slow.get("save"), folder / "slow-save"
        self.trace = os.open(folder / "changes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.n = 0

    def meet(self, what: str, path: Path) -> None:
        is_tensors = path.suffix == ".safetensors"
        if what == "write" and is_tensors and self.save_s:
            _wait(self.save_s, self.mark)
        if not self.watched or not str(path).startswith(self.watched):
            return
        if what == "fsync" and is_tensors and self.is_end("within a write of", path):
            os.truncate(path, path.stat().st_size // 2)
            die()
        if self.is_end(what, path):
            die()
        is_folder = path.is_dir() and not path.is_symlink()
        if what == "remove" and is_folder and self.is_end("within a removal of", path):
            names = sorted(path.rglob("*"), reverse=True)  # what is in a folder before it
            for entry in names[: (len(names) + 1) // 2]:
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            die()

    def is_end(self, what: str, path: Path) -> bool:
        """Count a moment, and tell whether it is the last."""
        if self.n == self.die_at > 0:  # of another thread, while the process is being killed
            return False
        self.n += 1
        os.write(self.trace, f"{what} {path}\n".encode())
        return self.n == self.die_at


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# In the process of the tests.


class Forks:
    """The process that forks, as the tests see it. It ends when they end, and what it started with
    it.
    """

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in RANK}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.soaking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
            bufsize=0,
        )
        self.pids: list[int] = []
        self.codes: dict[int, int] = {}
        self.rest = b""

    def fork(self, order: Order) -> int:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        n = len(self.pids)
        deadline = time.monotonic() + HANG_S
        while len(self.pids) == n:
            assert time.monotonic() < deadline
            self.listen(1.0)
        return self.pids[-1]

    def listen(self, seconds: float) -> None:
        """Take in what has been told, or is within so many seconds."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return
        data = self.process.stdout.read(1 << 16)
        assert data, "the process that forks is gone"
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "pid" in message:
                self.pids.append(message["pid"])
                self.codes.pop(message["pid"], None)  # numbers come again
            else:
                self.codes[message["gone"]] = message["code"]


@functools.cache
def forks() -> Forks:
    """One for all tests."""
    return Forks()


class Start:
    """One start of nmt-train on so many ranks. The exit code of one that was killed is -9."""

    def __init__(
        self, folder: Path, argv: Sequence[str], size: int = 1, order: Order | None = None
    ) -> None:
        template = order or Order([], "")
        shutil.rmtree(folder, ignore_errors=True)
        port = free_port()
        self.folders = [folder / f"rank-{rank}" for rank in range(size)]
        self.pids = []
        for rank, own in enumerate(self.folders):
            own.mkdir(parents=True)
            place = (rank, rank, 0, size, size, "127.0.0.1", port)
            environment = dict(zip(RANK, map(str, place), strict=True)) if size > 1 else {}
            self.pids.append(
                forks().fork(
                    replace(
                        template,
                        argv=list(argv),
                        folder=str(own),
                        environment=template.environment | environment,
                    )
                )
            )

    @property
    def codes(self) -> list[int | None]:
        """Of each rank; None while it lives."""
        forks().listen(0.0)
        return [forks().codes.get(pid) for pid in self.pids]

    def wait(self, seconds: float = HANG_S, is_agent: bool = True) -> list[int]:
        """The exit codes. `is_agent`: as torchrun does it, the failure of one rank is the end of
        all.
        """
        deadline, mercy = time.monotonic() + seconds, 0.0
        while None in (codes := self.codes):
            assert time.monotonic() < deadline, f"still there after {seconds} s:\n{self.told()}"
            if is_agent and any(codes) and not mercy:
                mercy = time.monotonic() + 3.0
                self.signal(signal.SIGTERM)
            elif mercy and time.monotonic() > mercy:
                self.signal(signal.SIGKILL)
            forks().listen(0.02)
        return [code for code in codes if code is not None]

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        if number == signal.SIGKILL:
            # Stopped first, no rank can leave by itself because it lost one that was killed before it.
            self.signal(signal.SIGSTOP, ranks)
        for rank, code in enumerate(self.codes):
            if code is None and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):  # it has just gone
                    os.kill(self.pids[rank], number)

    def until(self, is_so: Callable[[], bool], seconds: float = HANG_S) -> None:
        """Wait for something to come about while the start lives."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline and set(self.codes) == {None}, (
                f"{self.codes}\n{self.told()}"
            )
            time.sleep(0.002)

    def phase(self, rank: int = 0) -> str:
        """What that rank is at, or was when it died."""
        file = self.folders[rank] / "phase"
        return file.read_text().strip() if file.exists() and file.stat().st_size else "start"

    def is_in(self, what: str) -> bool:
        """Whether rank 0 has come to what was slowed down: save, decode, update."""
        return (self.folders[0] / f"slow-{what}").exists()

    def told(self) -> str:
        return "\n".join(
            (folder / "stderr").read_text(errors="replace")
            for folder in self.folders
            if (folder / "stderr").exists()
        )

    def orphans(self) -> list[int]:
        """Processes of the groups that these ranks led."""
        return [pid for pid, group in living() if group in self.pids]


class Torchrun:
    """One start of nmt-train, or another program, by a real torchrun. All its processes bear a mark in their
    environment.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        size: int = 2,
        options: Sequence[str] = (),
        program: Sequence[str] = ("-m", "nmt.commands.train"),
    ) -> None:
        self.mark = f"NMT_SOAK_MARK={random.SystemRandom().getrandbits(64):x}"
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "torchrun.stderr"
        name, _, value = self.mark.partition("=")
        environment = {key: text for key, text in os.environ.items() if key not in RANK}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={size}",
            "--standalone",
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            "--shutdown-timeout=60",
            *options,
            *program,
            *argv,
        ]
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                cwd=folder,
                env=environment | SEPARATE | {name: value, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def living(self) -> list[int]:
        """The pids of the agent, its ranks and whatever they started."""
        return [pid for pid, _ in living() if self.mark in environment_of(pid)]

    def rank(self, number: int) -> int:
        """The pid of a rank, 0 where it is not there."""
        return next((pid for pid in self.living() if f"RANK={number}" in environment_of(pid)), 0)

    def until(self, is_so: Callable[[], bool], seconds: float = HANG_S) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline and self.process.poll() is None, self.told()
            time.sleep(0.01)

    def until_gone(self, seconds: float = HANG_S) -> None:
        deadline = time.monotonic() + seconds
        while pids := self.living():
            assert time.monotonic() < deadline, f"{pids} still live: {self.told()}"
            self.process.poll()
            time.sleep(0.02)

    def told(self) -> str:
        return self.errors.read_text(errors="replace")

    def end(self) -> None:
        """After a test, however it went."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def living() -> list[tuple[int, int]]:
    """(pid, process group) of what is no zombie."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if fields[0] not in "ZX":
            found.append((int(folder.name), int(fields[2])))
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Ground:
    """A prepared toy corpus and where its runs lie."""

    folder: Path
    config: Path

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)

    def argv(self, name: str, *settings: str) -> list[str]:
        return ["--config", str(self.config), f"out={self.folder / name}", *settings]

    def start(
        self, name: str, *settings: str, size: int = 1, order: Order | None = None, at: str = ""
    ) -> Start:
        """Start the run `name`; `at` sets apart what goes on at the same time."""
        return Start(self.folder / f"{name}{at}.ranks", self.argv(name, *settings), size, order)

    def finish(self, name: str, *settings: str, size: int = 1) -> RunFolder:
        """The run `name`, at its end, undisturbed from here on."""
        start = self.start(name, *settings, size=size)
        assert set(start.wait()) == {0}, start.told()
        return self.run(name)


def make_ground(folder: Path) -> Ground:
    """A toy run of 16 updates with dropout: log lines, validations and checkpoints come at odds
    with each other.
    """
    rng = random.Random(1)
    for split, n in (("train", 300), ("valid", 12)):
        drawn = [[rng.choice(list(WORDS)) for _ in range(rng.randint(2, 9))] for _ in range(n)]
        texts = {"en": drawn, "de": [[WORDS[word] for word in words] for words in drawn]}
        for language, rows in texts.items():
            (folder / f"{split}.{language}").write_text(
                "".join(" ".join(row) + "\n" for row in rows), "utf-8"
            )
    config = folder / "toy.yaml"
    config.write_text(
        f"""
name: toy
seed: 3
data:
  root: {folder}
  store: {folder}/store
  workers: 1
  train: [{{src: train.en, tgt: train.de}}]
  valid: {{src: valid.en, tgt: valid.de}}
vocab: {{size: 80}}
model: {{d_model: 16, d_ff: 32, n_heads: 2, n_layers: 1, dropout: 0.2}}
optimizer: {{warmup_steps: 20}}
training:
  steps: 16
  grouping: length
  src_tokens: 300
  tgt_tokens: 300
  micro_tokens: 110
  precision: fp32
  log_every: 5
  validate_every: 4
  checkpoint_every: 3
  checkpoint_minutes: null
  keep_checkpoints: 2
decoding: {{max_extra: 3, batch_tokens: 40}}
evaluation: {{sentences: 6}}
""",
        "utf-8",
    )
    return Ground(folder, config)


def digest(run: RunFolder) -> str:
    """Of all that a run is to end in."""
    return hashlib.sha256(json.dumps(contents(run), sort_keys=True).encode()).hexdigest()


def contents(run: RunFolder) -> dict[str, Any]:
    """Weights, moments, the integers a run continues from, its metrics without times."""
    last = run.checkpoints / "last"
    state = read_json(last / "state.json")
    return {
        "state": {
            name: state[name] for name in ("step", "cursor", "tokens_seen", "best", "best_step")
        },
        "tensors": tensor_digests(last),
        "metrics": lines(run),
    }


def check_same(run: RunFolder, whole: RunFolder) -> None:
    """A run ended like the one that nobody disturbed. What differs is told before the digests are
    compared.
    """
    one, other = contents(run), contents(whole)
    assert one["state"] == other["state"], f"{run.path}: {one['state']} and not {other['state']}"
    for got, expected in zip(one["metrics"], other["metrics"], strict=False):
        assert got == expected, f"{run.path}: {got} and not {expected}"
    wrong = [
        name for name in other["tensors"] if one["tensors"].get(name) != other["tensors"][name]
    ]
    assert not wrong and digest(run) == digest(whole), (
        f"{run.path}: {wrong}, {len(one['metrics'])} lines"
    )


def tensor_digests(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    return {
        name: hashlib.sha256(
            repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes()
        ).hexdigest()
        for name, tensor in sorted(tensors.items())
    }


def lines(run: RunFolder) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs between any two runs."""
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith("_s") and name != "memory_bytes"
        }
        for line in found
    ]


def steps_logged(run: RunFolder) -> int:
    """The last update of which metrics.jsonl tells, 0 if it tells of none; a line that is being
    written is none.
    """
    text = run.metrics.read_text() if run.metrics.exists() else ""
    return max((json.loads(line)["step"] for line in text.split("\n")[:-1]), default=0)


def check_readable(run: RunFolder) -> list[int]:
    """What must hold at any moment at all: each checkpoint that has its name is whole, and so is
    what is linked.
    """
    found = list_steps(run)
    for step in found:
        verify(run.checkpoint(step), (*COMMON_FILES, VOCAB_FILE, OPTIMIZER_FILE))
    newest = find_newest(run)
    assert (newest.step if newest else None) == (found[-1] if found else None)
    for link in (run.checkpoints / "last", run.checkpoints / "best"):
        assert not link.is_symlink() or link.exists(), f"{link} leads nowhere"
    for file in (run.config, *run.vocabs, run.status):
        assert not file.exists() or file.stat().st_size, f"{file} is empty"
    if run.status.exists():
        read_json(run.status)
    return found


def traces(run: RunFolder) -> set[tuple[str, int | str]]:
    """What the next start can see: names and sizes, where links lead; of what is hidden and
    half-written, its kind.
    """
    found: set[tuple[str, int | str]] = set()
    for path in run.path.rglob("*"):
        name = re.sub(r"\.\d+\.tmp", ".tmp", str(path.relative_to(run.path)))
        if not any(part[0] == "." for part in path.relative_to(run.path).parts[:-1]):
            kind = os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else "file"
            found.add(
                (name, path.stat().st_size if kind == "file" and path.name[0] != "." else kind)
            )
    return found


def check_done(run: RunFolder, steps: int) -> None:
    """What must hold of a run that has come to its end, whatever happened on the way."""
    assert check_readable(run)[-1] == steps
    assert (run.checkpoints / "last").resolve() == run.checkpoint(steps).resolve()
    assert [path.name for path in run.checkpoints.iterdir() if path.name[0] == "."] == []


if __name__ == "__main__":
    serve()
