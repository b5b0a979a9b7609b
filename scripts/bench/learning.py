"""Compares how well trainers learn: the same pieces, model, schedule and tokens an update, several
seeds.

    python scripts/bench/learning.py --data-root corpora/multi30k --seeds 1 --out results
    python scripts/bench/learning.py --data-root corpora/multi30k --peer-python build/peers/bin/python \\
        --out results model.n_layers=2 training.steps=1000

(scripts/bench/train.py --make-peers installs the peers.) All systems train with the sizes and the
schedule of the config, one after the other, each in a process with one thread. A run becomes a line of
OUT/runs.jsonl, and the same command continues with the runs that are missing. Then it writes
OUT/table.md and OUT/plot.svg: dev NLL at equal updates and at equal processor time, which replaces
minutes where other work shares the machine, and dev BLEU by one beam search for all.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from train import MALLOC, OWN, describe_machine, format_table, run_logged, write_text

from nmt.commands.cli import add_overrides, run_command
from nmt.config import RunConfig, load_config
from nmt.corpus.prepare import prepare
from nmt.data.vocab import Vocab
from nmt.report.vega import HOW_TO_INSTALL
from nmt.system.errors import UserError
from nmt.system.files import write_bytes
from nmt.system.progress import say
from nmt.system.run_folder import dev_text_file
from nmt.system.runtime import tune_process

SCRIPT = Path(__file__).resolve().with_name("learning_peers.py")
TIMEOUT_S = 7200  # of a run
# Not all peers have pre-norm, so all have post-norm where they can, whatever the config says.
COMMON = ("model.norm=post",)
# Our trainer with other settings
VARIANTS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours+length": ("training.grouping=length",),
    "ours+pre": ("model.norm=pre",),
    "ours+dropout": ("model.attention_dropout={dropout}", "model.ffn_dropout={dropout}"),
    "ours+bias": ("model.attention_bias=true",),
    "ours+like-eole": (
        "model.norm=pre",
        "model.ffn_dropout={dropout}",
        "training.grouping=length",
    ),
    "ours+like-plain": (
        "model.attention_dropout={dropout}",
        "model.ffn_dropout={dropout}",
        "model.attention_bias=true",
        "training.grouping=length",
    ),
}
# The others, and how each forms its batches
PEERS = {
    "plain": "of similar lengths",  # a loop over torch.nn.Transformer
    "lean": "of similar lengths",  # the same, with dropout only where the paper has it
    "eole": "of similar lengths, out of a bucket of 262,144 sentences",
    "opennmt": "of similar lengths, out of a bucket of 262,144 sentences",
    "joeynmt": "drawn at random, padded",
    "fairseq": "of similar lengths",
}
# fairseq 0.12.2 needs Python 3.10 and pip < 24.1: pip install --no-deps fairseq==0.12.2; then torch,
# "numpy<1.24", omegaconf==2.0.6, hydra-core==1.0.7, cffi, cython, regex, sacrebleu, bitarray, tqdm,
# scikit-learn.
NAMES = [*VARIANTS, *PEERS]
DEFAULT = ["ours-fp32", "ours-bf16", "plain-fp32"]
Run = dict[str, Any]  # a line of runs.jsonl


class Study:
    """What all runs share: the config, the store, the text made of it, the environment."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.out = args, Path(args.work).resolve(), Path(args.out)
        # The peers' environment is copied before tune_process sets what nmt-train would set.
        self.peer_environment = {**os.environ, "OMP_NUM_THREADS": "1"} | MALLOC
        tune_process()
        self.own_environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        store = args.store or str(self.work / "store")
        self.overrides = [f"data.store={json.dumps(store)}", *COMMON, *args.overrides]
        if args.data_root:
            self.overrides.insert(0, f"data.root={json.dumps(args.data_root)}")
        self.config = load_config(args.config, self.overrides)
        prepare(self.config.data, self.config.vocab, self.config.seed)
        self.n_vocab = write_text(Path(store), self.work / "text")
        self.vocab = Vocab.load(Path(store) / "vocab.model")
        self.references = (Path(store) / dev_text_file("tgt")).read_text("utf-8").split("\n")[:-1]

    def make_job(self, system: str, precision: str, seed: int) -> dict[str, Any]:
        config = self.config
        job = {
            "system": system.split("+")[0],
            "precision": precision,
            "seed": seed,
            "text": str(self.work / "text"),
            "scratch": str(self.work),
            "n_vocab": self.n_vocab,
            "threads": 1,
            "arguments": [],
            "every": self.args.every,
            **describe_work(config),
        }
        if system in VARIANTS:
            job["arguments"] = self.list_own_arguments(system, precision, seed)
        return job

    def list_own_arguments(self, system: str, precision: str, seed: int) -> list[str]:
        dropout = self.config.model.dropout
        settings = [setting.format(dropout=dropout) for setting in VARIANTS[system]]
        never = self.config.training.steps + 1
        return [
            self.args.config,
            "training.checkpoint_minutes=null",
            f"training.checkpoint_every={never}",
            f"training.validate_every={never}",
            *self.overrides,
            *settings,
            f"out={json.dumps(str(self.work / 'run'))}",
            f"training.precision={precision}",
            f"seed={seed}",
        ]

    def run(self, system: str, precision: str, seed: int) -> Run:
        """Train in a process of its own; a log has what it said."""
        job = self.work / "job.json"
        job.write_text(json.dumps(self.make_job(system, precision, seed)), encoding="utf-8")
        is_ours = system in VARIANTS
        if is_ours:
            shutil.rmtree(self.work / "run", ignore_errors=True)
        log = self.work / f"{system}-{precision}-seed{seed}.log"
        command = [self.choose_python(system), str(SCRIPT), str(job)]
        env = self.own_environment if is_ours else self.peer_environment
        name = f"{system}-{precision}, seed {seed}"
        printed = run_logged(name, command, env, log, TIMEOUT_S)
        if not printed.strip():
            raise UserError(f"{name}: printed nothing; see {log}")
        return json.loads(printed)

    def choose_python(self, system: str) -> str:
        if system in VARIANTS or system in OWN:
            return sys.executable
        if system == "fairseq":
            return self.args.fairseq_python
        return self.args.peer_python

    def judge(self, result: Run) -> Run:
        """Exchange the translations, which are ids, for their BLEU."""
        from nmt.score.score import score_bleu

        score = score_bleu(self.vocab.decode(result.pop("translations")), self.references)
        return result | {"bleu": score.value, "signature": score.signature}


def describe_work(config: RunConfig) -> dict[str, Any]:
    """What all systems are told."""
    return {
        "d_model": config.model.d_model,
        "d_ff": config.model.d_ff,
        "n_heads": config.model.n_heads,
        "n_layers": config.model.n_layers,
        "dropout": config.model.dropout,
        "smoothing": config.training.label_smoothing,
        "warmup": config.optimizer.warmup_steps,
        "scale": config.optimizer.scale,
        "tokens": config.training.tgt_tokens,
        "updates": config.training.steps,
        "beam": config.decoding.beam,
        "alpha": config.decoding.length_penalty,
        "extra": config.decoding.max_extra,
    }


# ---- the study -----------------------------------------------------------------------------------


def name_run(run: Run) -> tuple[str, str, int]:
    return run["corpus"], f"{run['system']}-{run['precision']}", run["seed"]


def read_runs(path: Path) -> list[Run]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last is empty, or was cut short


def work(args: argparse.Namespace) -> int:
    check_arguments(args)
    study = Study(args)
    study.out.mkdir(parents=True, exist_ok=True)
    path, corpus = study.out / "runs.jsonl", study.config.name
    runs, failed = read_runs(path), set()
    told = describe_work(study.config) | {"n_vocab": study.n_vocab}
    asked = {"every": args.every, "overrides": args.overrides}
    for run in runs:
        if run["corpus"] == corpus and run["told"] != told:
            raise UserError(f"{path}: its runs of {corpus} had {run['told']}; give another --out")
        if run["corpus"] == corpus and run.get("asked", asked) != asked:
            raise UserError(f"{path}: its runs of {corpus} had {run['asked']}; give another --out")
    done = {name_run(run) for run in runs}
    for seed in args.seeds:
        for name in args.systems:
            if (corpus, name, seed) in done or name in failed:
                continue
            system, precision = name.rsplit("-", 1)
            try:
                result = study.judge(study.run(system, precision, seed))
            except UserError as error:  # the others go on
                say(f"failed: {error}")
                failed.add(name)
                continue
            run = {"corpus": corpus, "system": system, "precision": precision, "seed": seed}
            run |= {"machine": describe_machine(), "told": told, "asked": asked, **result}
            runs.append(run)
            write_bytes(path, "".join(json.dumps(run) + "\n" for run in runs).encode())
            last = run["points"][-1]
            say(
                f"{name}, seed {seed}: dev NLL {last['nll']:.3f}, BLEU {run['bleu']:.2f}, "
                f"{last['cpu_s'] / 60:.1f} processor minutes"
            )
    if runs:
        report = format_report(runs)
        write_bytes(study.out / "table.md", report.encode())
        print(report, end="")
        draw(runs, study.out / "plot.svg")
    return 1 if failed else 0


def check_arguments(args: argparse.Namespace) -> None:
    for name in args.systems:
        system, _, precision = name.rpartition("-")
        if system not in NAMES or precision not in ("fp32", "bf16"):
            raise UserError(
                f"--systems {name}: give some of {', '.join(NAMES)}, each with -fp32 or -bf16"
            )
        if system == "fairseq" and not os.access(args.fairseq_python or "", os.X_OK):
            raise UserError(
                f"--systems {name}: --fairseq-python {args.fairseq_python} is not a program; "
                "give a Python 3.10 that has fairseq"
            )
        needs_peers = system in PEERS and system not in (*OWN, "fairseq")
        if needs_peers and not os.access(args.peer_python or "", os.X_OK):
            raise UserError(
                f"--systems {name}: --peer-python {args.peer_python} is not a program; "
                "make one with scripts/bench/train.py --make-peers"
            )


# ---- the report ----------------------------------------------------------------------------------


def group_by_system(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        _, name, _ = name_run(run)
        groups.setdefault(name, []).append(run)
    return groups


def describe_batches(system: str) -> str:
    if "training.grouping=length" in VARIANTS.get(system, ()):
        return "of similar lengths, without padding"
    return PEERS.get(system, "drawn at random, without padding")


def format_mean(values: Sequence[float], digits: int) -> str:
    text = f"{fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{digits}f}"
    return text


def interpolate(run: Run, key: str, cpu_s: float) -> float | None:
    """Return a value of the curve at a time, or None outside of it."""
    points = run["points"]
    for before, after in zip(points, points[1:], strict=False):
        if before["cpu_s"] <= cpu_s <= after["cpu_s"]:
            share = (cpu_s - before["cpu_s"]) / (after["cpu_s"] - before["cpu_s"])
            return before[key] + share * (after[key] - before[key])
    return None


def format_report(runs: list[Run]) -> str:
    parts = []
    for corpus in dict.fromkeys(run["corpus"] for run in runs):
        groups = group_by_system([run for run in runs if run["corpus"] == corpus])
        parts.append(f"## {corpus}\n\n{describe_runs(groups)}\n")
        parts.append(f"At equal updates:\n\n{format_by_update(groups)}")
        parts.append(f"At equal processor time:\n\n{format_by_time(groups)}")
    return "\n".join(parts)


def describe_runs(groups: dict[str, list[Run]]) -> str:
    first = next(iter(groups.values()))[0]
    versions: dict[str, str] = {}
    machines: list[str] = []
    for group in groups.values():
        versions |= group[0]["versions"]
        machines += [run["machine"] for run in group]
    return (
        f"{' and '.join(dict.fromkeys(machines))}, one thread; {format_pairs(first['told'])}.\n"
        f"{format_pairs(versions)}. Mean ± standard deviation over seeds. BLEU: `{first['signature']}`.\n"
    )


def format_pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def format_by_update(groups: dict[str, list[Run]]) -> str:
    updates = [point["update"] for point in next(iter(groups.values()))[0]["points"]]
    rows = []
    for name, group in groups.items():
        row = [name, str(len(group))]
        curves = [{point["update"]: point["nll"] for point in run["points"]} for run in group]
        for update in updates:
            row.append(format_mean([curve[update] for curve in curves], 3))
        ends = [run["points"][-1] for run in group]
        row += [
            format_mean([run["bleu"] for run in group], 2),
            f"{fmean(end['tokens'] / end['update'] for end in ends):,.0f}",
            f"{fmean(end['cpu_s'] for end in ends) / 60:.1f}",
            f"{group[0]['n_parameters']:,}",
            describe_batches(group[0]["system"]),
        ]
        rows.append(row)
    nlls_head = [f"NLL, {n:,}" for n in updates]
    tail = ["BLEU", "target pieces/update", "processor min", "parameters", "batches"]
    return format_table(["system", "seeds", *nlls_head, *tail], rows)


def format_by_time(groups: dict[str, list[Run]]) -> str:
    """Compare at the time at which the fastest system finished, and at half of it."""
    fastest = min(groups.values(), key=compute_mean_end)
    end = min(map(get_end, fastest))  # a time that each of its seeds reaches
    head = ["system"]
    for seconds in (end / 2, end):
        head += [f"NLL, {seconds / 60:.1f} min", "updates"]
    rows = []
    for name, group in groups.items():
        row = [name]
        for seconds in (end / 2, end):
            row.append(format_at(group, "nll", seconds, 3))
            row.append(format_at(group, "update", seconds, 0))
        rows.append(row)
    return format_table(head, rows)


def format_at(group: list[Run], key: str, cpu_s: float, digits: int) -> str:
    """Format the mean of a value at a time, or a dash if some run has none then."""
    values = []
    for run in group:
        value = interpolate(run, key, cpu_s)
        if value is None:
            return "-"
        values.append(value)
    return format_mean(values, digits)


def compute_mean_end(group: list[Run]) -> float:
    return fmean(map(get_end, group))


def get_end(run: Run) -> float:
    """Seconds of processor time of the whole run."""
    return run["points"][-1]["cpu_s"]


def draw(runs: list[Run], path: Path) -> None:
    """Draw the curves, a line for each seed; without vl-convert, say how to install it."""
    try:
        import vl_convert
    except ImportError:
        say(f"no {path.name}: it needs vl-convert; {HOW_TO_INSTALL}")
        return

    values = []
    for run in runs:
        corpus, name, seed = name_run(run)
        for point in run["points"]:
            values.append(
                {"corpus": corpus, "system": name, "seed": seed, "minutes": point["cpu_s"] / 60}
                | point
            )
    colour = {"field": "system", "type": "nominal", "scale": {"scheme": "tableau10"}, "sort": None}
    y = {"type": "quantitative", "title": "dev NLL a piece", "scale": {"zero": False}}

    def line(x: str, title: str) -> dict[str, Any]:
        across = {"field": x, "type": "quantitative", "title": title}
        return {
            "width": 380,
            "height": 300,
            "encoding": {"x": across, "color": colour},
            "layer": [
                {
                    "mark": {"type": "line", "point": True},
                    "encoding": {"y": y | {"field": "nll"}, "detail": {"field": "seed"}},
                }
            ],
        }

    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": values},
        "facet": {"row": {"field": "corpus", "title": None}},
        "spec": {"hconcat": [line("update", "updates"), line("minutes", "processor minutes")]},
    }
    write_bytes(path, vl_convert.vegalite_to_svg(spec).encode())


def main(line: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_overrides(parser)
    parser.add_argument(
        "--config",
        default="multi30k.yaml",
        metavar="FILE",
        help="of all runs (default: multi30k.yaml)",
    )
    parser.add_argument("--data-root", metavar="DIR", help="the config's data.root")
    parser.add_argument(
        "--store", metavar="DIR", help="prepared with that config, or made there (WORK/store)"
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        metavar="NAME",
        default=DEFAULT,
        help=f"of {', '.join(NAMES)}, each with -fp32 or -bf16 ({' '.join(DEFAULT)})",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N")
    parser.add_argument(
        "--every",
        type=int,
        default=250,
        metavar="N",
        help="updates between two points (default: 250)",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the folder of the runs, the table and the plot"
    )
    parser.add_argument(
        "--work",
        default="build/bench-learning",
        metavar="DIR",
        help="scratch (default: build/bench-learning)",
    )
    parser.add_argument("--peer-python", metavar="PATH", help="the Python that has the peers")
    parser.add_argument(
        "--fairseq-python", metavar="PATH", help="another, because fairseq needs Python 3.10"
    )
    args = parser.parse_intermixed_args(line)
    return run_command(lambda: work(args), "bench_learning")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
