"""How fast, and in how much memory, does a corpus of WMT14's size become a store? Measured from outside.

    python scripts/bench/data.py                                    4,500,000 pairs through nmt-prepare, as a table
    python scripts/bench/data.py --pairs 500000

WMT14 itself is not needed: real sentences of other corpora are joined to its lengths, and some words are replaced by
rare ones, so that lines, words and distinct words are about as many as there. The text is synthetic in size and means
nothing: the figures are about speed and memory. Tables go to standard output, the rest to standard error.
"""

import argparse
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from machine import describe_machine

from nmt.commands.cli import run_command
from nmt.corpus.ledger import digest_store
from nmt.system.errors import UserError
from nmt.system.files import read_json, verify, write_json
from nmt.system.progress import Progress, clock, say
from nmt.system.run_folder import LEDGER_FILE, MANIFEST_FILE
from nmt.system.tables import Table

SEED = 14
BATCH = 50_000  # pairs made at a time
RARE_WORDS = (0.47, 0.87)  # in a pair, on average, English and German
RARE_TYPES = (4_000_000, 9_000_000)  # of which they are drawn: most occur once, some a few times
SAMPLE_S = 0.5  # between two looks at the memory
STAGE = re.compile(r"^stage (.+): ([\d.]+) s$", re.MULTILINE)
PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


# ---- the corpus -------------------------------------------------------------------------------------------------


def make_corpus(folder: Path, data: Path, n_pairs: int) -> str:
    """Write folder/train.{en,de} and the dev set beside them unless they are there; what they are, in words."""
    made_with = {"pairs": n_pairs, "seed": SEED, "rare": [RARE_WORDS, RARE_TYPES], "version": 1}
    marker = folder / "made.json"
    if marker.is_file() and read_json(marker)["made_with"] == json.loads(json.dumps(made_with)):
        return str(read_json(marker)["summary"])
    folder.mkdir(parents=True, exist_ok=True)
    began = clock()
    en, de = read_sentences(data)
    words, marks = np.zeros(2, np.int64), []
    with (
        Progress("making pairs", n_pairs, "pairs") as progress,
        open(folder / "train.en", "wb") as src,
        open(folder / "train.de", "wb") as tgt,
    ):
        for batch in generate_batches(en, de, n_pairs):
            for file, lines in zip((src, tgt), batch, strict=True):
                file.write(b"\n".join(lines) + b"\n")
            words += [sum(line.count(b" ") + 1 for line in lines) for lines in batch]
            marks.append(np.fromiter(map(hash, zip(*batch, strict=True)), np.int64, len(batch[0])))
            progress.advance(len(batch[0]))
    n_distinct = len(np.unique(np.concatenate(marks)))
    for language in ("en", "de"):
        shutil.copyfile(
            data / "news-en-de" / f"newstest2013.{language}", folder / f"valid.{language}"
        )
    seconds = clock() - began
    summary = (
        f"{n_pairs:,} pairs, {n_distinct:,} of them distinct, of {words[0] / n_pairs:.1f} English and "
        f"{words[1] / n_pairs:.1f} German words on average"
    )
    say(f"made {summary} in {seconds:.0f} s, {n_pairs / seconds:,.0f} pairs/s")
    write_json(marker, {"made_with": made_with, "summary": summary})
    return summary


def read_sentences(data: Path) -> tuple[list[bytes], list[bytes]]:
    """All training sentences below `data` that have at most 60 words."""
    folders = [folder for folder in sorted(data.glob("*")) if any(folder.glob("train.de*"))]
    if not folders or not (data / "news-en-de" / "newstest2013.en").is_file():
        raise UserError(
            f"--data {data}: needs folders with train.en and train.de (or .xz) and news-en-de/newstest2013"
        )
    sides: tuple[list[bytes], list[bytes]] = [], []
    for folder in folders:
        texts = [read_lines(folder / f"train.{language}") for language in ("en", "de")]
        for en, de in zip(*texts, strict=True):
            if 0 < en.count(b" ") < 60 and 0 < de.count(b" ") < 60:
                sides[0].append(en)
                sides[1].append(de)
    return sides


def read_lines(path: Path) -> list[bytes]:
    packed = path.with_name(path.name + ".xz")
    text = lzma.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    return text.split(b"\n")[:-1]


def generate_batches(
    en: list[bytes], de: list[bytes], n_pairs: int
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Sentences are drawn in one long row, which is cut where the wanted lengths (log-normal, up to 100) end."""
    draw = np.random.default_rng(SEED)
    n_words = np.array([line.count(b" ") + 1 for line in en])
    parts = tuple(list_parts_of_words(side) for side in (en, de))
    while n_pairs:
        lengths = np.clip(draw.lognormal(2.68, 0.75, BATCH), 1, 100)
        row = draw.integers(len(en), size=int(lengths.sum() / n_words.mean() * 1.1))
        cuts = np.searchsorted(np.cumsum(n_words[row]), np.cumsum(lengths))
        bounds = [0, *np.unique(cuts[(cuts > 0) & (cuts < len(row))]).tolist()][: n_pairs + 1]
        rare = [draw.poisson(rate, len(bounds) - 1) for rate in RARE_WORDS]
        # A line of one sentence must differ from others of the same sentence
        rare[1] = np.maximum(rare[1], np.diff(bounds) == 1)
        ranks = row.tolist()
        batch = [
            [b" ".join([side[i] for i in ranks[a:b]]) for a, b in pairwise(bounds)]
            for side in (en, de)
        ]
        for lines, counts, n_types, (heads, tails) in zip(
            batch, rare, RARE_TYPES, parts, strict=True
        ):
            where = np.repeat(np.arange(len(counts)), counts).tolist()
            words = draw.integers(n_types, size=len(where)).tolist()
            places = draw.integers(1 << 30, size=len(where)).tolist()
            for i, word, place in zip(where, words, places, strict=True):
                line = lines[i].split(b" ")
                head, tail = divmod(word, len(tails))
                rare_word = (
                    heads[head % len(heads)] + tails[tail]
                    if word % 8
                    else b"%d,%03d" % divmod(word, 1000)
                )
                line[place % len(line)] = rare_word
                lines[i] = b" ".join(line)
        n_pairs -= len(bounds) - 1
        yield batch[0], batch[1]


def list_parts_of_words(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """3,000 beginnings and 3,000 endings of frequent words: together they are the rare ones."""
    words = sorted(
        {
            word
            for line in lines[::7]
            for word in line.split(b" ")
            if 6 < len(word) < 16 and word.isalpha()
        }
    )
    chosen = np.random.default_rng(SEED).permutation(len(words))[:20_000].tolist()
    heads = sorted({words[i][: len(words[i]) // 2 + 1] for i in chosen})
    tails = sorted({words[i][len(words[i]) // 2 :] for i in chosen})
    return heads[:: len(heads) // 3000 or 1][:3000], tails[:: len(tails) // 3000 or 1][:3000]


# ---- nmt-prepare, from outside ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What was seen of one nmt-prepare."""

    output: str
    seconds: float
    peak_bytes: int


def run_prepare(work: Path, corpus: Path, store: Path) -> Run:
    """Run nmt-prepare in a session of its own, and watch its memory until it ends."""
    settings = {
        "data": {
            "root": str(corpus),
            "store": str(store),
            "workers": 2,
            "train": [{"src": "train.en", "tgt": "train.de"}],
            "valid": {"src": "valid.en", "tgt": "valid.de"},
        },
        "vocab": {"size": 37_000},
    }
    config = work / "bench.yaml"
    write_json(config, settings)  # JSON is YAML
    command = [sys.executable, "-m", "nmt.commands.prepare", "--config", str(config), "--offline"]
    log = work / "prepare.log"
    say(f"nmt-prepare runs; {log} has what it prints")
    peak_bytes = 0
    began = clock()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, read_session_memory(process.pid))
            time.sleep(SAMPLE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise UserError(f"nmt-prepare left with exit code {process.returncode}; see {log}")
    return Run(log.read_text(), clock() - began, peak_bytes)


def read_session_memory(session: int) -> int:
    """Bytes in use by all processes of a session; what they share is counted once (PSS)."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2]
            if int(stat.split()[3]) != session:
                continue
            found = PSS.search((folder / "smaps_rollup").read_text())
        except OSError:  # it has just ended
            continue
        if found:
            total += int(found[1]) * 1024
    return total


def compute_store_digest(store: Path) -> str:
    """The one digest of all its data files, after each of them has been read and found right."""
    verify(store)
    files = read_json(store / MANIFEST_FILE)
    return digest_store({name: files[name]["sha256"] for name in files if name != LEDGER_FILE})


def measure(work: Path, corpus: Path, n_pairs: int) -> list[tuple[str, ...]]:
    """Run nmt-prepare; return the rows of the table."""
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    run = run_prepare(work, corpus, store)
    size = sum(file.stat().st_size for file in store.iterdir())
    rows: list[tuple[str, ...]] = []
    stages = [(name, float(seconds)) for name, seconds in STAGE.findall(run.output)]
    for name, seconds in [*stages, ("all", run.seconds)]:
        if seconds >= 1:
            rows.append((name, f"{seconds:.1f} s", f"{n_pairs / seconds:,.0f} pairs/s"))
    peak = f"{run.peak_bytes / 2**20:,.0f} MiB"
    rows.append(("peak memory, all processes", peak, f"every {SAMPLE_S} s"))
    digest = compute_store_digest(store)
    rows.append(("store", f"{size / 2**20:,.0f} MiB", f"sha256 {digest[:16]}"))
    return rows


# ---- the report -------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> int:
    if args.pairs < 1:
        raise UserError(f"--pairs {args.pairs}: give at least 1")
    folder = Path("build/bench-data").resolve()  # the corpus is kept and used again
    corpus = folder / f"corpus-{args.pairs}"
    made = make_corpus(corpus, Path(args.data), args.pairs)
    print(
        f"{made}.\nSynthetic in size: sentences of other corpora, joined, with rare words put in.\n\n"
        f"{describe_machine('nmtkit', 'numpy', 'sentencepiece')}\n\n"
        f"    python {' '.join(sys.argv)}\n"
    )
    rows = measure(folder, corpus, args.pairs)
    print(Table(("nmt-prepare, 2 workers, 37,000 pieces", "", ""), rows).to_markdown())
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__.replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=4_500_000, metavar="N", help="size of the corpus (4,500,000)"
    )
    parser.add_argument(
        "--data",
        default="corpora",
        metavar="DIR",
        help="real text (corpora): folders "
        "with train.en and train.de, plain or .xz, and news-en-de/newstest2013.{en,de}",
    )
    arguments = parser.parse_args()
    sys.exit(run_command(lambda: work(arguments), "bench_data"))
