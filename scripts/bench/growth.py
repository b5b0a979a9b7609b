"""How does the cost of an update grow with micro-batch, sentence length, layers and vocabulary? And its memory?

    python scripts/bench/growth.py                                  four tables, and build/bench-growth/growth.png
    python scripts/bench/growth.py --model base --only micro-batch length --precision bf16
    python scripts/bench/growth.py --memory                         peak memory with our softmax and with full logits

An update is one micro-batch of random ids in the trainer's own `run_update`. Variants take turns, for machines drift;
cost grows as it should while GFLOP/s stay level. `--memory`: one update, not compiled, a process for each softmax.
"""

# ruff: noqa: E402
import argparse
import importlib.util
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmt.commands.cli import run_command
from nmt.system.errors import UserError
from nmt.system.runtime import tune_process

if __name__ == "__main__":
    tune_process()  # before torch comes

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from nmt.data.batch import Batch
from nmt.data.loader import MicroBatch, Update, make_batch
from nmt.data.plan import Cursor
from nmt.data.store import Side, TokenStore
from nmt.model.transformer import Transformer
from nmt.profile.cost import DeviceTimer, count_flop, read_peak_memory
from nmt.system.files import make_folder
from nmt.system.progress import track
from nmt.system.ranks import World, join_world
from nmt.train.loss import Objective
from nmt.train.optimizer import make_optimizer
from nmt.train.parallel import make_replica
from nmt.train.update import run_update

MODELS = {"small": (ModelConfig(256, 1024, 4, 3), 10_000), "base": (ModelConfig(), 37_000)}
SWEEPS = ("micro-batch", "length", "layers", "vocabulary")
TOKENS = 4_096  # a side of a micro-batch, where a sweep varies something else
WARM_UP = 2  # rounds that compile and allocate


class Case(NamedTuple):
    value: int  # of what a sweep varies
    model: ModelConfig
    n_vocab: int
    lengths: np.ndarray  # (S,) tokens of each sentence with its mark, the same on both sides


class Row(NamedTuple):
    value: int
    seconds: list[float]
    rate: float  # target tokens/s
    flop: float  # for a target token and the source token beside it


class FullLogits(Objective):
    """With torch's own loss of all logits at once; the plain NLL, which would take memory too, is not made."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        weight = self.model.projection.weight
        logits = F.linear(self.model(batch.src, batch.tgt), weight)  # (T, V)
        # Torch's rule smooths over the gold piece too
        smoothing = self.smoothing * len(weight) / (len(weight) - 1)
        loss = F.cross_entropy(
            logits, batch.labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing
        )
        return loss, loss.detach()


SOFTMAXES = {"chunked": Objective, "full": FullLogits}


def drawn_lengths(n_tokens: int) -> np.ndarray:
    """As in WMT14: log-normal, 30 tokens in the mean, 128 at most; the last one fills up to exactly n_tokens."""
    # Mean exp(m + s^2 / 2)
    normal = np.random.default_rng(1).standard_normal(n_tokens) * 0.6 + np.log(30) - 0.18
    lengths = np.clip(np.exp(normal).round().astype(np.int64), 2, 128)
    ends = np.minimum(lengths.cumsum(), n_tokens)
    return np.diff(ends[: ends.searchsorted(n_tokens) + 1], prepend=0)


def sweep(name: str, model: ModelConfig, n_vocab: int) -> list[Case]:
    usual, doubling = drawn_lengths(TOKENS), [1 << i for i in range(7)]
    return {
        "micro-batch": [Case(512 * n, model, n_vocab, drawn_lengths(512 * n)) for n in doubling],
        "length": [Case(8 * n, model, n_vocab, np.full(TOKENS // 8 // n, 8 * n)) for n in doubling],
        "layers": [Case(n, replace(model, n_layers=n), n_vocab, usual) for n in (1, 2, 3, 4, 6, 8)],
        "vocabulary": [Case(n, model, n, usual) for n in (8_000, 16_000, 32_000, 64_000)],
    }[name]


def made_update(case: Case, world: World) -> Update:
    """New each time, for a batch keeps what was once derived from it."""
    n_tokens, offsets = int(case.lengths.sum()), np.concatenate(([0], np.cumsum(case.lengths - 1)))
    random = np.random.default_rng(2)
    src, tgt = (
        Side(random.integers(4, case.n_vocab, offsets[-1], np.uint16), offsets) for _ in range(2)
    )
    batch = make_batch(TokenStore(src, tgt), np.arange(len(case.lengths))).to(world.device)
    return Update([MicroBatch(0, batch)], n_tokens, n_tokens, Cursor())


def measure(
    cases: list[Case],
    training: TrainingConfig,
    n_updates: int,
    world: World,
    warm_up: int = WARM_UP,
    softmax: str = "chunked",
) -> list[Row]:
    """Cases of the same model and vocabulary train one model, as batches of a run do."""
    trained = {}
    for config, n_vocab in {(case.model, case.n_vocab) for case in cases}:
        model = Transformer(config, n_vocab).to(world.device)
        objective = SOFTMAXES[softmax](model, training.label_smoothing)
        # Shapes vary, so nothing is compiled
        replica = make_replica(objective, world, training, None)
        trained[config, n_vocab] = replica, make_optimizer(model, OptimizerConfig())
    seconds: list[list[float]] = [[] for _ in cases]
    for step in track(
        range(1, warm_up + n_updates + 1), "all variants", "rounds", warm_up + n_updates
    ):
        for case, times in zip(cases, seconds, strict=True):
            run = RunConfig(model=case.model, training=training)
            update, ticks = made_update(case, world), DeviceTimer(world.device)
            ticks.mark()
            run_update(*trained[case.model, case.n_vocab], update, step, run, world)
            ticks.mark()
            times += ticks.seconds() if step > warm_up else []
    rows = []
    for (value, config, n_vocab, lengths), times in zip(cases, seconds, strict=True):
        # The length of the sentence around a token, in the mean
        seen = float((lengths**2).sum() / lengths.sum())
        flop = count_flop(config, n_vocab, seen, seen)
        rows.append(
            Row(value, times, float(lengths.sum() / statistics.median(times)), flop.src + flop.tgt)
        )
    return rows


def table(name: str, rows: list[Row]) -> str:
    head = f"| {name} | ms (least - most) | target tokens/s | MFLOP/token | GFLOP/s |\n|--:|--:|--:|--:|--:|\n"
    times = [[1e3 * f(row.seconds) for f in (statistics.median, min, max)] for row in rows]
    return head + "".join(
        f"| {row.value:,} | {ms:,.1f} ({least:,.1f} - {most:,.1f}) | {row.rate:,.0f} | "
        f"{row.flop / 1e6:,.1f} | {row.rate * row.flop / 1e9:,.1f} |\n"
        for row, (ms, least, most) in zip(rows, times, strict=True)
    )


def plot(results: dict[str, list[Row]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axis, (name, rows) in zip(figure.subplots(2, 2).flat, results.items(), strict=False):
        values, work = [row.value for row in rows], axis.twinx()
        axis.plot(values, [row.rate for row in rows], "o-")
        axis.set(xlabel=name, ylabel="target tokens/s", xscale="log", ylim=(0, None))
        axis.set_xticks(values, [f"{n:,}" for n in values])
        axis.minorticks_off()  # which a log scale labels too
        work.plot(values, [row.rate * row.flop / 1e9 for row in rows], "s--", color="gray")
        work.set(ylabel="GFLOP/s (dashed)", ylim=(0, None))
    # Sweeps left out; after the four come the right-hand scales
    for axis in figure.axes[len(results) : 4]:
        axis.set_axis_off()
    figure.savefig(path, dpi=120)


def compare_memory(args: argparse.Namespace) -> None:
    print(
        f"| one update of {args.tokens:,} + {args.tokens:,} tokens | peak memory, GB |\n|---|--:|"
    )
    peaks = []
    for softmax, name in zip(SOFTMAXES, ("softmax in chunks", "full logits"), strict=True):
        options = [
            f"--memory={softmax}",
            f"--tokens={args.tokens}",
            f"--precision={args.precision}",
        ]
        done = subprocess.run(
            [sys.executable, __file__, f"--model={args.model}", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        is_lacking = (
            done.returncode == -9
            or "OutOfMemory" in done.stderr
            or "allocate memory" in done.stderr
        )
        if done.returncode and not is_lacking:
            raise RuntimeError(f"{' '.join(options)}: exit {done.returncode}\n{done.stderr}")
        peaks += [] if is_lacking else [int(done.stdout)]
        print(
            f"| {name} | {'does not fit, or killed' if is_lacking else f'{peaks[-1] / 1e9:.2f}'} |",
            flush=True,
        )
    print(f"| ratio | {peaks[1] / peaks[0]:.2f} |" if len(peaks) == 2 else "")


def main(args: argparse.Namespace) -> int:
    if min(args.updates, args.tokens) < 1:
        raise UserError(
            f"--updates {args.updates}, --tokens {args.tokens}: both must be at least 1"
        )
    if not args.memory and importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib, for the plot, is not installed; pip install 'nmt[plot]'")
    args.model = args.model or ("base" if args.memory else "small")
    model, n_vocab = MODELS[args.model]
    with join_world() as world:
        training = TrainingConfig(
            precision=args.precision, compile="off" if args.memory else "auto"
        )
        if args.memory in SOFTMAXES:
            case = Case(args.tokens, model, n_vocab, drawn_lengths(args.tokens))
            measure([case], training, 1, world, 0, args.memory)
            print(read_peak_memory(world.device))
            return 0
        device = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
        n_threads = torch.get_num_threads()
        print(
            f"{device}, {n_threads} threads, torch {torch.__version__}, {args.model} {args.precision}\n"
        )
        if args.memory:
            compare_memory(args)
            return 0
        folder, results = make_folder(args.out), {}
        for name in args.only:
            results[name] = measure(sweep(name, model, n_vocab), training, args.updates, world)
            print(table(name, results[name]), flush=True)
        plot(results, folder / "growth.png")
    return 0


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, help="small: 256/1024, 3+3 layers, 10k (base for --memory)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="(fp32)")
    parser.add_argument(
        "--updates", type=int, default=7, metavar="N", help="timed updates of each variant (7)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SWEEPS, default=list(SWEEPS), help="some of the sweeps"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench-growth"),
        metavar="FOLDER",
        help="for growth.png",
    )
    parser.add_argument(
        "--memory",
        nargs="?",
        const="both",
        choices=("both", *SOFTMAXES),
        help="compare peak memory",
    )
    parser.add_argument(
        "--tokens", type=int, default=25_000, metavar="N", help="a side, for --memory (25,000)"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(parsed()), "bench_growth"))
