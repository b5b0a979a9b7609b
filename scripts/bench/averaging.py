"""Measures what averaging checkpoints gains: the last N, the N best on the dev set, and a mean that decays.

    python scripts/bench/averaging.py RUN [RUN ...] --test test.en test.de --ends 500 1000 1500 \\
        --name multi30k --out results

Each RUN is a run folder of one recipe on one corpus, with another seed. For each update of --ends it
scores on the test set the checkpoint of that update, and means of it and earlier ones. The best are
chosen by dev NLL, which is computed for each checkpoint. Each run becomes a line of OUT/runs.jsonl, so the
same command continues where it stopped. Runs of another recipe can be added under another --name. At the
end it writes OUT/table.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from train import describe_machine, format_table

from nmt.average.mean import combine, load_mean, open_all
from nmt.average.select import list_candidates
from nmt.checkpoint import Checkpoint
from nmt.commands.cli import run_command
from nmt.corpus.text_files import TextFile, read_lines
from nmt.score.score import check_lengths, score_bleu
from nmt.sweep.table import compute_mean, format_mean
from nmt.system.device import choose_device
from nmt.system.errors import UserError
from nmt.system.files import digest_file, write_bytes
from nmt.system.progress import say
from nmt.system.ranks import World
from nmt.system.run_folder import RunFolder
from nmt.train.shutdown import StopRequest
from nmt.train.validate import compute_dev_nll, open_dev
from nmt.translate.translator import Translator, make_translator

LAST = (1, 2, 3, 5, 10, 20)
BEST = (3, 5)
DECAYS = (0.5, 0.7, 0.9)
MICRO_TOKENS = 4096
Line = dict[str, Any]  # of runs.jsonl


@dataclass(frozen=True)
class Kind:
    """One way to choose and weight the checkpoints up to an update."""

    name: str
    steps: list[int]
    weights: list[float]


def list_kinds(steps: Sequence[int], dev_nll: dict[int, float]) -> list[Kind]:
    """List all means of checkpoints that end with the newest of `steps`."""
    kinds = []
    for n in LAST:
        if n <= len(steps):
            kinds.append(Kind(f"last {n}", list(steps[-n:]), [1.0] * n))
    for n in BEST:
        if n < len(steps):
            best = sorted(sorted(steps, key=dev_nll.__getitem__)[:n])
            kinds.append(Kind(f"best {n}", best, [1.0] * n))
    if len(steps) > 1:
        for decay in DECAYS:
            ages = range(len(steps) - 1, -1, -1)
            kinds.append(Kind(f"decay {decay}", list(steps), [decay**age for age in ages]))
    return kinds


class Judge:
    """Scores means of one run's checkpoints."""

    def __init__(
        self, run: RunFolder, steps: list[int], sources: list[str], references: list[str]
    ) -> None:
        opened = open_all([run.checkpoint(step) for step in steps])
        self.checkpoints = dict(zip(steps, opened, strict=True))
        newest = opened[-1]
        self.config = newest.config
        self.world = World(0, 1, choose_device("cpu"))
        self.dev = open_dev(Path(newest.config.data.store), newest.vocab)
        self.sources, self.references = sources, references

    def load(self, kind: Kind) -> Translator:
        chosen: list[Checkpoint] = [self.checkpoints[step] for step in kind.steps]
        translator = make_translator(chosen[-1], self.world.device, self.config.decoding)
        load_mean(combine(chosen, kind.weights), translator.model)
        return translator

    def measure_nll(self, translator: Translator) -> float:
        nll = compute_dev_nll(translator, self.dev.store, MICRO_TOKENS, self.world, StopRequest())
        assert nll is not None  # nobody asked it to stop
        return nll.value

    def score(self, kind: Kind) -> Line:
        translator = self.load(kind)
        lines = [result.text for result in translator.translate(self.sources)]
        score = score_bleu(lines, self.references)
        return {
            "nll": self.measure_nll(translator),
            "bleu": score.value,
            "signature": score.signature,
        }


def measure_run(path: Path, ends: Sequence[int], sources: list[str], references: list[str]) -> Line:
    run = RunFolder(path)
    steps = [candidate.step for candidate in list_candidates(run, None)]
    for end in ends:
        if end not in steps:
            raise UserError(f"--ends {end}: {path} has no planned checkpoint of this update")
    steps = [step for step in steps if step <= max(ends)]
    judge = Judge(run, steps, sources, references)
    dev_nll = {}
    for step in judge.checkpoints:
        dev_nll[step] = judge.measure_nll(judge.load(Kind("", [step], [1.0])))
    points = []
    for end in ends:
        so_far = steps[: steps.index(end) + 1]
        for kind in list_kinds(so_far, dev_nll):
            point = {"end": end, "kind": kind.name, "steps": kind.steps, **judge.score(kind)}
            say(f"{path.name}, update {end:,}, {kind.name}: BLEU {point['bleu']:.2f}")
            points.append(point)
    return {"seed": judge.config.seed, "machine": describe_machine(), "points": points}


# ---- the report ----------------------------------------------------------------------------------


def format_gain(values: Sequence[float]) -> str:
    """Return the mean, with its 95 % interval if there are several; nothing if there is none."""
    return format_mean(compute_mean(values), 2, "+")


def format_report(lines: Sequence[Line]) -> str:
    parts = []
    for name in dict.fromkeys(line["name"] for line in lines):
        runs = [line for line in lines if line["name"] == name]
        signature = runs[0]["points"][0]["signature"]
        seeds = ", ".join(str(run["seed"]) for run in runs)
        parts.append(
            f"## {name}\n\nTest BLEU (`{signature}`) of one checkpoint, and the gain over it of each mean of "
            f"checkpoints up to the same update; seeds {seeds}.\n\n{format_runs(runs)}"
        )
    return "\n".join(parts)


def format_runs(runs: Sequence[Line]) -> str:
    singles: dict[int, list[float]] = {}  # by update
    gains: dict[str, dict[int, list[float]]] = {}  # by kind and update
    for run in runs:
        for point in run["points"]:
            end, kind, bleu = point["end"], point["kind"], point["bleu"]
            if kind == "last 1":  # it comes first
                singles.setdefault(end, []).append(bleu)
                single = bleu
            else:
                gains.setdefault(kind, {}).setdefault(end, []).append(bleu - single)
    rows = []
    for end, values in singles.items():
        row = [f"{end:,}", f"{fmean(values):.2f}"]
        for by_update in gains.values():
            row.append(format_gain(by_update.get(end, [])))
        rows.append(row)
    return format_table(["update", "one checkpoint", *gains], rows)


# ---- the command ---------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> int:
    sources, references = (list(read_lines(TextFile(Path(path)))) for path in args.test)
    check_lengths(references, sources)
    told = {"ends": args.ends, "test_sha256": [digest_file(Path(path)) for path in args.test]}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.jsonl"
    lines = []
    if path.exists():
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for line in lines:
        if line["name"] == args.name and line["told"] != told:
            raise UserError(
                f"{path}: its runs of {args.name} had {line['told']}; give another --name"
            )
    done = {(line["name"], line["run"]) for line in lines}
    for run in map(Path, args.runs):
        if (args.name, run.name) in done:
            continue
        line = {"name": args.name, "run": run.name, "told": told}
        lines.append(line | measure_run(run, args.ends, sources, references))
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    report = format_report(lines)
    write_bytes(out / "table.md", report.encode())
    print(report, end="")
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs of one recipe, by seed")
    parser.add_argument("--test", nargs=2, required=True, metavar=("SRC", "REF"))
    parser.add_argument("--ends", nargs="+", type=int, required=True, metavar="UPDATE")
    parser.add_argument("--name", required=True, help="of corpus and recipe, in the table")
    parser.add_argument("--out", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    return run_command(lambda: work(args), "bench_averaging")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
