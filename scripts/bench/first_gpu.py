"""What a first GPU must settle: is its path right, and how fast is it? One command, ten minutes, no data.

    python scripts/bench/first_gpu.py                  (or: make gpu)
    python scripts/bench/first_gpu.py --list
    python scripts/bench/first_gpu.py --only attention loss --json found.json
    python scripts/bench/first_gpu.py --rehearse       on any CPU, tiny: proves this script, not a GPU

The checks run in a process of their own, because a wrong kernel can hang or ruin everything that shares its process:
after a crash the next check gets a new one. Standard output is Markdown for docs/benchmarks.md, written from the same
figures as the JSON. The exit code is 1 if a check failed, and 2 if there is no GPU.
"""

import argparse
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SPEED_UNTIL_S = 600.0  # no speed check begins later than this
START_S = 180.0  # that a process may take to import torch and find its GPU
PASSED, FAILED, CRASHED, SKIPPED, LEFT_OUT = "passed", "failed", "crashed", "skipped", "left out"
REHEARSED = (
    "This is a rehearsal on a CPU with tiny sizes. It proves that the script works and nothing about a GPU; "
    "its times mean nothing."
)


class Check(NamedTuple):
    name: str
    title: str
    budget_s: float  # after which its process is killed
    is_speed: bool = False  # in a new process, so that its memory is its own
    may_interpret: bool = False  # whether TRITON_INTERPRET=1 is left to it


# Correctness comes first: the speed of a wrong result is of no interest. What matters most of speed
# comes first too.
CHECKS = (
    Check("environment", "What there is", 60),
    Check("attention", "Attention against float64 written out", 120, may_interpret=True),
    Check("loss", "Loss kernel against float64 written out", 90, may_interpret=True),
    Check("micro-batch", "Loss and gradients of one micro-batch against the CPU", 180),
    Check("dtypes", "What is bf16 under bf16", 60),
    Check("updates", "Some updates against the CPU", 240),
    Check("graph", "CUDA graph against the same code without one, and dropout", 180),
    Check("compilations", "Compilations over micro-batches of all lengths", 120),
    Check("ranks", "Many ranks against one process, and a rank that fails", 240),
    Check("continuation", "Ten updates, a stop and ten more against twenty", 240),
    Check("base", "Training speed, base, attention by our kernels", 240, is_speed=True),
    Check("big", "Training speed, big, attention by our kernels", 240, is_speed=True),
    Check("decoding", "Decoding 3,003 sentences, base, beam 4", 180, is_speed=True),
    Check("base-ranks", "Training speed, base, all GPUs", 240, is_speed=True),
    Check("big-ranks", "Training speed, big, all GPUs", 240, is_speed=True),
)
NAMES = tuple(check.name for check in CHECKS)


# ---- the process that computes -----------------------------------------------------------------------------------


class Performer(Protocol):
    """Who carries out checks, and tells of what machine."""

    machine: dict[str, Any]

    def perform(self, check: Check) -> dict[str, Any]: ...
    def close(self) -> None: ...


Start = Callable[[Check, bool], Performer]


class WorkerGone(Exception):
    """The process hangs or has ended; the text says which."""


class Worker:
    """A process that has imported torch and carries out one check after the other."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            self.machine = self.read(START_S)
        except WorkerGone:
            self.close()
            raise

    def perform(self, check: Check) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(check.name.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # reading tells how it ended
        return self.read(check.budget_s)

    def read(self, seconds: float) -> dict[str, Any]:
        """The next answer, a line of JSON."""
        assert self.process.stdout is not None
        is_ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not is_ready:
            raise WorkerGone(f"no answer within {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            code = self.process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise WorkerGone(f"its process ended {how}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start_worker(check: Check, is_rehearsal: bool) -> Worker:
    environment = dict(os.environ)
    if not check.may_interpret:
        # A whole model in the interpreter would take hours
        environment.pop("TRITON_INTERPRET", None)
    if is_rehearsal:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, __file__, "--worker"]
    if is_rehearsal:
        command.append("--rehearse")
    return Worker(command, environment)


def check_functions() -> dict[str, Callable[..., None]]:
    """What carries out each check."""
    checks, speed = importlib.import_module("gpu_checks"), importlib.import_module("gpu_speed")
    return {**checks.FUNCTIONS, **speed.FUNCTIONS}


def answer_checks(is_rehearsal: bool) -> int:
    """What the worker does: read names of checks, answer each with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers

    from nmt.system.runtime import tune_process

    tune_process()  # before torch comes in

    import gpu_checks

    functions = check_functions()
    bench = gpu_checks.make_bench(is_rehearsal)
    print(json.dumps(gpu_checks.describe_machine(bench)), file=answers, flush=True)
    for line in sys.stdin:
        answer = gpu_checks.perform(functions[line.strip()], bench)
        print(json.dumps(answer), file=answers, flush=True)
    return 0


# ---- one check after the other -----------------------------------------------------------------------------------


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def empty_answer(verdict: str, reason: str) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "reason": reason,
        "rows": [],
        "tables": [],
        "notes": [],
        "figures": {},
    }


def run_checks(
    checks: Sequence[Check],
    first: Performer,
    start: Start,
    is_rehearsal: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Carry out all checks, whatever becomes of each."""
    began = clock()
    performer: Performer | None = first
    last = checks[0]
    try:
        for number, check in enumerate(checks, 1):
            head = f"[{number}/{len(checks)}] {check.name}"
            named = {"name": check.name, "title": check.title}
            if check.is_speed and clock() - began > SPEED_UNTIL_S:
                told(f"{head}: left out")
                late = (
                    f"{SPEED_UNTIL_S / 60:.0f} minutes were over; --only {check.name} measures it"
                )
                yield {**named, **empty_answer(LEFT_OUT, late), "seconds": 0.0}
                continue
            told(f"{head}: {check.title}, at most {check.budget_s:.0f} s")
            check_began = clock()
            is_apart = check.is_speed and not is_rehearsal  # a rehearsal measures no memory
            is_other = (
                "TRITON_INTERPRET" in os.environ and check.may_interpret != last.may_interpret
            )
            must_be_new = number > 1 and (is_apart or is_other)
            try:
                if performer is not None and must_be_new:
                    performer.close()
                    performer = None
                if performer is None:
                    performer = start(check, is_rehearsal)
                answer = performer.perform(check)
            except WorkerGone as error:
                answer = empty_answer(CRASHED, str(error))
            if answer["verdict"] == CRASHED and performer is not None:
                performer.close()  # a GPU is not to be trusted after an error in the same process
                performer = None
            last = check
            seconds = round(clock() - check_began, 1)
            reason = f": {answer['reason']}" if answer["reason"] else ""
            told(f"{head}: {answer['verdict']} in {seconds} s{reason}")
            yield {**named, **answer, "seconds": seconds}
    finally:
        if performer is not None:
            performer.close()


def is_good(results: Sequence[dict[str, Any]]) -> bool:
    return not any(result["verdict"] in (FAILED, CRASHED) for result in results)


# ---- the page ----------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def page(found: dict[str, Any]) -> str:
    """All that was found, as Markdown."""
    lines = [f"## {found['machine']['name']}", ""]
    if found["is_rehearsal"]:
        lines += [f"**{REHEARSED}**", ""]
    lines += [
        f"    {found['command']}",
        "",
        f"{found['date']}; {found['machine']['versions']}.",
        "",
    ]
    lines += ["### Verdicts", ""]
    verdicts = []
    for check in found["checks"]:
        is_bad = check["verdict"] in (FAILED, CRASHED)
        verdict = f"**{check['verdict']}**" if is_bad else check["verdict"]
        verdicts.append([check["name"], verdict, f"{check['seconds']:.1f}", check["reason"]])
    lines += table(["check", "verdict", "seconds", "why"], verdicts)
    for check in found["checks"]:
        lines += section(check)
    return "\n".join(lines) + "\n"


def section(check: dict[str, Any]) -> list[str]:
    """What one check has found; nothing if it has found nothing."""
    lines = []
    if check["rows"]:
        rows = []
        for row in check["rows"]:
            holds = "yes" if row["holds"] else "**no**"
            rows.append([row["what"], row["found"], row["asked"], holds])
        lines += ["", *table(["", "found", "asked", "holds"], rows)]
    for one in check["tables"]:
        lines += ["", *table(one["header"], one["rows"])]
    for note in check["notes"]:
        lines += ["", note]
    return ["", f"### {check['title']}", *lines] if lines else []


# ---- the command -------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="first_gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the checks and leave")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=NAMES, help="carry out these checks alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON too")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same on a CPU with tiny sizes, which proves this script and nothing about a GPU; "
        "with TRITON_INTERPRET=1 the kernels are interpreted",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, start: Start = start_worker) -> int:
    args = parse(argv)
    if args.list:
        for check in CHECKS:
            print(f"{check.name:18}{check.title}")
        return 0
    if args.worker:
        return answer_checks(args.rehearse)
    if args.rank is not None:
        from gpu_speed import work_as_rank

        work_as_rank(args.rank, args.rehearse)
        return 0

    # is there a GPU?
    checks = [check for check in CHECKS if args.only is None or check.name in args.only]
    try:
        first = start(checks[0], args.rehearse)
    except WorkerGone as error:
        told(f"first_gpu: error: torch cannot be started here: {error}")
        return 2
    if not args.rehearse and not first.machine["n_gpus"]:
        first.close()
        told(
            f"first_gpu: error: no GPU that torch can use ({first.machine['versions']}); install the torch built for "
            "your driver (pytorch.org), or give --rehearse to try this script on the CPU"
        )
        return 2

    # all checks
    results = list(run_checks(checks, first, start, args.rehearse))
    given = sys.argv[1:] if argv is None else argv
    found = {
        "is_rehearsal": args.rehearse,
        "is_good": is_good(results),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python scripts/bench/first_gpu.py", *given]),
        "machine": first.machine,
        "checks": results,
    }

    # what came of them
    print(page(found), end="", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    bad = [result["name"] for result in results if result["verdict"] in (FAILED, CRASHED)]
    told(f"failed: {', '.join(bad)}" if bad else "nothing failed")
    return 0 if found["is_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
