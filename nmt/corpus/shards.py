"""The work on one shard of a corpus, from file to file: collect, count its words, encode.

A shard is SHARD consecutive pairs of the source, whatever becomes of them. Its report is written last and says that the
rest is there: a later run passes over it. These functions run in worker processes and depend on nothing but their
arguments, so that neither the number of workers nor a restart can change a byte.
"""

import functools
import hashlib
import io
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmt.config import CleanConfig
from nmt.corpus.cleaning import N_SAMPLES, UNREADABLE, Dropped, HeldOut, clean, held_out
from nmt.corpus.reader import Block, Pair
from nmt.data.vocab import CorpusEncoder, Vocab, word_counts
from nmt.system.files import read_json, write_bytes, write_json

SHARD = 32_768
WORDS = "words.tsv"  # beside the BPE that was learned from it
Json = dict[str, Any]


class Text(NamedTuple):
    """The collected pairs of a shard: a file with source and target lines in turn."""

    file: Path
    first: int  # how many pairs of the corpus come before
    n_pairs: int
    marks: Path | None  # true for the pairs of the corpus that are not to be used

    def lines(self) -> list[bytes]:
        return self.file.read_bytes().split(b"\n")[:-1]

    def is_marked(self) -> np.ndarray:
        if self.marks is None:
            return np.zeros(self.n_pairs, bool)
        return np.array(np.load(self.marks, mmap_mode="r")[self.first : self.first + self.n_pairs])


def shard_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


def collect(
    folder: Path, rules: CleanConfig | None, sets: Path | None, task: tuple[int, Block]
) -> Json:
    """Clean a block and hold it against the dev and test `sets`; without rules it is taken as it is."""
    number, block = task
    if rules is None or sets is None:
        pairs, dropped, shared = list(map(Pair, block.src, block.tgt)), Dropped(), {}
        for complaint in block.bad:
            dropped.add(UNREADABLE, complaint)
    else:
        cleaned = clean(block, rules, _held_out(sets))
        pairs, dropped, shared = cleaned.pairs, cleaned.dropped, cleaned.shared
        write_bytes(shard_file(folder, number, "digests"), cleaned.digests.tobytes())
    text = "".join(f"{src}\n{tgt}\n" for src, tgt in pairs).encode()
    write_bytes(shard_file(folder, number, "txt"), text)
    return _reported(
        folder,
        number,
        {
            "lines": len(block.src) + len(block.bad),
            "kept": len(pairs),
            "dropped": dropped.counts,
            "samples": dropped.samples,
            "held_out": shared,
            "text": hashlib.sha256(text).hexdigest(),
        },
    )


@functools.lru_cache(1)
def _held_out(file: Path) -> dict[str, HeldOut]:
    return {
        name: held_out([Pair(*pair) for pair in pairs]) for name, pairs in read_json(file).items()
    }


def count_words(task: tuple[Text, int, tuple[int, int]]) -> Counter[bytes]:
    """How often each word stands in so many lines of a shard, drawn with a seed."""
    text, wanted, seed = task
    usable = np.flatnonzero(np.repeat(~text.is_marked(), 2))
    if wanted < len(usable):
        usable = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(
            usable
        )[:wanted]
    lines = text.lines()
    lines = [lines[i] for i in np.sort(usable)]
    return word_counts(lines)


def encode(folder: Path, vocab: Path, limit: int | None, task: tuple[int, Text]) -> Json:
    """The ids of a shard, for pairs of at most `limit` pieces a side: `src`, `tgt` and their lengths."""
    number, text = task
    lines, is_repeat = text.lines(), text.is_marked()
    dropped = Dropped()
    for i in np.flatnonzero(is_repeat):
        dropped.add("duplicate", *map(bytes.decode, lines[2 * i : 2 * i + 2]))
    lines = [lines[i] for i in np.flatnonzero(np.repeat(~is_repeat, 2))]
    sides = [_encoder(vocab)(lines[side::2]) for side in (0, 1)]
    longest = np.maximum(*(lengths for _, lengths in sides))
    is_kept = longest <= (longest.max(initial=0) if limit is None else limit)
    for i in np.flatnonzero(~is_kept):
        dropped.add(f"more than {limit} pieces", *map(bytes.decode, lines[2 * i : 2 * i + 2]))
    arrays = {}
    for name, (ids, lengths) in zip(("src", "tgt"), sides, strict=True):
        arrays[name] = ids[np.repeat(is_kept, lengths)]
        arrays[f"{name}_lengths"] = lengths[is_kept]
    data = io.BytesIO()
    np.savez(data, **arrays)
    write_bytes(shard_file(folder, number, "npz"), data.getvalue())
    return _reported(
        folder,
        number,
        {
            "kept": int(is_kept.sum()),
            "dropped": dropped.counts,
            "samples": dropped.samples,
            "tokens": [len(arrays["src"]), len(arrays["tgt"])],
        },
    )


@functools.lru_cache(1)
def _encoder(vocab: Path) -> CorpusEncoder:
    words = vocab.with_name(WORDS)
    return CorpusEncoder(Vocab.load(vocab), words if words.is_file() else None)


def _reported(folder: Path, number: int, report: Json) -> Json:
    write_json(shard_file(folder, number, "json"), report)
    return report


def finished(folder: Path) -> set[int]:
    """The numbers of the shards that an earlier run finished."""
    return {int(path.stem) for path in folder.glob("[0-9]*.json")}


def add_up(reports: list[Json]) -> Json:
    """The report of a corpus from those of its shards: sums, digests end to end, the first samples of each rule."""
    total: Json = functools.reduce(_sum, reports, {})
    total["samples"] = {
        rule: [sample for report in reports for sample in report["samples"].get(rule, ())][
            :N_SAMPLES
        ]
        for rule in total["dropped"]
    }
    return total


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {
            key: _sum(a[key], b[key]) if key in a and key in b else {**a, **b}[key]
            for key in {**a, **b}
            if key != "samples"
        }
    return [_sum(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b
