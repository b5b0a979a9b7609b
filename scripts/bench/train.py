"""Compares the speed of training with that of other trainers, and prints Markdown.

    python scripts/bench/train.py --data-root corpora/multi30k    # a loop over Hugging Face's Marian
    make build/peers/.installed                                   # install eole
    python scripts/bench/train.py --data-root corpora/multi30k --peer-python build/peers/bin/python

All have the same pieces, sizes, dropout, label smoothing, Adam and threads. The figures are target
tokens without padding over whole updates, without the first ones. Machines drift more than code
does. So one process runs at a time, in turn: A B C A B C; ratios are taken within a round; and what
the machine can do is measured before and after each process.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

import numpy as np
from machine import describe_machine, measure_products

from nmt.commands.cli import add_overrides, run_command
from nmt.config_files import load_config
from nmt.corpus.prepare import prepare
from nmt.data.store import TokenStore, open_store
from nmt.data.vocab import BOS, EOS, PAD, Vocab
from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.system.runtime import tune_process
from nmt.system.tables import Table

STEP_SCRIPT = Path(__file__).resolve().with_name("step.py")
PEERS_SCRIPT = Path(__file__).resolve().with_name("peers.py")
MAKE_PEERS = "make build/peers/.installed"
SKIP = 7  # first updates, which ask for memory; as many as step.py leaves out
TIMEOUT_S = 1800  # of a process
SIZES = {
    "base": {"d_model": 512, "d_ff": 2048, "n_heads": 8, "n_layers": 6},
    "small": {"d_model": 256, "d_ff": 1024, "n_heads": 4, "n_layers": 3},
    "multi30k": {"d_model": 128, "d_ff": 256, "n_heads": 4, "n_layers": 4},
}
SYSTEMS = {
    "ours": "nmt, this checkout: labels of the update",
    "marian": "a loop over Hugging Face's MarianMTModel, eager attention on CPU: labels that are not padding",
    "eole": "its command `train`: labels that its nn.CrossEntropyLoss counts",
}
NAMES = [f"{system}-{precision}" for precision in ("bf16", "fp32") for system in SYSTEMS]
TOKENS = 4096  # in an update
THREADS = 2
CONFIG = "multi30k.yaml"
WORK = Path("build/bench-train").resolve()
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Result:
    """What one process measured."""

    rates: list[float]  # target tokens a second, of each update
    n_tokens: float  # in an update, on average
    peak_rss_mb: float
    versions: dict[str, str]
    ceiling: float  # GFLOP/s of the machine in its precision


Results = dict[tuple[str, str], list[Result]]  # of (size, name), one for each round
Ceilings = list[dict[str, float]]  # of the machine, in order


def parse_answer(answer: str, precision: str, ceiling: float) -> Result:
    """Read what a process printed."""
    values = json.loads(answer)
    if values["precision"] != precision:
        raise UserError(f"asked for {precision}, it ran in {values['precision']}")
    tokens, seconds = values["tgt_tokens"], values["seconds"]
    rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
    return Result(rates, fmean(tokens), values["peak_rss_mb"], values["versions"], ceiling)


# ---- the work, the machine, the processes --------------------------------------------------------


def write_text(pairs: TokenStore, n_vocab: int, folder: Path) -> None:
    """Write train.{src,tgt} and vocab.txt for programs that read text.

    The words are numbers, t17 t4 ..., so that no tool can split, strip or normalise them in its own
    way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, side in (("src", pairs.src), ("tgt", pairs.tgt)):
        words = [f"t{i}" for i in np.asarray(side.ids).tolist()]
        offsets = np.asarray(side.offsets).tolist()
        lines = [" ".join(words[begin:end]) + "\n" for begin, end in pairwise(offsets)]
        (folder / f"train.{name}").write_text("".join(lines), encoding="ascii")
    words = [f"t{i}\n" for i in range(n_vocab) if i not in (PAD, BOS, EOS)]
    (folder / "vocab.txt").write_text("".join(words))


def make_step_command(size: str, precision: str, n_updates: int) -> list[str]:
    """Return the command that times our own updates; settings may follow it."""
    command = [sys.executable, str(STEP_SCRIPT), "--json", "--updates", str(n_updates)]
    shape = [f"model.{key}={n}" for key, n in SIZES[size].items()]
    return [*command, *shape, f"training.precision={precision}"]


def count_gflop_per_token(size: str, n_vocab: int, pairs: TokenStore) -> float:
    """Count the GFLOP that training costs for a target token.

    It costs six operations for each weight that a token passes, and for each product of attention.
    Source tokens pass the encoder and the keys and values of cross-attention, target tokens the rest
    of the decoder and the softmax. A query has two products with each key, and causal attention sees
    half of them.
    """
    shape = SIZES[size]
    d_model, n_layers = shape["d_model"], shape["n_layers"]
    src = pairs.src.lengths.astype(float)  # with end marks
    tgt = pairs.tgt.lengths.astype(float)
    layer_weights = (6 * d_model + 2 * shape["d_ff"]) * d_model
    weights = n_layers * layer_weights * (src.sum() + tgt.sum()) + d_model * n_vocab * tgt.sum()
    attention = n_layers * d_model * (2 * src @ src + tgt @ tgt + 2 * src @ tgt)
    return float(6 * (weights + attention) / tgt.sum() / 1e9)


def find_ceiling(precision: str, rates: dict[str, float]) -> float:
    """Return what the fastest path of this precision reached."""
    return max(rate for path, rate in rates.items() if path.startswith(precision))


class Bench:
    """What all processes share: the store, the text made of it, the environment they start in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # Before tune_process() adds to it
        self.env = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        tune_process()
        data = {"root": args.data_root, "store": str(WORK / "store-multi30k")}
        given = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
        self.overrides = [*given, *args.overrides]
        config = load_config(CONFIG, self.overrides)
        prepare(config.data, config.vocab, config.seed)
        prepared = Path(config.data.store)
        self.pairs = open_store(prepared, "train")
        self.n_vocab = Vocab.load(prepared / "vocab.model").size
        write_text(self.pairs, self.n_vocab, WORK / "text")

    def make_command(self, system: str, precision: str, size: str) -> list[str]:
        args = self.args
        if system == "ours":
            return [
                *make_step_command(size, precision, args.updates),
                "--config",
                CONFIG,
                "model.dropout=0.1",
                "training.label_smoothing=0.1",
                f"training.src_tokens={TOKENS}",
                f"training.tgt_tokens={TOKENS}",
                *self.overrides,
            ]
        job = {
            "system": system,
            "precision": precision,
            "text": str(WORK / "text"),
            "scratch": str(WORK),
            "n_vocab": self.n_vocab,
            "tokens": TOKENS,
            "updates": args.updates,
            "seconds": args.seconds,
            "threads": THREADS,
            "skip": SKIP,
            **SIZES[size],
        }
        path = WORK / f"{system}-{precision}-{size}.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        return [args.peer_python or sys.executable, str(PEERS_SCRIPT), str(path)]

    def run(self, size: str, name: str) -> str:
        """Run one process from start to end, and return what it printed; a log has its stderr."""
        system, precision = name.split("-")
        log = WORK / f"{name}-{size}.log"
        env = self.env if system == "ours" else self.env | MALLOC
        try:
            with open(log, "wb") as file:
                done = subprocess.run(
                    self.make_command(system, precision, size),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    check=True,
                    timeout=TIMEOUT_S,
                )
        except subprocess.SubprocessError as error:
            raise UserError(f"{name}, {size}: {error}; see {log}") from None
        return done.stdout

    def measure(self) -> tuple[Results, Ceilings]:
        """Run each system at each size, round after round."""
        results: Results = {}
        ceilings = [measure_products(THREADS)]
        for size, name in [*product(self.args.sizes, self.args.systems)] * self.args.rounds:
            precision = name.split("-")[1]
            answer = self.run(size, name)
            ceilings.append(measure_products(THREADS))
            # The mean of the measurements before and after the process
            ceiling = fmean(find_ceiling(precision, rates) for rates in ceilings[-2:])
            result = parse_answer(answer, precision, ceiling)
            results.setdefault((size, name), []).append(result)
            say(f"{name}, {size}: {median(result.rates):,.0f} target tokens/s")
        return results, ceilings


# ---- the report ----------------------------------------------------------------------------------


def format_spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def make_row(
    name: str, its: Sequence[Result], ours: Sequence[Result], gflop: float
) -> tuple[str, ...]:
    """Summarise the rounds of a system; the ratio to ours is taken within each."""
    rates = [median(result.rates) for result in its]
    own_rates = [median(result.rates) for result in ours]
    ratios = [own / rate for own, rate in zip(own_rates, rates, strict=False)]
    shares = [rate * gflop / result.ceiling for rate, result in zip(rates, its, strict=True)]
    n_updates = sum(len(result.rates) for result in its)
    peak_mb = max(result.peak_rss_mb for result in its)
    return (
        name,
        format_spread(rates, ",.0f"),
        format_spread(ratios, ".2f") if ratios else "-",
        format_spread(shares, ".0%"),
        f"{fmean(result.n_tokens for result in its):,.0f}",
        str(n_updates),
        f"{peak_mb / 1024:.1f} GiB",
    )


def work(args: argparse.Namespace) -> int:
    check_arguments(args)
    bench = Bench(args)
    results, ceilings = bench.measure()
    print(
        f"{describe_machine()}\n\n    python {args.line}\n\n"
        f"{THREADS} threads, {args.rounds} rounds in turn: "
        "the median (range) of their medians over updates.\n"
    )
    for size in args.sizes:
        print_size(size, bench, results)
    print_ceilings(ceilings)
    print_versions(results)
    wait = bench.env.get("OMP_WAIT_POLICY", "unset (ours spins only briefly)")
    malloc = " ".join(f"{key}={value}" for key, value in MALLOC.items())
    print(
        f"All have OMP_NUM_THREADS={THREADS}, OMP_WAIT_POLICY {wait}. "
        f"Ours keeps freed memory by itself (nmt/system/runtime.py); the others have {malloc}"
    )
    return 0


def print_size(size: str, bench: Bench, results: Results) -> None:
    gflop = count_gflop_per_token(size, bench.n_vocab, bench.pairs)
    shape = ", ".join(f"{key} {n}" for key, n in SIZES[size].items())
    print(f"{size}: {shape}; {bench.n_vocab:,} pieces; {gflop:.4g} GFLOP for a target token\n")
    rows = []
    for (its_size, name), its in results.items():
        if its_size == size:
            precision = name.split("-")[1]
            ours = results.get((size, f"ours-{precision}"), [])
            rows.append(make_row(name, its, ours, gflop))
    head = (
        size,
        "target tokens/s",
        "ours / it",
        "of ceiling",
        "tokens/update",
        "updates",
        "memory",
    )
    print(Table(head, rows).to_markdown() + "\n")


def print_ceilings(ceilings: Ceilings) -> None:
    rows = []
    for path in ceilings[0]:
        rates = [measured[path] for measured in ceilings]
        rows.append((path, format_spread(rates, ",.0f")))
    head = ("ceiling: one large product", "GFLOP/s, between all processes")
    print(Table(head, rows).to_markdown() + "\n")


def print_versions(results: Results) -> None:
    versions = {name.split("-")[0]: its[0].versions for (_, name), its in results.items()}
    rows = []
    for system, packages in versions.items():
        listed = ", ".join(f"{package} {version}" for package, version in packages.items())
        rows.append((system, SYSTEMS[system], listed))
    head = ("system", "what runs: what counts its target tokens", "versions")
    print(Table(head, rows).to_markdown() + "\n")


def check_arguments(args: argparse.Namespace) -> None:
    """Choose the systems if none are given, and refuse what cannot run."""
    if args.peer_python and not os.access(args.peer_python, os.X_OK):
        raise UserError(f"--peer-python {args.peer_python}: not a program; {MAKE_PEERS} makes one")
    runnable = [name for name in NAMES if args.peer_python or not name.startswith("eole")]
    for name in args.systems or ():
        if name not in NAMES:
            raise UserError(f"--systems {name}: give some of {', '.join(NAMES)}")
        if name not in runnable:
            raise UserError(f"--systems {name}: needs --peer-python, which {MAKE_PEERS} makes")
    args.systems = args.systems or runnable


def main(line: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_overrides(parser)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["base", "small"], help="(base small)"
    )
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)} (all that can run)"
    )
    numbers = (
        ("rounds", 3, ""),
        ("updates", 15, "to time in each process "),
        ("seconds", 30, "after which all but ours stop "),
    )
    for key, default, what in numbers:
        parser.add_argument(
            f"--{key}", type=int, default=default, metavar="N", help=f"{what}({default})"
        )
    parser.add_argument(
        "--data-root", required=True, metavar="DIR", help="data.root of multi30k.yaml"
    )
    parser.add_argument("--peer-python", metavar="PATH", help="the Python that has the peers")
    parser.set_defaults(line=f"scripts/bench/train.py {' '.join(line)}")
    args = parser.parse_intermixed_args(line)
    return run_command(lambda: work(args), "bench_train")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
