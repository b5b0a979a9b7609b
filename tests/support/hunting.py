"""Watches how a reader takes what a stranger, a crash or a careless program wrote.

A reader returns or raises one UserError, a printable line that names the file. It is called in a
forked process with little memory and processor time: one that hangs, swells or crashes is a find
like one that raises something else. A case is known, and then made in a folder of its own, or it is
drawn from the name of the target and a number, so that these two repeat it on any machine.
"""

import faulthandler
import io
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from support.text_lines import read_text_lines

SECONDS_PER_CASE = 4  # of processor time
MEMORY_MB = 200  # for each case
ADDRESS_SPACE_MB = 1_200
MAX_MESSAGE = 2_100  # characters
N_FINDS = 20  # then a target is given up: they are many forms of the same

Change = Callable[[Path], object]  # of a folder
Draw = Callable[[Random, Path], object]  # writes a case into the folder
REFUSED, READ, EITHER = "refused", "read", "either"


@dataclass(frozen=True)
class Case:
    name: str
    write: Change  # into a folder that the target has prepared
    outcome: str = EITHER
    file: str = ""  # which a refusal must name


def leave_as_it_is(folder: Path) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Target:
    """A reader of something that a stranger may have written."""

    name: str
    read: Callable[[Path], object]  # a folder
    draw: Draw | None = None
    prepare: Change = leave_as_it_is
    address_space_mb: int = ADDRESS_SPACE_MB  # a sparse file may be mapped that has more

    def write_anew(self, case: Case, folder: Path) -> None:
        """Write a known case, which needs nothing that an earlier one left."""
        shutil.rmtree(folder)
        folder.mkdir()
        self.prepare(folder)
        case.write(folder)

    def draw_case(self, number: int) -> Case:
        assert self.draw is not None
        rng = Random(f"{self.name} {number}")
        return Case(str(number), partial(self.draw, rng))


@dataclass
class Report:
    n_cases: int = 0
    n_read: int = 0  # the others were refused
    seconds: float = 0.0
    finds: list[str] = field(default_factory=list)


def find_fault(read: Callable[[Path], object], case: Case, folder: Path) -> tuple[str, bool]:
    """What is wrong with the way in which the reader takes the case, "" if nothing is; and whether it
    was read.
    """
    sys.stderr = said = io.StringIO()  # warnings
    refusal = None
    try:
        read(folder)
    except UserError as error:
        refusal = str(error)
    except Exception as error:
        place = error.__traceback__
        while place and place.tb_next:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
        return f"{type(error).__name__}: {ascii(str(error))[:300]} at {where}", False
    finally:
        sys.stderr = sys.__stderr__
    for line in [*said.getvalue().split("\n"), refusal or ""]:
        if escape_line(line) != line or len(line) > MAX_MESSAGE:
            return f"said {len(line)} characters: {ascii(line)[:300]}", False
    if refusal is None:
        return ("was read" if case.outcome == REFUSED else ""), True
    if case.outcome == READ:
        return f"was refused: {ascii(refusal)[:300]}", False
    if str(folder) not in refusal or case.file not in refusal.replace(str(folder), ""):
        return f"refused without the file: {ascii(refusal)[:300]}", False
    return "", False


def hunt_known(target: Target, known: Sequence[Case], folder: Path) -> Report:
    cases = [replace(case, write=partial(target.write_anew, case)) for case in known]
    return _hunt(target, cases.__getitem__, len(cases), folder)


def hunt_drawn(target: Target, n: int, folder: Path) -> Report:
    return _hunt(target, target.draw_case, n, folder)


def _hunt(target: Target, find_case: Callable[[int], Case], n: int, folder: Path) -> Report:
    """Try the cases, in as many processes, one after another, as their deaths require."""
    report = Report()
    folder.mkdir(parents=True)
    target.prepare(folder)
    state = mmap.mmap(-1, 24)  # the case at hand; how many were tried and how many of them read
    finds = folder.parent / f"{folder.name}.finds"
    finds.touch()
    started_at = time.monotonic()
    first = 0
    while first < n and len(report.finds) < N_FINDS:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _try_cases(target, find_case, range(first, n), folder, state, finds)
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        number, n_cases, n_read = struct.unpack("<QQQ", state[:])
        report.n_cases += n_cases
        report.n_read += n_read
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            _note(finds, target, find_case(number), f"the process died of {name}")
        report.finds = read_text_lines(finds)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"{target.name} {number}: the case could not be made"
            break
        first = number + 1
    report.seconds = time.monotonic() - started_at
    return report


def _note(finds: Path, target: Target, case: Case, fault: str) -> None:
    with finds.open("a") as file:
        file.write(f"{target.name} {case.name}: {fault}\n")


def _try_cases(
    target: Target,
    find_case: Callable[[int], Case],
    numbers: range,
    folder: Path,
    state: mmap.mmap,
    finds: Path,
) -> None:
    """Be the process in which the reader is called."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    allowed = _read_pages(0) + (target.address_space_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    n_read = n_faults = 0
    for n_cases, number in enumerate(numbers, 1):
        state[:] = struct.pack("<QQQ", number, n_cases, n_read)
        case = find_case(number)
        case.write(folder)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        memory_before = _read_pages(1)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
        fault, is_read = find_fault(target.read, case, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        taken_mb = peak - memory_before >> 20
        if taken_mb > MEMORY_MB:
            fault = f"took {taken_mb} MB of memory"
        n_read += is_read
        if fault:
            n_faults += 1
            _note(finds, target, case, fault)
        if n_faults == N_FINDS:
            break
    state[:] = struct.pack("<QQQ", number, n_cases, n_read)


def _read_pages(column: int) -> int:
    """The bytes of this process: 0, of its address space; 1, of those that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * mmap.PAGESIZE
