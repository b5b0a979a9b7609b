"""Has a speed been lost? Each figure is a ratio to a yardstick of the same minutes, and has a floor.

    make bench-floors                                   all figures: five minutes on two cores
    python scripts/bench/floors.py encoding server      some of them
    python scripts/bench/floors.py --lenient encoding   on a noisy machine: only half of what was recorded is a failure
    python scripts/bench/floors.py --record             make what is measured the new floors of this processor

A machine drifts by tens of per cent, and its yardstick with it, so ratios can be compared between days
where speeds cannot. floors.json has what was measured on each kind of processor; a figure of less than
nine tenths of that is a failure. The text is made up, so no corpus is needed.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import decoding
import serving
from machine import describe_machine
from train import count_gflop_per_token, find_ceiling, make_step_command

from nmt.commands.cli import run_command
from nmt.config_files import load_config
from nmt.data.store import open_store
from nmt.system.errors import UserError
from nmt.system.files import read_json, write_json
from nmt.system.progress import clock, say
from nmt.system.runtime import count_cores, read_cpu_info, tune_process
from nmt.system.tables import Table

FLOORS = Path(__file__).with_name("floors.json")
YARDSTICKS = read_json(FLOORS)["yardsticks"]  # by group of figures
SHARE, LENIENT_SHARE = 0.9, 0.5  # of what was measured when the floors were recorded
N_WORDS, N_PAIRS, N_HELD_OUT = 12_000, 20_000, 500
UPDATES = 5
ROUNDS = 3
CLIENTS = 8
# so that models with random weights write outputs of a known length
AS_LONG_AS_SOURCE = ["decoding.max_ratio=1", "decoding.max_extra=0", "decoding.min_length=0"]


# ---- the text -------------------------------------------------------------------------------------------------------


def make_text(folder: Path) -> None:
    """Write files named as those of multi30k.yaml. Words are made of random letters, and as frequent as
    words are: the n-th has a share of 1 / n.
    """
    draw = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(N_WORDS)]
    weights = [1 / (n + 2) for n in range(N_WORDS)]
    for split, n_pairs in (("train", N_PAIRS), ("valid", N_HELD_OUT), ("test", N_HELD_OUT)):
        for side in ("en", "de"):
            lines = []
            for _ in range(n_pairs):
                length = max(1, round(draw.gauss(13, 4)))
                lines.append(" ".join(draw.choices(words, weights, k=length)) + "\n")
            (folder / f"{split}.{side}").write_text("".join(lines), encoding="ascii")


# ---- the figures ----------------------------------------------------------------------------------------------------


class Bench:
    """What all figures share: the text, the run that it is prepared for, and the folder of both."""

    def __init__(self, folder: Path) -> None:
        from nmt.system.device import is_fast_in_bf16  # torch comes with it

        self.folder = folder
        self.precisions = ["fp32", "bf16"] if is_fast_in_bf16() else ["fp32"]
        self.threads = count_cores()
        self.config = [
            "--config",
            "multi30k.yaml",
            f"data.root={folder}",
            f"data.store={folder}/store",
        ]

    @property
    def run(self) -> Path:
        """A run of one update, made when it is first asked for."""
        run = self.folder / "run"
        if not run.exists():
            self.start(
                "nmt.commands.train", f"out={run}", "training.steps=1", "evaluation.bleu=false"
            )
        return run

    def start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *self.config, *arguments]
        with open(self.folder / "log", "ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def measure_training(self, size: str, precision: str) -> float:
        """The share of a plain product's speed that whole updates reach."""
        command = [*make_step_command(size, precision, UPDATES), "--products", *self.config]
        with open(self.folder / "log", "ab") as log:
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=log).stdout
        found = json.loads(answer)
        store = open_store(self.folder / "store", "train")
        gflop = count_gflop_per_token(size, load_config("multi30k.yaml").vocab.size, store)
        shares = []
        for n, seconds, products in zip(
            found["tgt_tokens"], found["seconds"], found["products"], strict=True
        ):
            shares.append(n / seconds * gflop / find_ceiling(precision, products))
        return median(shares)

    def measure_decoding(self, setting: str) -> dict[str, float]:
        """How many times as fast as CTranslate2 in fp32 base is, by precision."""
        systems = ["ctranslate2 float32", *(f"ours {precision}" for precision in self.precisions)]
        place = self.folder / "decoding"
        if not place.exists():
            place.mkdir()
            decoding.prepare(place, self.folder, None, 250, systems)
        found = decoding.compare_systems(place, systems, [setting], ROUNDS, self.threads)
        theirs = found[systems[0], setting]
        ratios = {}
        for system in systems[1:]:
            rounds = zip(found[system, setting], theirs, strict=True)
            ratios[system.split()[1]] = median(own.speed / other.speed for own, other in rounds)
        return ratios

    def measure_server(self) -> float:
        """The share of the library's speed that nmt-serve reaches with clients of one sentence each."""
        from nmt import api

        checkpoint = self.run / "checkpoints" / "last"
        sentences = (self.folder / "test.en").read_text().splitlines()
        library = api.load(checkpoint, settings=AS_LONG_AS_SOURCE)
        library.translate(sentences[:8])
        port = serving.find_free_port()
        command = [sys.executable, "-m", "nmt.commands.serve", "--port", str(port), "device=cpu"]
        command += [*AS_LONG_AS_SOURCE, str(checkpoint)]
        server = serving.Server("nmt", command, {"source": "en", "target": "de"})
        requests = [server.make_request(sentence) for sentence in sentences]
        ratios = []
        with serving.run_server_process(server, port, self.threads, self.folder / "server.log"):
            for _ in range(ROUNDS):
                began = clock()
                library.translate(sentences)
                own = len(sentences) / (clock() - began)
                load = serving.Load((serving.HOST, port), requests, seconds=2.0, warm_up=0.5)
                asyncio.run(load.run(CLIENTS))
                if fault := load.find_fault():
                    raise UserError(f"nmt-serve: {fault}")
                ratios.append(load.n_done / load.seconds / own)
        return median(ratios)

    def measure_encoding(self) -> float:
        """How many times as fast as SentencePiece a corpus is encoded, on one thread."""
        from nmt.corpus.encoder import CorpusEncoder
        from nmt.data.vocab import Vocab

        if not (self.folder / "store").exists():
            self.start("nmt.commands.prepare")
        vocab = Vocab.load(self.folder / "store" / "vocab.model")
        lines = []
        for side in ("en", "de"):
            lines += (self.folder / f"train.{side}").read_bytes().splitlines()
        texts = [line.decode() for line in lines]
        own_s, their_s = [], []
        for _ in range(2 * ROUNDS):
            began = clock()
            CorpusEncoder(vocab)(lines)
            half = clock()
            vocab._processor.encode(texts, num_threads=1)
            own_s.append(half - began)
            their_s.append(clock() - half)
        return min(their_s) / min(own_s)  # both take so little time that anything disturbs them


def list_groups(bench: Bench) -> dict[str, Callable[[], dict[str, float]]]:
    """What is measured together, by name."""

    def measure_training(size: str, precisions: Sequence[str]) -> dict[str, float]:
        return {p: bench.measure_training(size, p) for p in precisions}

    groups: dict[str, Callable[[], dict[str, float]]] = {
        "encoding": lambda: {"": bench.measure_encoding()},
        "server": lambda: {"": bench.measure_server()},
        "greedy": partial(bench.measure_decoding, "greedy forced"),
        "beam 4": partial(bench.measure_decoding, "beam 4 forced"),
        "one sentence": partial(bench.measure_decoding, "one by one, beam 4 forced"),
        "training small": partial(measure_training, "small", bench.precisions),
        "training multi30k": partial(measure_training, "multi30k", bench.precisions[-1:]),
        # a minute for each precision, so only in the one that `precision: auto` takes
        "training base": partial(measure_training, "base", bench.precisions[-1:]),
    }
    return groups


# ---- the verdict ----------------------------------------------------------------------------------------------------


def name_processor() -> str:
    """The kind of processor, in words: its maker and its fastest instructions for products."""
    from nmt.system.device import INSTRUCTIONS

    text = read_cpu_info()
    maker = "AMD" if "AuthenticAMD" in text else "Intel" if "GenuineIntel" in text else "other"
    flags = text.split()
    return (
        f"{maker} {next((name for flag, name in INSTRUCTIONS.items() if flag in flags), 'plain')}"
    )


def find_lost(
    figures: dict[str, float], recorded: dict[str, float], share: float = SHARE
) -> list[str]:
    """Say which figures are below their floor."""
    lost = []
    for name, value in figures.items():
        floor = share * recorded.get(name, 0.0)
        if value < floor:
            lost.append(f"{name}: {value:.2f}, but its floor is {floor:.2f}")
    return lost


def print_table(figures: dict[str, float], recorded: dict[str, float]) -> None:
    rows = []
    for name, value in figures.items():
        yardstick = next(text for group, text in YARDSTICKS.items() if name.startswith(group))
        known = f"{recorded[name]:.2f}" if name in recorded else "-"
        rows.append((name, f"{value:.2f}", known, yardstick))
    print(Table(("", "ratio", "recorded", "to"), rows).to_markdown())


def work(args: argparse.Namespace) -> int:
    tune_process()  # before torch is imported
    processor = name_processor()
    floors = read_json(FLOORS)
    recorded = floors.get(processor, {})
    figures: dict[str, float] = {}
    began = clock()
    with tempfile.TemporaryDirectory() as name:
        make_text(Path(name))
        groups = list_groups(Bench(Path(name)))
        for group in args.groups or groups:
            for precision, value in groups[group]().items():
                figures[f"{group}, {precision}".rstrip(", ")] = round(value, 3)
            say(f"{group}: done after {clock() - began:.0f} s")
    print(f"{describe_machine('torch', 'ctranslate2')}; {processor}\n")
    print_table(figures, recorded)
    if args.record:
        write_json(FLOORS, floors | {processor: recorded | figures})
        return 0
    if not recorded:
        say(f"{FLOORS.name} has no floors for {processor}; --record writes these figures")
    for line in find_lost(figures, recorded):
        say(line)
    share = LENIENT_SHARE if args.lenient else SHARE
    return 1 if find_lost(figures, recorded, share) else 0


def main(line: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"of {', '.join(YARDSTICKS)} (all)"
    )
    parser.add_argument("--record", action="store_true", help="write the figures as new floors")
    parser.add_argument("--lenient", action="store_true", help="fail only where a ratio has halved")
    args = parser.parse_args(line)
    for group in args.groups:
        if group not in YARDSTICKS:
            parser.error(f"{group}: give some of {', '.join(YARDSTICKS)}")
    return run_command(lambda: work(args), "bench_floors")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
