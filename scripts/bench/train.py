"""How fast is training beside others? One sitting, one process at a time, in turn: A B C A B C; prints Markdown.

    python scripts/bench/train.py --data-root corpora/multi30k                beside loops over torch.nn.Transformer
    python scripts/bench/train.py --make-peers build/peers                    install eole, OpenNMT-py, JoeyNMT, Marian
    python scripts/bench/train.py --data-root corpora/multi30k --peer-python build/peers/bin/python

The same pieces, sizes, dropout, label smoothing, Adam and threads for all; target tokens without padding over whole
updates, the first ones left out. Machines drift more than code does: ratios are taken within a round, and what the
machine can do is measured before and after each process.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from nmt.commands.cli import add_overrides, run_command
from nmt.config import load_config
from nmt.corpus.prepare import prepare
from nmt.data.store import TokenStore, open_store
from nmt.data.vocab import BOS, EOS, PAD, Vocab
from nmt.system.errors import UserError
from nmt.system.progress import clock, say
from nmt.system.runtime import tune_process

SCRIPTS = Path(__file__).resolve().parent
SKIP = 7  # first updates, which ask for memory; as many as bench_step.py leaves out
TIMEOUT_S = 1800  # of a process
# D_model, d_ff, heads, layers
SIZES = {"base": (512, 2048, 8, 6), "small": (256, 1024, 4, 3), "tiny": (32, 64, 2, 1)}
SYSTEMS = {
    "ours": "nmt, this checkout: labels of the update",
    "plain": "a loop over torch.nn.Transformer: labels that are not padding",
    "lean": "the same, dropout only where the paper has it, attention by plain products on CPU",
    "marian": "a loop over Hugging Face's MarianMTModel, eager attention on CPU: labels that are not padding",
    "eole": "`eole train`: labels that its nn.CrossEntropyLoss counts",
    "opennmt": "`onmt_train`: labels that its nn.CrossEntropyLoss counts",
    "joeynmt": "`joeynmt train`: ntokens of its batches",
}
OWN = ("ours", "plain", "lean")  # need nothing that is not installed
NAMES = [
    f"{system}-{precision}"
    for precision in ("bf16", "fp32")
    for system in SYSTEMS
    if (system, precision) not in (("opennmt", "bf16"), ("joeynmt", "bf16"))
]  # which they lack on CPU
QUICK = {
    "sizes": ["tiny"],
    "systems": ["ours-bf16", "plain-bf16", "ours-fp32", "lean-fp32"],
    "config": "demo.yaml",
    "tokens": 300,
    "updates": 3,
    "rounds": 1,
}
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
INSTALL = (  # what the last three require includes an older torch, and much that training does not need
    "torch numpy transformers==5.23.0 sentencepiece sacrebleu pyyaml configargparse safetensors rich six pyonmttok "
    "pandas rapidfuzz pyahocorasick subword-nmt tensorboard pydantic ctranslate2 aiohttp importlib_metadata matplotlib "
    "spacy fasttext-wheel datasets fastapi uvicorn",
    "--no-deps eole==0.6.4 OpenNMT-py==3.5.1 joeynmt==2.3.0",
)


@dataclass(frozen=True)
class Result:
    rates: list[float]  # target tokens a second, of each update
    n_tokens: float  # in an update, on average
    peak_rss_mb: float
    versions: dict[str, str]
    ceiling: float  # GFLOP/s of the machine in its precision


def parse(answer: str, precision: str, ceiling: float) -> Result:
    """The last line of what a process prints."""
    try:
        told = json.loads(answer.strip().splitlines()[-1])
        rates = [n / s for n, s in zip(told["tgt_tokens"], told["seconds"], strict=True)]
        if told["precision"] != precision:
            raise ValueError(f"it ran in {told['precision']}")
        return Result(
            rates, fmean(told["tgt_tokens"]), told["peak_rss_mb"], told["versions"], ceiling
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"not the answer of a {precision} process: {answer.strip()[-200:]!r}; {error!r}"
        ) from None


# ---- the work, the machine, the processes -----------------------------------------------------------------------


def write_text(store: Path, folder: Path) -> int:
    """{train,valid}.{src,tgt} and vocab.txt, for who reads text; the size of the vocabulary. Its words are numbers,
    t17 t4 ...: no tool can split, strip or normalise these differently from another."""
    n_vocab = Vocab.load(store / "vocab.model").size
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        pairs = open_store(store, split)
        for name, side in (("src", pairs.src), ("tgt", pairs.tgt)):
            words = [f"t{i}" for i in np.asarray(side.ids).tolist()]
            lines = (
                " ".join(words[a:b]) + "\n" for a, b in pairwise(np.asarray(side.offsets).tolist())
            )
            (folder / f"{split}.{name}").write_text("".join(lines), encoding="ascii")
    (folder / "vocab.txt").write_text(
        "".join(f"t{i}\n" for i in range(n_vocab) if i not in (PAD, BOS, EOS))
    )
    return n_vocab


def gflop_per_token(
    d_model: int, d_ff: int, n_layers: int, n_vocab: int, pairs: TokenStore
) -> float:
    """Training costs six operations for each weight that a token passes, and for each product of attention: source
    tokens pass the encoder and cross-attention's keys and values, target tokens the rest of the decoder and the
    softmax; a query has two products with each key, and causal attention sees half of them."""
    src, tgt = (side.lengths.astype(float) for side in (pairs.src, pairs.tgt))  # with end marks
    weights = (
        n_layers * (6 * d_model + 2 * d_ff) * d_model * (src.sum() + tgt.sum())
        + d_model * n_vocab * tgt.sum()
    )
    attention = n_layers * d_model * (2 * src @ src + tgt @ tgt + 2 * src @ tgt)
    return float(6 * (weights + attention) / tgt.sum() / 1e9)


def ceilings(threads: int, n: int = 2048) -> dict[str, float]:
    """GFLOP/s of one large product, the best of some, by precision and path."""
    import torch  # first here, after settle()
    from torch.nn.functional import linear

    torch.set_num_threads(threads)
    is_cuda = torch.cuda.is_available()
    inner = 4 * n if is_cuda else n
    a, b = (
        torch.randn(rows, inner, device="cuda" if is_cuda else "cpu") for rows in (2 * inner, inner)
    )
    low = a.bfloat16(), b.bfloat16()
    paths = {"bf16": lambda: linear(*low), "fp32": lambda: linear(a, b)}
    if not is_cuda and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        paths["fp32 oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(
            a, b, None, "none", [], ""
        )
    best = {}
    for name, product in paths.items():
        times = []
        for _ in range(6):
            began = clock()
            product()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(clock() - began)
        best[name] = 4 * inner**3 / min(times) / 1e9
    return best


def ceiling_of(precision: str, *measured: dict[str, float]) -> float:
    """By the fastest path there is, the mean of the measurements."""
    return fmean(
        max(rate for path, rate in each.items() if path.startswith(precision)) for each in measured
    )


class Bench:
    """What all processes share: the store, the text made of it, the environment they start in."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, Path(args.work).resolve()
        # Before settle() adds to it
        self.env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        tune_process()
        folders = {
            "root": args.data_root,
            "store": args.store or str(self.work / f"store-{Path(args.config).stem}"),
        }
        self.overrides = [
            *(f"data.{k}={json.dumps(v)}" for k, v in folders.items() if v),
            *args.overrides,
        ]
        config = load_config(args.config, self.overrides)
        prepare(config.data, config.vocab, config.seed)
        self.pairs = open_store(Path(config.data.store), "train")
        self.n_vocab = write_text(Path(config.data.store), self.work / "text")

    def command(self, system: str, precision: str, size: str) -> list[str]:
        args, sizes = (
            self.args,
            dict(zip(("d_model", "d_ff", "n_heads", "n_layers"), SIZES[size], strict=True)),
        )
        if system == "ours":
            return [
                sys.executable,
                str(SCRIPTS / "bench_step.py"),
                "--json",
                "--updates",
                str(args.updates),
                "--config",
                args.config,
                *(f"model.{key}={n}" for key, n in sizes.items()),
                "model.dropout=0.1",
                "training.label_smoothing=0.1",
                f"training.precision={precision}",
                f"training.src_tokens={args.tokens}",
                f"training.tgt_tokens={args.tokens}",
                *self.overrides,
            ]
        job = self.work / f"{system}-{precision}-{size}.json"
        job.write_text(
            json.dumps(
                {
                    "system": system,
                    "precision": precision,
                    "text": str(self.work / "text"),
                    "scratch": str(self.work),
                    "n_vocab": self.n_vocab,
                    "tokens": args.tokens,
                    "updates": args.updates,
                    "seconds": args.seconds,
                    "threads": args.threads,
                    "skip": SKIP,
                    **sizes,
                }
            ),
            encoding="utf-8",
        )
        return [
            sys.executable if system in OWN else args.peer_python,
            str(SCRIPTS / "bench_peers.py"),
            str(job),
        ]

    def run(self, size: str, name: str) -> str:
        """One process from start to end: what it printed. What it said on the way lies in a log."""
        system, precision = name.split("-")
        log, env = (
            self.work / f"{name}-{size}.log",
            self.env if system == "ours" else self.env | MALLOC,
        )
        try:
            with open(log, "wb") as file:
                done = subprocess.run(
                    self.command(system, precision, size),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    check=True,
                    timeout=TIMEOUT_S,
                )
        except subprocess.SubprocessError as error:  # tells what ran; the log tells why it failed
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
            raise UserError(f"{name}, {size}: {error}; {said[-1][:200]!r}, see {log}") from None
        return done.stdout

    def measure(
        self,
    ) -> tuple[dict[tuple[str, str], list[Result]], list[dict[str, float]], list[str]]:
        """Results of (size, system), one for each round; the machine's ceilings, in order; what failed."""
        results: dict[tuple[str, str], list[Result]] = {
            (size, name): [] for size in self.args.sizes for name in self.args.systems
        }
        seen, failed = [ceilings(self.args.threads)], []
        for size, name in list(results) * self.args.rounds:
            if (size, name) not in results:
                continue
            precision = name.split("-")[1]
            try:
                answer = self.run(size, name)
                seen.append(ceilings(self.args.threads))
                results[size, name].append(
                    parse(answer, precision, ceiling_of(precision, *seen[-2:]))
                )
                say(f"{name}, {size}: {median(results[size, name][-1].rates):,.0f} target tokens/s")
            except UserError as error:  # the others go on
                failed.append(str(error))
                say(f"failed: {error}")
                del results[size, name]
        return results, seen, failed


# ---- the report -------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def row(name: str, mine: list[Result], ours: list[Result], gflop: float) -> tuple[str, ...]:
    """Over rounds; the ratio to ours is taken within each."""
    rates = [median(each.rates) for each in mine]
    ratios = [median(other.rates) / rate for other, rate in zip(ours, rates, strict=False)]
    shares = [rate * gflop / each.ceiling for rate, each in zip(rates, mine, strict=True)]
    return (
        name,
        spread(rates, ",.0f"),
        spread(ratios, ".2f") if ratios else "-",
        spread(shares, ".0%"),
        f"{fmean(each.n_tokens for each in mine):,.0f}",
        str(sum(len(each.rates) for each in mine)),
        f"{max(each.peak_rss_mb for each in mine) / 1024:.1f} GiB",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


def work(args: argparse.Namespace) -> int:
    if args.make_peers:
        return make_peers(Path(args.make_peers))
    check(args)
    bench = Bench(args)
    results, seen, failed = bench.measure()
    import torch

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    print(
        f"{gpu}{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores\n\n    python {args.line}\n\n"
        f"{args.threads} threads, {args.rounds} rounds in turn: the median (range) of their medians over updates.\n"
    )
    for size in args.sizes:
        d_model, d_ff, n_heads, n_layers = SIZES[size]
        gflop = gflop_per_token(d_model, d_ff, n_layers, bench.n_vocab, bench.pairs)
        print(
            f"{size}: d_model {d_model}, d_ff {d_ff}, {n_heads} heads, {n_layers} + {n_layers} layers, "
            f"{bench.n_vocab:,} pieces; {gflop:.4g} GFLOP for a target token\n"
        )
        rows = [
            row(name, mine, results.get((size, f"ours-{name.split('-')[1]}"), []), gflop)
            for (its_size, name), mine in results.items()
            if its_size == size
        ]
        print(
            table(
                (
                    size,
                    "target tokens/s",
                    "ours / it",
                    "of ceiling",
                    "tokens/update",
                    "updates",
                    "memory",
                ),
                rows,
            )
        )
    print(
        table(
            ("ceiling: one large product", "GFLOP/s, between all processes"),
            [(path, spread([each[path] for each in seen], ",.0f")) for path in seen[0]],
        )
    )
    versions = {name.split("-")[0]: mine[0].versions for (_, name), mine in results.items()}
    print(
        table(
            ("system", "what runs: what counts its target tokens", "versions"),
            [
                (system, SYSTEMS[system], ", ".join(map(" ".join, its.items())))
                for system, its in versions.items()
            ],
        )
    )
    wait = bench.env.get("OMP_WAIT_POLICY", "unset (ours spins but shortly)")
    print(
        f"All have OMP_NUM_THREADS={args.threads}, OMP_WAIT_POLICY {wait}. Ours keeps freed memory by itself "
        f"(nmt/system/runtime.py); the others have {' '.join(map('='.join, MALLOC.items()))}"
    )
    for line in failed:
        print(f"\nFailed: {line}")
    return 1 if failed else 0


def check(args: argparse.Namespace) -> None:
    args.systems = args.systems or [
        name for name in NAMES if args.peer_python or name.startswith(OWN)
    ]
    for name in args.systems:
        if name not in NAMES:
            raise UserError(f"--systems {name}: give some of {', '.join(NAMES)}")
        if not name.startswith(OWN) and not os.access(args.peer_python or "", os.X_OK):
            raise UserError(
                f"--systems {name}: --peer-python {args.peer_python} is no program; --make-peers makes one"
            )
    for key in ("tokens", "updates", "rounds", "threads", "seconds"):
        if not vars(args)[key] > 0:
            raise UserError(f"--{key} {vars(args)[key]}: give more than 0")


def make_peers(folder: Path) -> int:
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-c", str(SCRIPTS.parent / "constraints.txt")]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        *([*install, *some.split()] for some in INSTALL),
    ):
        say(" ".join(command))
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise UserError(
                f"--make-peers {folder}: the command above failed; what it said tells why"
            )
    say(f"now give --peer-python {python}")
    return 0


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
    for key, default, what in (
        ("rounds", 3, ""),
        ("updates", 15, "to time in each process "),
        ("threads", 2, ""),
        ("seconds", 30, "after which all but ours stop "),
        ("tokens", 4096, "in an update "),
    ):
        parser.add_argument(
            f"--{key}", type=int, default=default, metavar="N", help=f"{what}({default})"
        )
    parser.add_argument(
        "--config", default="multi30k.yaml", metavar="FILE", help="of the data (multi30k.yaml)"
    )
    parser.add_argument("--data-root", metavar="DIR", help="the config's data.root")
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="prepared with that config, or made there (WORK/store-CONFIG)",
    )
    parser.add_argument(
        "--work", default="build/bench-train", metavar="DIR", help="(build/bench-train)"
    )
    parser.add_argument("--peer-python", metavar="PATH", help="the Python that has the peers")
    parser.add_argument(
        "--make-peers", metavar="DIR", help="only make a virtual environment with the peers"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny, on the embedded corpus: does it all run?"
    )
    parser.set_defaults(
        line=f"scripts/bench/train.py {' '.join(line)}", **(QUICK if "--quick" in line else {})
    )
    args = parser.parse_intermixed_args(line)
    return run_command(lambda: work(args), "bench_train")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
