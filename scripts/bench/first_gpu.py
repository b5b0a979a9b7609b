"""What a first GPU must settle: is its path right, and how fast is it? One command, ten minutes, no data.

    python scripts/bench/first_gpu.py                  (or: make gpu)
    python scripts/bench/first_gpu.py --list
    python scripts/bench/first_gpu.py --only kernels dtypes --json found.json
    python scripts/bench/first_gpu.py --rehearse       on any CPU, tiny: proves this script, not a GPU

Each check runs in a process of its own, because a wrong kernel can hang or ruin everything that shares its process.
Standard output is Markdown for docs/benchmarks.md, written from the same figures as the JSON. The exit code is 1 if a
check failed, and 2 if there is no GPU.
"""

import argparse
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmt.system.tables import Table

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
    is_speed: bool = False

    @property
    def function(self) -> str:
        """The name of what carries it out, of a bench and a sheet. Its file imports torch."""
        file = "gpu_speed" if self.is_speed else "gpu_checks"
        return f"{file}.check_{self.name.replace('-', '_')}"


# Correctness comes first: the speed of a wrong result is of no interest. The most important speeds come first too.
CHECKS = (
    Check("environment", "What there is", 60),
    Check("kernels", "Kernels of attention and loss against float64 written out", 240),
    Check("micro-batch", "Loss and gradients of one micro-batch against the CPU", 180),
    Check("dtypes", "What is bf16 under bf16", 60),
    Check("updates", "Some updates against the CPU", 240),
    Check("graph", "CUDA graph against the same code without one, and dropout", 180),
    Check("compilations", "Compilations over micro-batches of all lengths", 120),
    Check("ranks", "Many ranks against one process, and a rank that fails", 240),
    Check("continuation", "Ten updates, a stop and ten more against twenty", 240),
    Check("base", "Training speed, base", 240, is_speed=True),
    Check("big", "Training speed, big", 240, is_speed=True),
    Check("decoding", "Decoding 3,003 sentences, base, beam 4", 180, is_speed=True),
    Check("base-ranks", "Training speed, base, all GPUs", 240, is_speed=True),
    Check("big-ranks", "Training speed, big, all GPUs", 240, is_speed=True),
)
BY_NAME = {check.name: check for check in CHECKS}
Perform = Callable[[Check, bool], dict[str, Any]]  # of a check, and whether it is a rehearsal


# ---- a process that computes -------------------------------------------------------------------------------------


class ProcessFailure(Exception):
    """The process hangs or has failed; the text says which."""


def ask(command: Sequence[str], environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Run a process that answers with JSON; after `seconds` kill it and what it started."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ProcessFailure(f"no answer within {seconds:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    code = process.returncode
    if code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ProcessFailure(f"its process ended {how}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def ask_worker(name: str, seconds: float, is_rehearsal: bool) -> dict[str, Any]:
    """Have a process of this script answer for a check, or for "machine"."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)  # a whole model in the interpreter would take hours
    command = [sys.executable, __file__, "--worker", name]
    if is_rehearsal:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        command.append("--rehearse")
    return ask(command, environment, START_S + seconds)


def perform_apart(check: Check, is_rehearsal: bool) -> dict[str, Any]:
    try:
        return ask_worker(check.name, check.budget_s, is_rehearsal)
    except ProcessFailure as error:
        return make_empty_answer(CRASHED, str(error))


def answer_as_worker(name: str, is_rehearsal: bool) -> None:
    """Carry out one check, or describe the machine, and print the answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not come into the answer

    from nmt.system.runtime import tune_process

    tune_process()  # before torch comes in

    import gpu_checks

    bench = gpu_checks.make_bench(is_rehearsal)
    if name == "machine":
        answer = gpu_checks.describe_machine(bench)
    else:
        function = pkgutil.resolve_name(BY_NAME[name].function)
        answer = gpu_checks.perform(function, bench)
    print(json.dumps(answer), file=answers, flush=True)


# ---- one check after the other -----------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_empty_answer(verdict: str, reason: str) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "rows": [], "tables": [], "notes": []}


def run_checks(
    checks: Sequence[Check],
    perform: Perform,
    is_rehearsal: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Carry out all checks, whatever becomes of each."""
    began = clock()
    for number, check in enumerate(checks, 1):
        head = f"[{number}/{len(checks)}] {check.name}"
        check_began = clock()
        if check.is_speed and check_began - began > SPEED_UNTIL_S:
            late = f"{SPEED_UNTIL_S / 60:.0f} minutes were over; --only {check.name} measures it"
            answer = make_empty_answer(LEFT_OUT, late)
        else:
            say(f"{head}: {check.title}, at most {check.budget_s:.0f} s")
            answer = perform(check, is_rehearsal)
        seconds = round(clock() - check_began, 1)
        reason = f": {answer['reason']}" if answer["reason"] else ""
        say(f"{head}: {answer['verdict']} in {seconds} s{reason}")
        yield {"name": check.name, "title": check.title, **answer, "seconds": seconds}


# ---- the page ----------------------------------------------------------------------------------------------------


def head(found: dict[str, Any]) -> str:
    lines = [f"## {found['machine']['name']}", ""]
    if found["is_rehearsal"]:
        lines += [f"**{REHEARSED}**", ""]
    lines += [f"    {found['command']}", "", f"{found['date']}; {found['machine']['versions']}."]
    return "\n".join(lines)


def verdicts(checks: Sequence[dict[str, Any]]) -> str:
    rows = []
    for check in checks:
        rows.append([check["name"], check["verdict"], f"{check['seconds']:.1f}", check["reason"]])
    return "\n### Verdicts\n\n" + Table(["check", "verdict", "seconds", "why"], rows).to_markdown()


def section(check: dict[str, Any]) -> str:
    """What one check has found."""
    lines = []
    if check["rows"]:
        rows = []
        for row in check["rows"]:
            rows.append([row["what"], row["found"], row["asked"], "yes" if row["holds"] else "NO"])
        lines += ["", Table(["", "found", "asked", "holds"], rows).to_markdown()]
    for one in check["tables"]:
        lines += ["", Table(one["header"], one["rows"]).to_markdown()]
    for note in check["notes"]:
        lines += ["", note]
    return "\n".join(["", f"### {check['title']}", *lines])


# ---- the command -------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="first_gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the checks and leave")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=BY_NAME, help="carry out these checks alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON too")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same on a CPU with tiny sizes, which proves this script and nothing about a GPU",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, perform: Perform = perform_apart) -> int:
    args = parse(argv)
    if args.list:
        for check in CHECKS:
            print(f"{check.name:18}{check.title}")
        return 0
    if args.worker is not None:
        answer_as_worker(args.worker, args.rehearse)
        return 0
    if args.rank is not None:
        from gpu_speed import work_as_rank

        work_as_rank(args.rank, args.rehearse)
        return 0

    # is there a GPU?
    try:
        machine = ask_worker("machine", 0.0, args.rehearse)
    except ProcessFailure as error:
        say(f"first_gpu: error: torch cannot be started here: {error}")
        return 2
    if not args.rehearse and not machine["n_gpus"]:
        say(
            f"first_gpu: error: no GPU that torch can use ({machine['versions']}); install the torch built for "
            "your driver (pytorch.org), or give --rehearse to try this script on the CPU"
        )
        return 2

    # all checks; a run that is cut short leaves what it has found
    checks = [check for check in CHECKS if args.only is None or check.name in args.only]
    given = sys.argv[1:] if argv is None else argv
    found = {
        "is_rehearsal": args.rehearse,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python scripts/bench/first_gpu.py", *given]),
        "machine": machine,
    }
    print(head(found), flush=True)
    results: list[dict[str, Any]] = []
    bad: list[str] = []
    for result in run_checks(checks, perform, args.rehearse):
        results.append(result)
        if result["verdict"] in (FAILED, CRASHED):
            bad.append(result["name"])
        print(section(result), flush=True)
        if args.json is not None:
            so_far = {**found, "is_good": not bad, "checks": results}
            args.json.write_text(json.dumps(so_far, indent=1) + "\n", encoding="utf-8")
    print(verdicts(results), flush=True)
    say(f"failed: {', '.join(bad)}" if bad else "nothing failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
