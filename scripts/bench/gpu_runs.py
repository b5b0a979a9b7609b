"""What does a GPU do in whole runs? The checks of first_gpu.py that are carried out where they are named.

Each starts processes one after the other, gives each a limit, writes a row about it at once, and ends within nine
minutes, whatever becomes of them. Their output is in build/first-gpu. What is predicted is a guess or a model's
(docs/benchmarks.md), and nothing is asked of it.
"""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_checks import ROOT, Bench, Sheet, Skip, compare_files, list_demo_settings, make_store
from gpu_speed import make_recipe, open_made_run, time_training
from peers import SYSTEMS
from train import PEERS_SCRIPT, write_text

from nmt.corpus.demo import generate_pairs
from nmt.system.progress import clock
from nmt.system.run_folder import MODEL_FILE, RunFolder

WORK = ROOT / "build" / "first-gpu"
ALL_S = 540.0  # of a check
SCORING_S = 60.0  # of them: the average and two test sets
START_S = 60.0  # of nmt-train, with its trial of memory: max_hours does not count it
WELL = "well"


class Ended(NamedTuple):
    how: str  # WELL, or what went wrong
    seconds: float
    line: str  # of what it printed


class Runs:
    """Processes of a check, with a log and a row of each, as long as there is time."""

    def __init__(self, bench: Bench, sheet: Sheet, name: str, is_fresh: bool = True) -> None:
        self.sheet = sheet
        self.folder = WORK / (f"{name}-dry" if bench.is_rehearsal else name)
        if is_fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ends_at = clock() + ALL_S
        sheet.table(["", "seconds", "found", "predicted"], [])

    @property
    def left_s(self) -> float:
        return self.ends_at - clock()

    def run(
        self,
        name: str,
        command: Sequence[str],
        limit_s: float,
        marker: str = "",
        environments: Sequence[dict[str, str]] = ({},),
        killed_at: RunFolder | None = None,
    ) -> Ended:
        """Run a command of this Python, once in each environment, side by side; kill all with the first
        checkpoint of `killed_at`. Return the last line that has the marker, or else the last.
        """
        began = clock()
        ends_at = min(began + limit_s, self.ends_at)
        path = self.folder / f"{name}.log"
        processes = []
        with open(path, "wb") as log:
            for environment in environments:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                processes.append(process)
        how = "no end in time"
        while clock() < ends_at:
            codes = [process.poll() for process in processes]
            if None not in codes:
                how = f"exit codes {codes}" if any(codes) else WELL
                break
            if killed_at is not None and any(killed_at.checkpoints.glob("step-*")):
                how = "killed"
                break
            time.sleep(0.02)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = path.read_text(errors="replace").splitlines()
        marked = [line for line in lines if marker in line]
        return Ended(how, clock() - began, (marked or lines or [""])[-1])

    def report(self, name: str, ended: Ended, predicted: str = "", asked: str = WELL) -> None:
        self.sheet.require(f"{name}: how it ended", ended.how, asked)
        self.sheet.add_row(name, f"{ended.seconds:.0f}", ended.line[:200], predicted)


# ---- base on Europarl --------------------------------------------------------------------------------------------

# And the BLEU that is predicted
TEST_SETS = {"newstest2013": "24 to 28", "newstest2014": "27 to 31"}
SIZE = [
    "training.validate_every=2500",
    "training.checkpoint_every=500",
    "training.keep_checkpoints=12",
]
DRY_SIZE = [
    "device=cpu",
    "vocab.size=200",
    "model.d_model=32",
    "model.d_ff=64",
    "model.n_heads=2",
    "model.n_layers=1",
    "training.steps=30",
    "training.src_tokens=500",
    "training.tgt_tokens=500",
    "training.checkpoint_every=5",
]


def find_europarl(bench: Bench, runs: Runs) -> Path:
    """The folder with its text; in a rehearsal the embedded corpus under the same names."""
    if not bench.is_rehearsal:
        if bench.data is None:
            raise Skip("give --data FOLDER")
        return bench.data.resolve()
    for name, split in zip(("train-1", *TEST_SETS), ("train", "valid", "test"), strict=True):
        sides = zip(*islice(generate_pairs(split), 200), strict=True)
        for ending, lines in zip(("en", "fr"), sides, strict=True):
            (runs.folder / f"{name}.{ending}").write_text("\n".join([*lines, ""]))
    return runs.folder


def list_europarl_settings(bench: Bench, runs: Runs, data: Path) -> list[str]:
    pairs = []
    for path in sorted(data.glob("train-*.en*")):
        pairs.append(f"{{src: {path.name}, tgt: {path.name.replace('.en', '.fr')}}}")
    return [
        "--config",
        "base-enfr.yaml",
        f"data.root={data}",
        f"data.store={runs.folder}/store",
        f"data.workers={os.cpu_count()}",
        f"data.train=[{', '.join(pairs)}]",
        "data.valid={src: newstest2013.en, tgt: newstest2013.fr}",
        "data.test=null",
        "training.checkpoint_minutes=null",
        f"out={runs.folder}/run",
        *(DRY_SIZE if bench.is_rehearsal else SIZE),
    ]


def check_europarl_text(bench: Bench, sheet: Sheet) -> None:
    """The store of base-enfr.yaml on Europarl English-French."""
    runs = Runs(bench, sheet, "europarl")
    settings = list_europarl_settings(bench, runs, find_europarl(bench, runs))
    ended = runs.run("prepare", ["-m", "nmt.commands.prepare", *settings], 170)
    runs.report("prepare", ended, "a minute on 16 cores")


def check_europarl(bench: Bench, sheet: Sheet) -> None:
    """Base on 1.96M pairs of Europarl English-French: seven minutes of training, the mean of five
    checkpoints, BLEU. Predicted for an H200. It decides whether training does on a GPU what it is for: the
    first row of the README's results.
    """
    runs = Runs(bench, sheet, "europarl", is_fresh=False)
    data = find_europarl(bench, runs)
    run = RunFolder(runs.folder / "run")
    shutil.rmtree(run.path, ignore_errors=True)
    train_s = min(420.0, runs.left_s - START_S - SCORING_S)
    command = ["-m", "nmt.commands.train", *list_europarl_settings(bench, runs, data)]
    command.append(f"training.max_hours={train_s / 3600:.5f}")
    ended = runs.run("train", command, runs.left_s - SCORING_S, "target tokens/s")
    runs.report("train", ended, "13,000 updates, 900,000 to 1,000,000 target tokens/s")
    average = ["-m", "nmt.commands.average", str(run.path), "--last", "5"]
    runs.report("average", runs.run("average", average, 40))
    for name, predicted in TEST_SETS.items():
        files = ["--src", f"{data}/{name}.en", "--ref", f"{data}/{name}.fr"]
        command = ["-m", "nmt.commands.eval", str(run.average), *files]
        runs.report(name, runs.run(name, command, 60, "BLEU"), predicted)


# ---- other trainers ----------------------------------------------------------------------------------------------

RATES = {  # of trainers, in target tokens/s, as predicted
    "marian": "220,000 to 300,000",
    "marian_compiled": "300,000 to 400,000",
    "nn_transformer": "200,000 to 300,000",
    "eole": "200,000 to 350,000",
}


def check_peers(bench: Bench, sheet: Sheet) -> None:
    """Base, bf16, 25,000 target tokens an update, random pieces in sentences as long as those of news. The
    others have padded batches of like lengths, torch's fused Adam and attention, and bf16 autocast: a loop over
    Hugging Face's Marian, the same compiled, one over nn.Transformer, and eole. Predicted for an H200. It
    decides what is said of what a user would take instead.
    """
    runs = Runs(bench, sheet, "peers")
    recipe = make_recipe(bench, "base")
    n_vocab, model = recipe.n_vocab, recipe.config.model
    write_text(make_store(recipe.n_pairs, n_vocab, recipe.longest), n_vocab, runs.folder)
    began = clock()
    _, timing = time_training(recipe, open_made_run(recipe, bench.world))
    ours = timing.n_tgt / sum(timing.seconds)
    ended = Ended(WELL, clock() - began, f"{ours:,.0f} target tokens/s")
    runs.report("ours", ended, "820,000 to 1,000,000")
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    job = {
        "precision": "bf16",
        "text": str(runs.folder),
        "scratch": str(runs.folder),
        "n_vocab": n_vocab,
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "n_heads": model.n_heads,
        "n_layers": model.n_layers,
        "tokens": recipe.config.training.tgt_tokens,
        "updates": 2 if bench.is_rehearsal else 60,
        "skip": 1 if bench.is_rehearsal else 30,
        "seconds": 45.0,
        "threads": os.cpu_count(),
    }
    uncompiled = {"TORCH_COMPILE_DISABLE": "1"} if bench.is_rehearsal else {}
    for system, predicted in RATES.items():
        package, _ = SYSTEMS[system]
        if find_spec(package) is None:
            sheet.add_row(system, "", f"{package} is not installed", predicted)
            continue
        path = runs.folder / f"{system}.json"
        path.write_text(json.dumps({"system": system, **job}))
        ended = runs.run(system, [str(PEERS_SCRIPT), str(path)], 130, environments=[uncompiled])
        if ended.how == WELL:
            answer = json.loads(ended.line)
            rate = sum(answer["tgt_tokens"]) / sum(answer["seconds"])
            told = f"{rate:,.0f} target tokens/s; ours are {ours / rate:.2f} times as many"
            ended = ended._replace(line=told)
        runs.report(system, ended, predicted)


# ---- two ranks ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A start of nmt-train; a second one of the same run continues it."""

    what: str
    run: str
    n_ranks: int = 2
    is_killed: bool = False
    has_segments: bool = False  # that expand: another allocator, which NCCL must get on with


PARTS = (
    Part("one rank", "one", n_ranks=1),
    Part("two ranks", "two"),
    Part("two ranks, killed", "killed", is_killed=True),
    Part("two ranks, continued", "killed"),
    Part("expandable segments, killed", "segments", is_killed=True, has_segments=True),
    Part("expandable segments, continued", "segments", has_segments=True),
)
# Two runs, and by how much a tensor may differ: sums in another order round otherwise.
ALIKE = (("one", "two", 1e-5), ("two", "killed", 0.0), ("two", "segments", 0.0))


def check_ranks(bench: Bench, sheet: Sheet) -> None:
    """The embedded corpus in fp32, by two ranks of nmt-train, each with a GPU of its own."""
    if torch.cuda.device_count() == 1:
        raise Skip("this machine has one GPU")
    compare_ranks(bench, Runs(bench, sheet, "ranks"), PARTS[:-2], is_shared=False)


def check_shared_gpu(bench: Bench, sheet: Sheet) -> None:
    """The embedded corpus in fp32, by two ranks of nmt-train that share the first GPU. NCCL refuses that on
    one host, so each rank names a host of its own, and what they send goes through sockets. Predicted: each
    ends, also with segments that expand, where others have seen NCCL hang; and the same bits after SIGKILL. It
    decides whether sums over ranks are right with NCCL.
    """
    compare_ranks(bench, Runs(bench, sheet, "shared-gpu"), PARTS, is_shared=True)


def compare_ranks(bench: Bench, runs: Runs, parts: Sequence[Part], is_shared: bool) -> None:
    for part in parts:
        command = ["-m", "nmt.commands.train", "--config", "demo.yaml"]
        steps = 30 if bench.is_rehearsal else 60
        settings = list_demo_settings(bench, runs.folder, part.run, steps)
        settings |= {"training.precision": "fp32", "training.checkpoint_every": 5}
        settings["device"] = "cpu" if bench.is_rehearsal else "auto"
        command += [f"{key}={value}" for key, value in settings.items()]
        killed_at = RunFolder(runs.folder / part.run) if part.is_killed else None
        environments = list_environments(part, is_shared)
        ended = runs.run(part.what, command, 90, environments=environments, killed_at=killed_at)
        runs.report(part.what, ended, asked="killed" if part.is_killed else WELL)
    for one, other, most in ALIKE[: len(parts) // 2]:
        checkpoints = [RunFolder(runs.folder / run).checkpoints for run in (one, other)]
        error = compare_files(*(path / "last" / MODEL_FILE for path in checkpoints))
        runs.sheet.bound(f"{one} and {other}: error of the worst tensor", error, most)


def list_environments(part: Part, is_shared: bool) -> list[dict[str, str]]:
    """What torchrun would set; for a GPU that ranks share, on as many hosts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(part.n_ranks),
        "LOCAL_WORLD_SIZE": str(part.n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [str(rank) for rank in range(part.n_ranks)]
    if not is_shared:
        return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
    common |= {
        "LOCAL_RANK": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    if part.has_segments:
        common["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return [{**common, "RANK": rank, "NCCL_HOSTID": f"rank{rank}"} for rank in ranks]
