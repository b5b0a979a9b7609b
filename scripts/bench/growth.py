"""How do the time and memory of an update grow with micro-batch, sentence length, layers and
vocabulary?

    python scripts/bench/growth.py              four tables, and build/bench-growth/growth.png
    python scripts/bench/growth.py --model base --only micro-batch length --precision bf16
    python scripts/bench/growth.py --memory     peak memory with our softmax and with full logits

An update is one micro-batch of random ids in the trainer's own `run_update`. Variants take turns,
because machines drift. Time grows as it should while GFLOP/s stay level. `--memory` measures one
update, not compiled, in a process for each softmax.
"""

# ruff: noqa: E402
import argparse
import importlib.util
import signal
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
    tune_process()  # before torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor

from nmt.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from nmt.data.batch import Batch
from nmt.data.loader import MicroBatch, Update, make_batch
from nmt.data.plan import Cursor
from nmt.data.store import Side, TokenStore
from nmt.model.transformer import Transformer
from nmt.profile.cost import DeviceTimer, count_flop
from nmt.system.device import read_peak_memory
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
    value: int  # of what the sweep varies
    model: ModelConfig
    n_vocab: int
    lengths: np.ndarray  # (S,) tokens of each sentence, its mark included, the same on both sides


class Row(NamedTuple):
    value: int
    seconds: list[float]  # of each update
    rate: float  # target tokens/s
    flop: float  # for a target token and the source token beside it

    @property
    def speed(self) -> float:
        """FLOP/s"""
        return self.rate * self.flop


class FullLogits(Objective):
    """Torch's own loss, of all logits at once. The plain NLL, which would take memory too, is not
    computed.
    """

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


def draw_lengths(n_tokens: int) -> np.ndarray:
    """Draw lengths of sentences as in WMT14: log-normal, 30 tokens in the mean, 128 at most. The last
    sentence fills up to exactly `n_tokens`.
    """
    sigma = 0.6
    mu = np.log(30) - sigma**2 / 2  # the mean of a log-normal is exp(mu + sigma^2 / 2)
    normal = np.random.default_rng(1).standard_normal(n_tokens) * sigma + mu
    lengths = np.clip(np.exp(normal).round().astype(np.int64), 2, 128)
    ends = np.minimum(lengths.cumsum(), n_tokens)
    n_sentences = ends.searchsorted(n_tokens) + 1
    return np.diff(ends[:n_sentences], prepend=0)


def list_cases(sweep: str, model: ModelConfig, n_vocab: int) -> list[Case]:
    """List the variants of one sweep."""
    usual = draw_lengths(TOKENS)
    cases = []
    if sweep == "micro-batch":
        for n_tokens in (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768):
            cases.append(Case(n_tokens, model, n_vocab, draw_lengths(n_tokens)))
    elif sweep == "length":
        for length in (8, 16, 32, 64, 128, 256, 512):
            lengths = np.full(TOKENS // length, length)
            cases.append(Case(length, model, n_vocab, lengths))
    elif sweep == "layers":
        for n_layers in (1, 2, 3, 4, 6, 8):
            cases.append(Case(n_layers, replace(model, n_layers=n_layers), n_vocab, usual))
    elif sweep == "vocabulary":
        for size in (8_000, 16_000, 32_000, 64_000):
            cases.append(Case(size, model, size, usual))
    return cases


def make_update(case: Case, world: World) -> Update:
    """Make an update of random ids; a new one each time, because a batch keeps what is derived from
    it.
    """
    random = np.random.default_rng(2)
    # The mark at a sentence's end is not stored.
    offsets = np.concatenate(([0], np.cumsum(case.lengths - 1)))
    src = random.integers(4, case.n_vocab, offsets[-1], np.uint16)
    tgt = random.integers(4, case.n_vocab, offsets[-1], np.uint16)
    store = TokenStore(Side(src, offsets), Side(tgt, offsets))
    batch = make_batch(store, np.arange(len(case.lengths))).to(world.device)
    n_tokens = int(case.lengths.sum())
    return Update([MicroBatch(0, batch)], n_tokens, n_tokens, Cursor())


def measure(
    cases: list[Case],
    training: TrainingConfig,
    n_updates: int,
    world: World,
    warm_up: int = WARM_UP,
    softmax: str = "chunked",
) -> list[Row]:
    """Time updates of each case. Cases of the same model and vocabulary train one model, as the
    batches of a run do.
    """
    trained = {}
    for case in cases:
        shape = case.model, case.n_vocab
        if shape in trained:
            continue
        model = Transformer(case.model, case.n_vocab).to(world.device)
        objective = SOFTMAXES[softmax](model, training.label_smoothing)
        # Shapes vary, so nothing is compiled.
        replica = make_replica(objective, world, training, None)
        trained[shape] = replica, make_optimizer(model, OptimizerConfig())

    seconds: list[list[float]] = [[] for _ in cases]
    n_rounds = warm_up + n_updates
    for step in track(range(1, n_rounds + 1), "all variants", "rounds", n_rounds):
        for case, times in zip(cases, seconds, strict=True):
            replica, optimizer = trained[case.model, case.n_vocab]
            config = RunConfig(model=case.model, training=training)
            update = make_update(case, world)
            timer = DeviceTimer(world.device)
            timer.mark()
            run_update(replica, optimizer, update, step, config, world)
            timer.mark()
            if step > warm_up:
                times += timer.seconds()

    rows = []
    for case, times in zip(cases, seconds, strict=True):
        n_tokens = case.lengths.sum()
        rate = float(n_tokens / statistics.median(times))
        # The length of the sentence around a token, in the mean over tokens
        seen = float((case.lengths**2).sum() / n_tokens)
        flop = count_flop(case.model, case.n_vocab, seen, seen)
        rows.append(Row(case.value, times, rate, flop.src + flop.tgt))
    return rows


def format_table(sweep: str, rows: list[Row]) -> str:
    lines = [
        f"| {sweep} | ms (least - most) | target tokens/s | MFLOP/token | GFLOP/s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        median = 1e3 * statistics.median(row.seconds)
        least, most = 1e3 * min(row.seconds), 1e3 * max(row.seconds)
        cells = [
            f"{row.value:,}",
            f"{median:,.1f} ({least:,.1f} - {most:,.1f})",
            f"{row.rate:,.0f}",
            f"{row.flop / 1e6:,.1f}",
            f"{row.speed / 1e9:,.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, list[Row]], path: Path) -> None:
    import vl_convert

    panels = []
    for sweep, rows in results.items():
        points = [{"n": row.value, "rate": row.rate, "speed": row.speed / 1e9} for row in rows]
        scale = {"type": "log", "nice": False}
        x = {"field": "n", "type": "quantitative", "title": sweep, "scale": scale}
        layers = []
        for field, title, mark in (
            ("rate", "target tokens/s", {"type": "line", "point": True}),
            ("speed", "GFLOP/s (dashed)", {"type": "line", "strokeDash": [5, 3], "color": "gray"}),
        ):
            y = {"field": field, "type": "quantitative", "title": title}
            layers.append({"mark": mark, "encoding": {"x": x, "y": y}})
        resolve = {"scale": {"y": "independent"}}
        panels.append({"data": {"values": points}, "layer": layers, "resolve": resolve})
    path.write_bytes(vl_convert.vegalite_to_png({"concat": panels, "columns": 2}, scale=2))


def compare_memory(args: argparse.Namespace) -> None:
    """Print the peak memory of an update with each softmax."""
    print(f"| one update of {args.tokens:,} + {args.tokens:,} tokens | peak memory, GB |")
    print("|---|--:|")
    peaks = []
    for softmax, name in (("chunked", "softmax in chunks"), ("full", "full logits")):
        peak = measure_peak_apart(args, softmax)
        if peak is None:
            shown = "does not fit, or killed"
        else:
            peaks.append(peak)
            shown = f"{peak / 1e9:.2f}"
        print(f"| {name} | {shown} |", flush=True)
    if len(peaks) == 2:
        print(f"| ratio | {peaks[1] / peaks[0]:.2f} |")


def measure_peak_apart(args: argparse.Namespace, softmax: str) -> int | None:
    """Measure the peak memory of one update in a process of its own; None if it does not fit."""
    options = [
        f"--model={args.model}",
        f"--memory={softmax}",
        f"--tokens={args.tokens}",
        f"--precision={args.precision}",
    ]
    done = subprocess.run(
        [sys.executable, __file__, *options], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return int(done.stdout)
    is_killed = done.returncode == -signal.SIGKILL
    if is_killed or "OutOfMemory" in done.stderr or "allocate memory" in done.stderr:
        return None
    raise RuntimeError(f"{' '.join(options)}: exit {done.returncode}\n{done.stderr}")


def main(args: argparse.Namespace) -> int:
    if min(args.updates, args.tokens) < 1:
        raise UserError(
            f"--updates {args.updates}, --tokens {args.tokens}: both must be at least 1"
        )
    if not args.memory and importlib.util.find_spec("vl_convert") is None:
        raise UserError("vl-convert, for the plot, is not installed; pip install 'nmt[report]'")
    if args.model is None:
        args.model = "base" if args.memory else "small"
    model, n_vocab = MODELS[args.model]
    training = TrainingConfig(precision=args.precision, compile="off" if args.memory else "auto")
    with join_world() as world:
        # one softmax, as `measure_peak_apart` asks for it
        if args.memory in SOFTMAXES:
            case = Case(args.tokens, model, n_vocab, draw_lengths(args.tokens))
            measure([case], training, 1, world, 0, args.memory)
            print(read_peak_memory(world.device))
            return 0

        device = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
        threads = f"{torch.get_num_threads()} threads"
        print(f"{device}, {threads}, torch {torch.__version__}, {args.model} {args.precision}\n")
        if args.memory:
            compare_memory(args)
            return 0

        folder = make_folder(args.out)
        results = {}
        for sweep in args.only:
            cases = list_cases(sweep, model, n_vocab)
            results[sweep] = measure(cases, training, args.updates, world)
            print(format_table(sweep, results[sweep]), flush=True)
        plot(results, folder / "growth.png")
    return 0


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
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
    sys.exit(run_command(lambda: main(parse_arguments()), "bench_growth"))
