"""How fast are data without a model? The loader alone on one core, and the plan of one epoch.

    python scripts/bench/loader.py                                     4.5M pairs, lengths log-normal with mean 29
    python scripts/bench/loader.py --like data/store --plan 36000000   lengths as in that store; and a plan at 36M pairs

The ids are drawn at random, for their values cost nothing. Two settings are compared by running this in turn, A B A B.
"""

import argparse
import os
import platform
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nmt.commands.cli import run_command

if TYPE_CHECKING:
    import numpy as np

    from nmt.data.plan import EpochPlan
    from nmt.data.store import TokenStore

N_PIECES = 37_000
MICRO_TOKENS = 3_200


def drawn_lengths(n: int, like: str | None) -> "tuple[np.ndarray, np.ndarray]":
    """Pieces of n pairs: whole pairs drawn from a store, or log-normal sources and targets near them."""
    import numpy as np

    from nmt.data.store import open_store

    random = np.random.default_rng(1)
    if like:
        store = open_store(Path(like), "train")
        lengths = [np.diff(side.offsets).astype(np.uint16) for side in (store.src, store.tgt)]
        pairs = random.integers(len(store), size=n, dtype=np.uint32)
        return lengths[0][pairs], lengths[1][pairs]
    # Mean exp(m + s^2 / 2)
    source = random.standard_normal(n, np.float32) * 0.6 + np.log(29) - 0.18
    target = source + random.standard_normal(n, np.float32) * 0.15
    src, tgt = (np.clip(np.exp(side), 1, 250).astype(np.uint16) for side in (source, target))
    return src, tgt


def written(folder: Path, n: int, like: str | None, has_ids: bool) -> "TokenStore":
    """A store of n pairs on disk, mapped as that of a run."""
    import numpy as np

    from nmt.data.store import ArrayWriter, Side, TokenStore
    from nmt.system.progress import track

    def side(name: str, lengths: np.ndarray) -> Side:
        ids, offsets = (
            ArrayWriter(folder / f"{name}.ids.npy", "uint16"),
            ArrayWriter(folder / name, "int64"),
        )
        offsets.append(np.zeros(1))
        end, random = 0, np.random.default_rng(2)
        for first in track(range(0, n, 1 << 20), f"write {name}", "million pairs"):
            ends = end + np.cumsum(lengths[first : first + (1 << 20)], dtype=np.int64)
            ids.append(
                random.integers(4, N_PIECES, int(ends[-1]) - end if has_ids else 0, dtype=np.uint16)
            )
            offsets.append(ends)
            end = int(ends[-1])
        ids.close()
        offsets.close()
        return Side(*(np.load(folder / file, mmap_mode="r") for file in (f"{name}.ids.npy", name)))

    src, tgt = drawn_lengths(n, like)
    return TokenStore(side("src", src), side("tgt", tgt))


def fill(plan: "EpochPlan", config: Any) -> str:
    """How full the updates are, but for the last; of very many, one in a hundred."""
    numbers = range(0, len(plan) - 1, 1 + len(plan) // 10_000) or range(1)
    src, tgt = (sum(side) / len(numbers) for side in zip(*map(plan.n_tokens, numbers), strict=True))
    return f"fill {src / config.src_tokens:.2%} source, {tgt / config.tgt_tokens:.2%} target"


def time_plan(n: int, like: str | None) -> str:
    """In a process of its own, whose greatest memory is the plan's."""
    import resource

    from nmt.config import TrainingConfig
    from nmt.data.plan import plan_epoch
    from nmt.system.progress import clock

    with TemporaryDirectory() as folder:
        pid = os.fork()
        if not pid:
            written(Path(folder), n, like, has_ids=False)
            os._exit(0)
        os.waitpid(pid, 0)
        import numpy as np

        from nmt.data.store import Side

        src, tgt = (
            Side(np.empty(0, np.uint16), np.load(f"{folder}/{name}", mmap_mode="r"))
            for name in ("src", "tgt")
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = clock()
        plan = plan_epoch(src.lengths, tgt.lengths, 1, 0, TrainingConfig(), MICRO_TOKENS)
        seconds = clock() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1e9 if sys.platform == "darwin" else 1e6
    return (
        f"plan     {n:>12,} pairs  {len(plan):,} updates in {seconds:.2f} s, peak RSS {peak / unit:.2f} GB "
        f"({before / unit:.2f} before), {fill(plan, TrainingConfig())}"
    )


def time_loader(n: int, like: str | None, seconds: float) -> str:
    import torch

    from nmt.config import TrainingConfig
    from nmt.data.loader import make_micro_batches
    from nmt.data.plan import plan_epoch
    from nmt.system.progress import clock
    from nmt.system.ranks import World

    torch.set_num_threads(1)
    config, world = TrainingConfig(), World(0, 1, torch.device("cpu"))
    with TemporaryDirectory() as folder:
        store = written(Path(folder), n, like, has_ids=True)
        plan = plan_epoch(store.src.lengths, store.tgt.lengths, 1, 0, config, MICRO_TOKENS)
        n_pairs = n_tgt = number = 0
        began = clock()
        while clock() - began < seconds and number < len(plan):
            micros = make_micro_batches(store, plan.micros(number), world)
            n_pairs += sum(micro.batch.src.n_sentences for micro in micros)
            n_tgt += plan.n_tokens(number)[1]
            number += 1
        took = clock() - began
    return (
        f"loader   {n:>12,} pairs  {n_pairs / took:,.0f} pairs/s, {n_tgt / took:,.0f} target tokens/s, "
        f"{number} updates in {took:.2f} s on one core, {fill(plan, config)}"
    )


def work(args: argparse.Namespace) -> int:
    # First, before torch takes memory
    rows = [time_plan(args.plan, args.like)] if args.plan else []
    if args.pairs:
        rows.append(time_loader(args.pairs, args.like, args.seconds))
    import numpy as np

    print(
        f"python {platform.python_version()}, numpy {np.__version__}, lengths "
        f"{'as in ' + args.like if args.like else 'log-normal, mean 29'}"
    )
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=4_500_000,
        metavar="N",
        help="pairs of the loader's store (4.5M); 0: no loader",
    )
    parser.add_argument(
        "--plan", type=int, default=0, metavar="N", help="also time the plan of an epoch of N pairs"
    )
    parser.add_argument(
        "--like", metavar="STORE", help="a prepared store whose lengths to draw from"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long to load (10)"
    )
    arguments = parser.parse_args()
    sys.exit(run_command(lambda: work(arguments), "bench_loader"))
