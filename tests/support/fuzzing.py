"""Hostile input in any number, the same on every machine: what a fuzzer feeds to a reader, and how it
is watched.

Case n of a target is drawn from the name of the target and n alone, so a find is repeated by these
two. Half of the mutations know the format: they change one place in the tree of a real file. The
others cut, double and splice its bytes, and some cases are made from nothing. That is thousands of
cases a second; Hypothesis draws such trees at a hundredth of the speed. A reader is called in a
forked process with little memory and processor time: one that hangs, swells or crashes is a find
like one that raises something else than UserError.
"""

import copy
import faulthandler
import io
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from nmt.system.errors import UserError
from nmt.system.escapes import escape_line

SECONDS_PER_CASE = 5  # of processor time
MEMORY_MB = 300  # more than before the first case
MAX_MESSAGE = 2_100  # characters
N_FINDS = 20  # then a target is given up: they are many forms of the same

Tree = Any  # what JSON and YAML hold


# ---- strange values ---------------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")
NUMBERS: list[Tree] = [0, -1, 1, 2, 255, 65_536, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63)]
NUMBERS += [2**64, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e16, 1e308, -1e308]
NUMBERS += [NAN, INFINITY, -INFINITY]
TEXTS = ["", " ", "a", "0", "1e5", "true", "null", "~", "NaN", "x" * 300, "../../etc"]
TEXTS += ["/dev/zero", "\0", "a\nb", "a\rb", "\x1b[31m", "\u2028", "\u202e", "\ufeff", "\ud800"]
TEXTS += ["\udcff", "e\u0301", "\U0001f469\u200d\U0001f467", "<script>", "a: b", "- a", "&a", "*a"]
TEXTS += ["!!python/name:os.system", "step-0000001", "model.safetensors", "__class__", "%s%n{}"]

# What has a meaning in one of the formats, or is a trap in it.
TOKENS = [
    token.encode() for token in "\0 \n \r\n \r \t , : { } [ ] \" ' \\ # @ ` ... ~ null".split(" ")
]
TOKENS += [
    token.encode() for token in "NaN -Infinity 1e999 -0 0x10 1_000 .inf \\u \\ud800".split(" ")
]
TOKENS += [b": ", b"- ", b"? ", b"> \n", b"<<: *a", b"&a ", b"*a", b"!!map ", b"!x ", b"---\n"]
TOKENS += ["\ufeff\u2028\u0085"[i].encode() for i in range(3)]
TOKENS += [b"\xff", b"\xed\xa0\x80", b"\x80"]
LONG_TOKENS = [b"9" * 5_000, b"[" * 100_000, b'{"a":' * 20_000, b"x" * 70_000, b"a: " * 2_000]
LONG_SHARE = 0.01  # of the mutations, because they take long


def strange_value(rng: Random) -> Tree:
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(NUMBERS)
    if choice < 0.8:
        return rng.choice(TEXTS)
    if choice < 0.9:
        return rng.choice([None, True, False])
    if choice < 1 - LONG_SHARE:
        return rng.choice([[], {}, [[]], [None], {"": {}}, [0] * 20])
    if choice < 1 - LONG_SHARE / 2:
        return rng.choice(["x" * 20_000, [0] * 2_000])
    nested: Tree = rng.choice(NUMBERS)
    for _ in range(rng.choice([3, 50, 400])):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def free_tree(rng: Random, depth: int = 4) -> Tree:
    """A tree made from nothing."""
    if depth == 0 or rng.random() < 0.3:
        return strange_value(rng)
    if rng.random() < 0.5:
        return [free_tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): free_tree(rng, depth - 1) for _ in range(rng.randrange(4))}


# ---- mutations --------------------------------------------------------------------------------------------------


def mutate_tree(tree: Tree, rng: Random) -> Tree:
    """A copy of the tree that differs in one place, at any depth."""
    if isinstance(tree, dict | list) and tree and rng.random() < 0.8:
        changed = copy.copy(tree)
        place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        changed[place] = mutate_tree(tree[place], rng)
        return changed
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        return _mutate_mapping(tree, rng)
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        return _mutate_list(tree, rng)
    if isinstance(tree, str) and rng.random() < 0.5:
        at = rng.randrange(len(tree) + 1)
        return tree[:at] + rng.choice([*TEXTS, tree]) + tree[at + rng.randrange(3) :]
    if type(tree) in (int, float) and abs(tree) < 1e300 and rng.random() < 0.5:
        return rng.choice([tree + 1, tree - 1, -tree, float(tree), str(tree), tree * 10**9])
    if rng.random() < 0.2:
        return rng.choice([[tree], {"a": tree}, str(tree), [tree, tree]])
    return strange_value(rng)


def _mutate_mapping(tree: dict[str, Tree], rng: Random) -> dict[str, Tree]:
    key = rng.choice(list(tree))
    changed = dict(tree)
    what = rng.randrange(4)
    if what == 0:
        del changed[key]
    elif what == 1:
        changed[rng.choice(TEXTS)] = changed.pop(key)
    elif what == 2:
        changed[rng.choice([*TEXTS, key.upper(), key + "s"])] = strange_value(rng)
    else:
        changed[key] = tree[rng.choice(list(tree))]
    return changed


def _mutate_list(tree: list[Tree], rng: Random) -> list[Tree]:
    at = rng.randrange(len(tree))
    return rng.choice(
        [
            tree[:at] + tree[at + 1 :],
            tree[:at] + [strange_value(rng)] + tree[at:],
            tree + tree[at:],
            tree[::-1],
            tree * rng.choice([2, 50]),
        ]
    )


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """One place cut off, flipped, overwritten, filled, taken out or doubled."""
    i = rng.randrange(len(data) + 1)
    j = min(len(data), i + rng.choice([1, 2, 4, 8, 40, 400]))
    what = rng.randrange(9)
    if what == 0:
        return data[:i]
    if what == 1 and i < len(data):
        return data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :]
    if what == 2:
        return data[:i] + rng.randbytes(j - i) + data[j:]
    if what == 3:
        return data[:i] + data[j:]
    if what == 4:
        return data[:j] + data[i:]
    if what == 5:  # a number in a binary format
        size = rng.choice([1, 2, 4, 8])
        number = rng.choice(
            [0, 1, 2, (1 << 8 * size) - 1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1]
        )
        return data[:i] + number.to_bytes(size, "little") + data[i + size :]
    token = rng.choice(LONG_TOKENS if rng.random() < LONG_SHARE else TOKENS)
    return data[:i] + token + data[i if what < 8 else j :]


def mutate_often(data: bytes, rng: Random) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        data = mutate_bytes(data, rng)
    return data


# ---- formats ----------------------------------------------------------------------------------------------------


def dump_json(tree: Tree, rng: Random) -> bytes:
    """JSON as a careless program writes it: NaN, lone surrogates, sometimes a key twice."""
    if isinstance(tree, dict) and tree and rng.random() < 0.05:
        items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items()]
        return ("{" + ", ".join([*items, rng.choice(items)]) + "}").encode()
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def dump_yaml(tree: Tree, rng: Random, indent: str = "") -> str:
    """YAML in its block style, in which some of the values are JSON."""
    lines = ""
    for key, value in tree.items():
        name = key if rng.random() < 0.95 else json.dumps(key)
        if isinstance(value, dict) and value and rng.random() < 0.8:
            lines += f"{indent}{name}:\n{dump_yaml(value, rng, indent + '  ')}"
        else:
            is_plain = isinstance(value, str) and rng.random() < 0.5
            lines += f"{indent}{name}: {value if is_plain else json.dumps(value)}\n"
    return lines


def vary_json(seeds: Sequence[Tree]) -> Callable[[Random], bytes]:
    """Cases from the values of real JSON files."""

    def make(rng: Random) -> bytes:
        choice = rng.random()
        if choice < 0.1:
            return dump_json(free_tree(rng), rng)
        tree = rng.choice(seeds)
        if choice < 0.4:
            return mutate_often(json.dumps(tree).encode(), rng)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            tree = mutate_tree(tree, rng)
        return dump_json(tree, rng)

    return make


def vary_yaml(seeds: Sequence[dict[str, Tree]]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        tree = free_tree(rng) if rng.random() < 0.1 else rng.choice(seeds)
        for _ in range(rng.choice([0, 1, 1, 2])):
            tree = mutate_tree(tree, rng)
        text = dump_yaml(tree, rng) if isinstance(tree, dict) else json.dumps(tree)
        data = text.encode("utf-8", "surrogatepass")
        return mutate_often(data, rng) if rng.random() < 0.5 else data

    return make


def vary_lines(make_line: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    """Some lines, a few of which may be anything."""

    def make(rng: Random) -> bytes:
        lines = [make_line(rng) for _ in range(rng.randrange(6))]
        data = b"".join(line + rng.choice([b"\n", b"\n", b"\n", b"\r\n", b""]) for line in lines)
        return mutate_often(data, rng) if rng.random() < 0.5 else data

    return make


def vary_bytes(seeds: Sequence[bytes]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        if rng.random() < 0.03:
            return rng.randbytes(rng.randrange(200))
        return mutate_often(rng.choice(seeds), rng)

    return make


def vary_safetensors(seeds: Sequence[bytes]) -> Callable[[Random], bytes]:
    """Cases from real safetensors files: mostly their header, which is JSON behind its length."""

    def make(rng: Random) -> bytes:
        data = rng.choice(seeds)
        if rng.random() < 0.2:
            return mutate_often(data, rng)
        (n_bytes,) = struct.unpack("<Q", data[:8])
        header = vary_json([json.loads(data[8 : 8 + n_bytes])])(rng)
        length = len(header) if rng.random() < 0.95 else rng.choice([0, 1, 2**63, 10**8, n_bytes])
        return struct.pack("<Q", length) + header + data[8 + n_bytes :]

    return make


# ---- the hunt ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A reader of something that a stranger may have written."""

    name: str
    make: Callable[[Random], bytes]
    read: Callable[[Path, bytes], object]  # in a folder of its own, the content of a file
    prepare: Callable[[Path], object] = lambda folder: None


@dataclass
class Report:
    n_cases: int = 0
    n_read: int = 0  # the others were refused
    seconds: float = 0.0
    finds: list[str] = field(default_factory=list)


def make_case(target: Target, number: int) -> bytes:
    return target.make(Random(f"{target.name} {number}"))


def find_fault(target: Target, data: bytes, folder: Path) -> str | None:
    """What is wrong with the way in which the reader takes these bytes; "" if it refused them well,
    None if it read them.
    """
    sys.stderr = said = io.StringIO()  # warnings
    try:
        target.read(folder, data)
        refusal = None
    except UserError as error:
        refusal = str(error)
    except Exception as error:
        place = error.__traceback__
        while place and place.tb_next:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
        return f"{type(error).__name__}: {ascii(str(error))[:300]} at {where}"
    finally:
        sys.stderr = sys.__stderr__
    for line in said.getvalue().split("\n"):
        if escape_line(line) != line or len(line) > MAX_MESSAGE:
            return f"said {ascii(line)[:300]}"
    if refusal is None:
        return None
    if escape_line(refusal) != refusal or len(refusal) > MAX_MESSAGE:
        return f"refused with {len(refusal)} characters: {ascii(refusal)[:300]}"
    if str(folder) not in refusal:
        return f"refused without the file: {ascii(refusal)[:300]}"
    return ""


def hunt(target: Target, numbers: range, folder: Path) -> Report:
    """Try these cases, in as many processes, one after another, as their deaths require."""
    report = Report()
    folder.mkdir(parents=True, exist_ok=True)
    target.prepare(folder)
    state = mmap.mmap(-1, 24)  # the case at hand; how many were tried and how many of them read
    finds = folder.parent / f"{folder.name}.finds"
    finds.touch()
    started_at = time.monotonic()
    first = numbers.start
    while first < numbers.stop and len(report.finds) < N_FINDS:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _try_cases(target, range(first, numbers.stop), folder, state, finds)
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
            with finds.open("a") as file:
                file.write(f"{target.name} {number}: the process died of {name}\n")
        report.finds = finds.read_text().splitlines()
        if not os.WIFSIGNALED(status):
            assert status == 0, f"{target.name} {number}: the case could not be made"
            break
        first = number + 1
    report.seconds = time.monotonic() - started_at
    return report


def _try_cases(target: Target, numbers: range, folder: Path, state: mmap.mmap, finds: Path) -> None:
    """Be the process in which the reader is called."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    size_mb = _read_size_mb()
    allowed = (size_mb + 4 * MEMORY_MB) << 20
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + MEMORY_MB * 1024
    faulthandler.disable()
    n_read = n_faults = 0
    for n_cases, number in enumerate(numbers, 1):
        state[:] = struct.pack("<QQQ", number, n_cases, n_read)
        data = make_case(target, number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
        fault = find_fault(target, data, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak_kb > most_kb:
            fault = f"took {(peak_kb - most_kb) // 1024 + MEMORY_MB} MB of memory"
            most_kb = peak_kb + MEMORY_MB * 1024
        n_read += fault is None
        if fault:
            n_faults += 1
            with finds.open("a") as file:
                file.write(f"{target.name} {number}: {fault}\n")
        if n_faults == N_FINDS:
            break
    state[:] = struct.pack("<QQQ", number, n_cases, n_read)


def _read_size_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE >> 20
