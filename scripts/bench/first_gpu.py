"""What a GPU must settle: is its path right, how fast is it, and what does it do in whole runs?

    python scripts/bench/first_gpu.py                  (or: make gpu; ten minutes, no data)
    python scripts/bench/first_gpu.py --list
    python scripts/bench/first_gpu.py --only kernels graph
    python scripts/bench/first_gpu.py --dry            on any CPU, tiny: proves this script, not a GPU

Four things are asked of the next GPU, in this order, each in at most ten minutes. A wrong gradient must not cost a
training; what europarl-text prepares in build/first-gpu is there for the command after it:

    python scripts/bench/first_gpu.py --only micro-batch europarl-text --data FOLDER
    python scripts/bench/first_gpu.py --only europarl --data FOLDER
    python scripts/bench/first_gpu.py --only decoding
    python scripts/bench/first_gpu.py --only peers
    python scripts/bench/first_gpu.py --only shared-gpu

Each check runs in a process of its own, because a wrong kernel can hang or ruin everything that shares its process.
Rows of tables are told on standard error as soon as they are there; standard output is Markdown for
docs/benchmarks.md. The exit code is 1 if a check failed, and 2 if there is no GPU. Where nmt is not installed,
PYTHONPATH is the project's folder.
"""

import argparse
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nmt.system.tables import Table

SPEED_UNTIL_S = 600.0  # no speed check begins later than this
START_S = 180.0  # that a process may take to import torch and find its GPU
FAILED, CRASHED, LEFT_OUT = "failed", "crashed", "left out"
REHEARSED = (
    "This is a rehearsal on a CPU with tiny sizes. It proves that the script works and nothing about a GPU; "
    "its times mean nothing."
)


class Check(NamedTuple):
    name: str
    title: str
    budget_s: float  # after which its process is killed
    file: str  # it imports torch

    @property
    def is_on_all(self) -> bool:
        """Whether it is carried out by a rank on each GPU."""
        return self.name.endswith("-ranks")

    @property
    def function(self) -> str:
        """The name of what carries it out, of a bench and a sheet."""
        name = self.name.removesuffix("-ranks").replace("-", "_")
        return f"{self.file}.check_{name}"

    @property
    def is_speed(self) -> bool:
        return self.file == "gpu_speed"

    @property
    def is_whole_run(self) -> bool:
        """Carried out only where it is named: it needs data, other trainers, or all ten minutes."""
        return self.file == "gpu_runs" and self.name != "ranks"


def read_checks(table: str) -> list[Check]:
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return [Check(name, title, float(seconds), file) for name, title, seconds, file in rows]


# Correctness comes first: the speed of a wrong result is of no interest. The most important speeds come first too.
CHECKS = read_checks("""
kernels | Kernels of attention and loss against float64 written out | 240 | gpu_checks
micro-batch | Loss and gradients of one micro-batch against the CPU | 180 | gpu_checks
updates | Some updates against the CPU | 240 | gpu_checks
graph | CUDA graph against the same code without one, and dropout | 180 | gpu_checks
compilations | Compilations over micro-batches of all lengths | 120 | gpu_checks
ranks | Two ranks on two GPUs, killed and continued | 400 | gpu_runs
continuation | Ten updates, a stop and ten more against twenty | 240 | gpu_checks
base | Training speed, base | 240 | gpu_speed
big | Training speed, big | 240 | gpu_speed
decoding | Decoding 3,003 sentences and one alone, base, beam 4 | 180 | gpu_speed
base-ranks | Training speed, base, all GPUs | 240 | gpu_speed
big-ranks | Training speed, big, all GPUs | 240 | gpu_speed
europarl-text | Europarl English-French, prepared | 180 | gpu_runs
europarl | Base on Europarl, to a BLEU | 400 | gpu_runs
peers | Other trainers on the same card | 400 | gpu_runs
shared-gpu | Two ranks on one GPU, killed and continued | 400 | gpu_runs
""")
BY_NAME = {check.name: check for check in CHECKS}


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


def ask_worker(name: str, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Have a process of this script answer for a check, or for "machine"."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)  # a whole model in the interpreter would take hours
    command = [sys.executable]
    if name in BY_NAME and BY_NAME[name].is_on_all:
        n_ranks = "2" if args.dry else "gpu"
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command += [__file__, "--worker", name]
    if args.data is not None:
        command += ["--data", str(args.data)]
    if args.dry:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        command.append("--dry")
    return ask(command, environment, START_S + seconds)


def perform_apart(check: Check, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return ask_worker(check.name, check.budget_s, args)
    except ProcessFailure as error:
        return make_empty_answer(CRASHED, str(error))


def answer_as_worker(args: argparse.Namespace) -> None:
    """Carry out one check, or describe the machine, and print the answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not come into the answer

    from nmt.system.runtime import tune_process

    tune_process()  # before torch comes in

    import gpu_checks

    bench = gpu_checks.make_bench(args.dry, args.data)
    if args.worker == "machine":
        answer = gpu_checks.describe_gpu(bench)
    else:
        function = pkgutil.resolve_name(BY_NAME[args.worker].function)
        answer = gpu_checks.perform(function, bench)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(answer), file=answers, flush=True)
    elif answer["verdict"] == CRASHED:
        sys.exit(1)  # for which torchrun ends the others


# ---- one check after the other -----------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_empty_answer(verdict: str, reason: str) -> dict[str, Any]:
    lists: dict[str, Any] = {"rows": [], "tables": [], "notes": []}
    return {"verdict": verdict, "reason": reason, "opening": "", **lists}


def run_checks(checks: Sequence[Check], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Carry out all checks, whatever becomes of each."""
    began = time.monotonic()
    for number, check in enumerate(checks, 1):
        head = f"[{number}/{len(checks)}] {check.name}"
        check_began = time.monotonic()
        if check.is_speed and check_began - began > SPEED_UNTIL_S:
            late = f"{SPEED_UNTIL_S / 60:.0f} minutes were over; --only {check.name} measures it"
            answer = make_empty_answer(LEFT_OUT, late)
        else:
            say(f"{head}: {check.title}, at most {check.budget_s:.0f} s")
            answer = perform_apart(check, args)
        seconds = round(time.monotonic() - check_began, 1)
        reason = f": {answer['reason']}" if answer["reason"] else ""
        say(f"{head}: {answer['verdict']} in {seconds} s{reason}")
        yield {"name": check.name, "title": check.title, **answer, "seconds": seconds}


# ---- the page ----------------------------------------------------------------------------------------------------


def head(machine: dict[str, Any], is_rehearsal: bool) -> str:
    lines = [f"## {machine['name']}", ""]
    if is_rehearsal:
        lines += [f"**{REHEARSED}**", ""]
    command = " ".join(["python", *sys.argv])
    lines += [f"    {command}", "", f"{time.strftime('%Y-%m-%d')}; {machine['versions']}."]
    return "\n".join(lines)


def verdicts(checks: Sequence[dict[str, Any]]) -> str:
    rows = []
    for check in checks:
        rows.append([check["name"], check["verdict"], f"{check['seconds']:.1f}", check["reason"]])
    return "\n### Verdicts\n\n" + Table(["check", "verdict", "seconds", "why"], rows).to_markdown()


def section(check: dict[str, Any]) -> str:
    """What one check asks, and what it has found."""
    lines = ["", f"### {check['title']}"]
    if check["opening"]:
        lines += ["", check["opening"]]
    if check["rows"]:
        rows = []
        for row in check["rows"]:
            rows.append([row["what"], row["found"], row["asked"], "yes" if row["holds"] else "NO"])
        lines += ["", Table(["", "found", "asked", "holds"], rows).to_markdown()]
    for one in check["tables"]:
        lines += ["", Table(one["header"], one["rows"]).to_markdown()]
    for note in check["notes"]:
        lines += ["", note]
    return "\n".join(lines)


# ---- the command -------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="first_gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the checks and leave")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=BY_NAME, help="carry out these checks alone"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="train-*.{en,fr}.xz of Europarl and newstest201{3,4}.{en,fr}, for the checks europarl-text and europarl",
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="the same on a CPU with tiny sizes, which proves this script and nothing about a GPU",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.list:
        for check in CHECKS:
            print(f"{check.name:18}{check.title}")
        return 0
    if args.worker is not None:
        answer_as_worker(args)
        return 0
    # is there a GPU?
    try:
        machine = ask_worker("machine", 0.0, args)
    except ProcessFailure as error:
        say(f"first_gpu: error: torch cannot be started here: {error}")
        return 2
    if not args.dry and not machine["n_gpus"]:
        say(
            f"first_gpu: error: no GPU that torch can use ({machine['versions']}); install the torch built for "
            "your driver (pytorch.org), or give --dry to try this script on the CPU"
        )
        return 2

    # all checks; a run that is cut short leaves what it has found
    checks = [check for check in CHECKS if not check.is_whole_run]
    if args.only is not None:
        checks = [check for check in CHECKS if check.name in args.only]
    print(head(machine, args.dry), flush=True)
    results = []
    for result in run_checks(checks, args):
        results.append(result)
        print(section(result), flush=True)
    print(verdicts(results), flush=True)
    bad = [result["name"] for result in results if result["verdict"] in (FAILED, CRASHED)]
    say(f"failed: {', '.join(bad)}" if bad else "nothing failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
