"""What safety costs: checkpoints while the demo trains, and writing and verifying states up to the size of `big`.

    python scripts/bench/saving.py               the demo with and without checkpoints, in turn, then folders
    python scripts/bench/saving.py --rounds 0    only the folders

The demo's time is that of the run's own `elapsed_s`. A folder is verified after its pages were dropped from the cache,
where that is allowed, and again from the cache.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nmt.commands.cli import run_command


def demo_seconds(folder: Path, updates: int, every: int | None) -> float:
    """Of so many updates of the demo, with a checkpoint after each `every`."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    setting = "null" if every is None else str(every)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nmt.commands.train",
            "--config",
            "demo.yaml",
            f"data.store={folder / 'store'}",
            f"out={run}",
            f"training.steps={updates}",
            f"training.checkpoint_every={setting}",
            "evaluation.bleu=false",
            "training.validate_every=1000000",
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(line["elapsed_s"] for line in lines if line["kind"] == "train")


def demo(args: argparse.Namespace, folder: Path) -> None:
    with_them, without = [], []
    for _ in range(args.rounds):
        without.append(demo_seconds(folder, args.updates, None))
        with_them.append(demo_seconds(folder, args.updates, args.every))
    ratios = [a / b - 1 for a, b in zip(with_them, without, strict=True)]
    print(
        f"demo, {args.updates} updates, a checkpoint every {args.every}: {with_them} s, without: {without} s; "
        f"median of the ratios {100 * statistics.median(ratios):+.2f} %",
        flush=True,
    )


def folders(folder: Path) -> None:
    import torch

    from nmt.checkpoint import TrainState, save_checkpoint, take_snapshot
    from nmt.config import VocabConfig, load_config
    from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
    from nmt.data.vocab import Vocab
    from nmt.model.transformer import Transformer
    from nmt.system.files import verify
    from nmt.system.progress import clock
    from nmt.system.run_folder import RunFolder
    from nmt.train.optimizer import make_optimizer, set_learning_rate

    # a vocabulary as small as it can be: the tensors take the time
    write_word_counts(folder / "words", tally_words([b"abcdefgh"]))
    vocab = Vocab(train_bpe(folder / "words", VocabConfig(size=13)))

    for name in ("demo", "base", "big"):
        config = load_config(f"{name}.yaml")
        model = Transformer(config.model, config.vocab.size)
        optimizer = make_optimizer(model, config.optimizer)
        set_learning_rate(optimizer, 1e-4)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()  # so that the moments are numbers as they come
        optimizer.zero_grad()
        path = RunFolder(folder / name).checkpoint(1)
        taken = take_snapshot(model, optimizer)
        seconds = []
        for _ in range(3):
            began = clock()
            save_checkpoint(path, taken, TrainState(step=1), config, vocab)
            seconds.append(clock() - began)
        size = sum(file.stat().st_size for file in path.iterdir())
        del model, optimizer, taken
        is_cold, times = drop_cache(), []
        for _ in range(3):
            began = clock()
            verify(path)
            times.append(clock() - began)
        print(
            f"{name}, {size / 1e9:.3f} GB: on the disk in {statistics.median(seconds):.2f} s (median of 3), "
            f"verified in {times[0]:.2f} s {'from the disk' if is_cold else '(cache not dropped)'}, "
            f"{min(times[1:]):.2f} s from the cache",
            flush=True,
        )
        shutil.rmtree(path)


def drop_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def work(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.rounds:
            demo_seconds(Path(folder), 2, None)  # prepares the store
            demo(args, Path(folder))
        folders(Path(folder))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", type=int, default=201, help="of the demo, in each run (default: 201)"
    )
    parser.add_argument(
        "--every", type=int, default=50, help="updates between checkpoints (default: 50)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each kind, in turn (default: 3)"
    )
    parser.add_argument(
        "--folder", help="where to write some gigabytes (default: the system's temporary folder)"
    )
    return run_command(lambda: work(parser.parse_args()), "bench_saving")


if __name__ == "__main__":
    sys.exit(main())
