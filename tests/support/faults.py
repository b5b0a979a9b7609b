"""What may happen to a start of a command: it is killed before the change of a file, its disk is slow, and so
are its updates and its search. Where a fault strikes follows from a number.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from nmt.system import files


@dataclass(frozen=True)
class Faults:
    watched: str = ""  # the folder in which changes of files are counted
    die_at: int = 0  # kill -9 before the change of this number; 0: never
    # Seconds more for each save, decode, update
    slow: Mapping[str, float] = field(default_factory=dict)
    is_recorded: bool = False  # each update to updates.jsonl

    def arm(self, folder: Path) -> None:
        """Prepare this process, whose own `folder` gets phase, changes, updates.jsonl."""
        import nmt.translate.engine
        from nmt.train.events import Listener

        phase = os.open(folder / "phase", os.O_WRONLY | os.O_CREAT)

        def enter(_: Listener, name: str) -> None:
            os.pwrite(phase, name.ljust(12).encode(), 0)

        def hear_update(_: Listener, step: int, update: Any, micro_sums: Any) -> None:
            if "update" in self.slow:
                wait(self.slow["update"], folder / "slow-update")
            if self.is_recorded:
                record_update(folder / "updates.jsonl", step, update, micro_sums)

        exchange(Listener, "enter", enter)
        exchange(Listener, "hear_update", hear_update)
        exchange(files, "on_change", DiskFaults(self, folder).meet)
        if "decode" in self.slow:
            search = nmt.translate.engine.search

            def search_slowly(*args: Any, **options: Any) -> Any:
                wait(self.slow["decode"], folder / "slow-decode")
                return search(*args, **options)

            exchange(nmt.translate.engine, "search", search_slowly)


def exchange(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Exchange a function for good; fail if there is none of that name any more."""
    mock.patch.object(owner, name, function).start()


def wait(seconds: float, mark: Path) -> None:
    """Append a byte to the file `mark`, and take so many seconds."""
    with mark.open("ab") as file:
        file.write(b".")
    time.sleep(seconds)


def record_update(path: Path, step: int, update: Any, micro_sums: Any) -> None:
    """Append an update as this rank sees it: what its micro-batches say, their sums, the target tokens
    of all.
    """
    micros = {
        micro.number: (digest_pairs(micro.batch), sums)
        for micro, sums in zip(update.micros, micro_sums.tolist(), strict=True)
        if micro.batch.n_tokens
    }
    n_blanks = len(update.micros) - len(micros)
    line = {"step": step, "n_tgt": update.n_tgt, "blanks": n_blanks, "micros": micros}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def digest_pairs(batch: Any) -> str:
    """What the pairs of a micro-batch are, in order."""
    sides = [
        (side.tokens[: side.n_live].tolist(), side.offsets.tolist())
        for side in (batch.src, batch.tgt)
    ]
    pairs = repr((sides, batch.labels[batch.labels >= 0].tolist()))
    return hashlib.sha256(pairs.encode()).hexdigest()


class DiskFaults:
    """What a process meets before it changes a file: a slow disk, or its end.

    Each change under `watched` is a line of the file `changes`. So is the moment within the removal of a
    folder, when half of it is gone, and that within a write of tensors, when half of them are there.
    """

    def __init__(self, faults: Faults, folder: Path) -> None:
        self.faults, self.folder = faults, folder
        self.trace = os.open(folder / "changes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.n = 0

    def meet(self, change: str, path: Path) -> None:
        is_tensors = path.suffix == ".safetensors"
        if change == "write" and is_tensors and "save" in self.faults.slow:
            wait(self.faults.slow["save"], self.folder / "slow-save")
        if not self.faults.watched or not str(path).startswith(self.faults.watched):
            return
        if change == "fsync" and is_tensors and self.is_end("within a write of", path):
            os.truncate(path, path.stat().st_size // 2)
            die()
        if self.is_end(change, path):
            die()
        is_folder = path.is_dir() and not path.is_symlink()
        if change == "remove" and is_folder and self.is_end("within a removal of", path):
            entries = sorted(path.rglob("*"), reverse=True)  # what is in a folder before it
            for entry in entries[: (len(entries) + 1) // 2]:
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            die()

    def is_end(self, change: str, path: Path) -> bool:
        """Count a moment, and tell whether it is the last."""
        if self.n == self.faults.die_at > 0:  # of another thread, while the process is being killed
            return False
        self.n += 1
        os.write(self.trace, f"{change} {path}\n".encode())
        return self.n == self.faults.die_at


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
