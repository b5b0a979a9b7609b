"""The work on one shard of a corpus, from file to file: collect, count its words, encode.

A shard is PAIRS_PER_SHARD consecutive pairs of the source, whether or not they are kept. All of this
runs in worker processes and depends on nothing but its arguments, so that neither the number of
workers nor a restart can change a byte. A worker returns a `Report`; the reports of its shards add
up to that of a corpus.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmt.config import CleanConfig
from nmt.corpus.cleaning import (
    HeldOutPairs,
    Report,
    clean_block,
    digest_pairs,
    make_held_out_set,
)
from nmt.corpus.encoder import CorpusEncoder
from nmt.corpus.learn_bpe import tally_words
from nmt.corpus.reader import Block
from nmt.corpus.text_files import LinesOfSides
from nmt.data.mixture import make_random
from nmt.data.vocab import Vocab

PAIRS_PER_SHARD = 32_768
SIDES = ("src", "tgt")


def shard_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


@dataclass(frozen=True)
class Shard:
    """The collected pairs of a shard, in a text file a side: line n of one is the translation of
    line n of the other.
    """

    folder: Path
    number: int
    first: int  # how many pairs of the corpus come before
    n_pairs: int
    duplicates: Path | None  # for each pair of the whole corpus one byte: 1 to leave it out

    def read(self) -> LinesOfSides:
        src, tgt = map(self._read_side, SIDES)
        return src, tgt

    def _read_side(self, side: str) -> list[bytes]:
        content = shard_file(self.folder, self.number, f"{side}.txt").read_bytes()
        return content.split(b"\n")[:-1]  # every line has an end, so nothing follows the last

    def read_duplicate_mask(self) -> np.ndarray:
        """Read which of the pairs to leave out, (n_pairs,) bool."""
        if self.duplicates is None:
            return np.zeros(self.n_pairs, bool)
        return np.fromfile(self.duplicates, bool, self.n_pairs, offset=self.first)


class ShardCollector:
    """Cleans blocks and searches them for sentences of held-out sets; without rules it takes them
    as they are.
    """

    def __init__(self, folder: Path, rules: CleanConfig | None, held_out: HeldOutPairs) -> None:
        self.folder = folder
        self.rules = rules
        self.held_out = {name: make_held_out_set(pairs) for name, pairs in held_out.items()}

    def __call__(self, task: tuple[int, Block]) -> Report:
        number, block = task
        pairs, report = clean_block(block, self.rules, self.held_out)
        sides = [[pair[i].encode() for pair in pairs] for i in range(2)]
        if self.rules is not None:
            # Duplicates are found by these digests once all corpora are collected.
            digest_pairs(*sides).tofile(shard_file(self.folder, number, "digests"))
        for side, lines in zip(SIDES, sides, strict=True):
            text = b"\n".join([*lines, b""])
            shard_file(self.folder, number, f"{side}.txt").write_bytes(text)
        return report


@dataclass(frozen=True)
class WordSample:
    """Lines of a shard that are drawn at random for learning a BPE."""

    shard: Shard
    sides: tuple[int, ...]  # 0: the source, 1: the target
    n_lines: int
    seed: tuple[int, int]


def count_words(sample: WordSample) -> Counter[bytes]:
    """Count how often each word occurs in the lines of the sample."""
    # Of both sides, line 2 i is the source of pair i and line 2 i + 1 its target. Both this
    # numbering and the order in which words occur decide which BPE is learned: a change would
    # change every store.
    n_sides = len(sample.sides)
    usable = np.flatnonzero(np.repeat(~sample.shard.read_duplicate_mask(), n_sides))
    if sample.n_lines < len(usable):
        shuffled = make_random(*sample.seed).permutation(usable)
        usable = np.sort(shuffled[: sample.n_lines])
    text = sample.shard.read()
    sides = [text[side] for side in sample.sides]
    lines = [sides[line % n_sides][line // n_sides] for line in usable.tolist()]
    return tally_words(lines)


class ShardEncoder:
    """Turns the text of shards into ids, and drops pairs with more than `max_pieces` on a side. A
    tag comes in front of each source, and counts as one of its pieces.
    """

    def __init__(
        self, folder: Path, vocabs: Sequence[Path], max_pieces: int | None, tag: str | None
    ) -> None:
        """`vocabs`: the joint BPE model, or those of the source and of the target."""
        self.folder = folder
        self.max_pieces = max_pieces
        models = [Vocab.load(vocab) for vocab in vocabs]
        encoders = [CorpusEncoder(model) for model in models]
        self.encode_src, self.encode_tgt = encoders[0], encoders[-1]
        self.tag_id = None if tag is None else models[0].find_symbol(tag)

    def __call__(self, shard: Shard) -> Report:
        src, tgt = shard.read()
        report = Report(lines=shard.n_pairs)

        # without duplicates
        is_duplicate = shard.read_duplicate_mask()
        for i in np.flatnonzero(is_duplicate).tolist():
            report.drop("duplicate", src[i].decode(), tgt[i].decode())
        usable = np.flatnonzero(~is_duplicate).tolist()
        src = [src[i] for i in usable]
        tgt = [tgt[i] for i in usable]

        # without pairs that are too long
        src_ids, src_lengths = self.encode_src(src)
        if self.tag_id is not None:
            starts = np.cumsum(src_lengths) - src_lengths
            src_ids = np.insert(src_ids, starts, self.tag_id)
            src_lengths = src_lengths + 1
        tgt_ids, tgt_lengths = self.encode_tgt(tgt)
        is_kept = np.ones(len(usable), bool)
        if self.max_pieces is not None:
            is_kept = np.maximum(src_lengths, tgt_lengths) <= self.max_pieces
        for i in np.flatnonzero(~is_kept).tolist():
            report.drop(f"more than {self.max_pieces} pieces", src[i].decode(), tgt[i].decode())
        src_ids = src_ids[np.repeat(is_kept, src_lengths)]
        tgt_ids = tgt_ids[np.repeat(is_kept, tgt_lengths)]

        np.savez(
            shard_file(self.folder, shard.number, "npz"),
            src=src_ids,
            src_lengths=src_lengths[is_kept],
            tgt=tgt_ids,
            tgt_lengths=tgt_lengths[is_kept],
        )
        report.kept = [int(is_kept.sum())]
        report.tokens = [len(src_ids), len(tgt_ids)]
        return report
