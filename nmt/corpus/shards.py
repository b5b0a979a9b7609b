"""The work on one shard of a corpus, from file to file: collect, count its words, encode.

A shard is PAIRS_PER_SHARD consecutive pairs of the source, whatever becomes of them. Its report is
written last and says that the rest is there, with its digests: a later run passes over it, and
what has changed since is refused. All of this runs in worker processes and depends on nothing but
its arguments, so that neither the number of workers nor a restart can change a byte.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nmt.config import CleanConfig
from nmt.corpus.cleaning import DropCounts, clean_block, make_held_out_set, take_block
from nmt.corpus.reader import Block, Pair
from nmt.data.vocab import CorpusEncoder, Vocab, tally_words
from nmt.system.errors import UserError
from nmt.system.files import (
    digest_file,
    has_plain_file,
    open_plain_file,
    read_bytes,
    read_json,
    write_bytes,
    write_json,
)
from nmt.system.records import Record, read_record

PAIRS_PER_SHARD = 32_768
WORDS = "words.tsv"  # beside the BPE that was learned from it
SIDES = ("src", "tgt")
DAMAGED = "damaged; remove STORE.work and prepare the store again"


@dataclass(frozen=True)
class CollectReport:
    """What became of the pairs of a shard, or of a whole corpus, when they were read and cleaned."""

    lines: int
    kept: int
    dropped: DropCounts
    held_out: dict[str, list[int]]  # as in `CleanedBlock.shared`
    text: list[str]  # sha256 of the text files, in order
    digests: list[str]  # sha256 of the files of digests, in order

    def check(self) -> str | None:
        if any(len(shared) != 3 for shared in self.held_out.values()):
            return "held_out must have three values for each set"
        return None


@dataclass(frozen=True)
class EncodeReport:
    """What became of the pairs of a shard, or of a whole corpus, when they were encoded."""

    kept: int
    dropped: DropCounts
    tokens: list[int]  # of the source, of the target
    ids: list[str]  # sha256 of the files of ids, in order

    def check(self) -> str | None:
        return None if len(self.tokens) == len(SIDES) else "tokens must have two values"


def add_collect_reports(reports: Sequence[CollectReport]) -> CollectReport:
    """The report of a corpus from those of its shards."""
    dropped = DropCounts()
    held_out: dict[str, list[int]] = {}
    text = []
    digests = []
    for report in reports:
        dropped.extend(report.dropped)
        text += report.text
        digests += report.digests
        for name, counts in report.held_out.items():
            before = held_out.get(name, [0] * len(counts))
            held_out[name] = [a + b for a, b in zip(before, counts, strict=True)]
    lines = sum(report.lines for report in reports)
    kept = sum(report.kept for report in reports)
    return CollectReport(lines, kept, dropped, held_out, text, digests)


def add_encode_reports(reports: Sequence[EncodeReport]) -> EncodeReport:
    """The report of a corpus from those of its shards."""
    dropped = DropCounts()
    for report in reports:
        dropped.extend(report.dropped)
    kept = sum(report.kept for report in reports)
    tokens = [0] * len(SIDES)
    ids = []
    for report in reports:
        tokens = [a + b for a, b in zip(tokens, report.tokens, strict=True)]
        ids += report.ids
    return EncodeReport(kept, dropped, tokens, ids)


@dataclass(frozen=True)
class ShardText:
    """The collected pairs of a shard, in a text file a side: line n of one is the translation of
    line n of the other.
    """

    folder: Path
    number: int
    first: int  # how many pairs of the corpus come before
    n_pairs: int
    sha256: tuple[str, ...]  # of its files
    duplicates: Path | None  # for each pair of the whole corpus one byte: 1 to leave it out

    def read(self) -> tuple[list[bytes], list[bytes]]:
        src, tgt = map(self._read_side, SIDES, self.sha256)
        return src, tgt

    def _read_side(self, side: str, sha256: str) -> list[bytes]:
        content = read_whole(shard_file(self.folder, self.number, f"{side}.txt"), sha256)
        return content.split(b"\n")[:-1]  # every line has an end, so nothing follows the last

    def read_duplicate_mask(self) -> np.ndarray:
        """Read which of the pairs to leave out, (n_pairs,) bool."""
        if self.duplicates is None:
            return np.zeros(self.n_pairs, bool)
        with open_plain_file(self.duplicates) as file:
            file.seek(self.first)
            mask = file.read(self.n_pairs)
        return np.frombuffer(mask, bool)


def read_whole(path: Path, sha256: str) -> bytes:
    """Read a file that an earlier stage, perhaps of an earlier run, wrote into the work folder."""
    content = read_bytes(path) if has_plain_file(path) else b""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path}: {DAMAGED}")
    return content


def check_whole(path: Path, sha256: str) -> None:
    """Check a large file of that kind without holding it in memory."""
    if not has_plain_file(path) or digest_file(path) != sha256:
        raise UserError(f"{path}: {DAMAGED}")


def read_work(path: Path, kind: type[Record]) -> Record:
    """Read the record that an earlier stage wrote there."""
    try:
        return read_record(path, kind, DAMAGED)
    except UserError:
        raise UserError(f"{path}: {DAMAGED}") from None


def shard_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


def find_finished_shards(folder: Path) -> set[int]:
    """The numbers of the shards that an earlier run finished."""
    return {int(path.stem) for path in folder.glob(f"{'[0-9]' * 5}.json")}


class ShardCollector:
    """Cleans blocks and searches them for sentences of held-out sets; without rules it takes them
    as they are.
    """

    def __init__(
        self,
        folder: Path,
        rules: CleanConfig | None,
        held_out: Path | None,
        min_score: float | None = None,
    ) -> None:
        """`held_out`: a file of the dev and test sets by name, lists of pairs."""
        self.folder = folder
        self.rules = rules
        self.min_score = min_score
        self.held_out = {}
        if held_out is not None:
            for name, plain_pairs in read_json(held_out, max_bytes=None).items():
                pairs = [Pair(*pair) for pair in plain_pairs]
                self.held_out[name] = make_held_out_set(pairs)

    def __call__(self, task: tuple[int, Block]) -> CollectReport:
        number, block = task
        digests_sha256 = []
        if self.rules is None:
            cleaned = take_block(block)
        else:
            cleaned = clean_block(block, self.rules, self.held_out, self.min_score)
            digests = cleaned.digests.tobytes()  # by which duplicates are found later
            write_bytes(shard_file(self.folder, number, "digests"), digests)
            digests_sha256.append(hashlib.sha256(digests).hexdigest())
        text = []
        for i, side in enumerate(SIDES):
            lines = "".join(f"{pair[i]}\n" for pair in cleaned.pairs).encode()
            write_bytes(shard_file(self.folder, number, f"{side}.txt"), lines)
            text.append(hashlib.sha256(lines).hexdigest())
        n_lines = len(block.src) + len(block.bad)
        n_kept = len(cleaned.pairs)
        report = CollectReport(
            n_lines, n_kept, cleaned.dropped, cleaned.shared, text, digests_sha256
        )
        write_json(shard_file(self.folder, number, "json"), asdict(report))
        return report


@dataclass(frozen=True)
class WordSample:
    """Lines of a shard that are drawn at random for learning a BPE."""

    text: ShardText
    sides: tuple[int, ...]  # 0: the source, 1: the target
    n_lines: int
    seed: tuple[int, int]


def count_words(sample: WordSample) -> Counter[bytes]:
    """Count how often each word occurs in the lines of the sample."""
    # Of both sides, line 2 i is the source of pair i and line 2 i + 1 its target. Both this
    # numbering and the order in which words occur decide which BPE is learned: a change would
    # change every store.
    n_sides = len(sample.sides)
    usable = np.flatnonzero(np.repeat(~sample.text.read_duplicate_mask(), n_sides))
    if sample.n_lines < len(usable):
        seed = np.random.SeedSequence(sample.seed)
        shuffled = np.random.Generator(np.random.Philox(seed)).permutation(usable)
        usable = np.sort(shuffled[: sample.n_lines])
    text = sample.text.read()
    sides = [text[side] for side in sample.sides]
    lines = [sides[line % n_sides][line // n_sides] for line in usable.tolist()]
    return tally_words(lines)


class ShardEncoder:
    """Turns the text of shards into ids, and drops pairs with more than `max_pieces` on a side. A
    tag comes in front of each source, and counts as one of its pieces.
    """

    def __init__(
        self, folder: Path, vocabs: Sequence[Path], max_pieces: int | None, tag: str | None = None
    ) -> None:
        """`vocabs`: the joint BPE model, or those of the source and of the target."""
        self.folder = folder
        self.max_pieces = max_pieces
        models = [Vocab.load(vocab) for vocab in vocabs]
        encoders = []
        for vocab, model in zip(vocabs, models, strict=True):
            words = vocab.with_name(WORDS)
            # a given model comes without those that it was learned from
            has_words = has_plain_file(words)
            encoders.append(CorpusEncoder(model, words if has_words else None))
        self.encode_src, self.encode_tgt = encoders[0], encoders[-1]
        self.tag_id = None if tag is None else models[0].find_symbol(tag)

    def __call__(self, task: tuple[int, ShardText]) -> EncodeReport:
        number, text = task
        src, tgt = text.read()
        dropped = DropCounts()

        # without duplicates
        is_duplicate = text.read_duplicate_mask()
        for i in np.flatnonzero(is_duplicate).tolist():
            dropped.add("duplicate", src[i].decode(), tgt[i].decode())
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
            dropped.add(f"more than {self.max_pieces} pieces", src[i].decode(), tgt[i].decode())
        src_ids = src_ids[np.repeat(is_kept, src_lengths)]
        tgt_ids = tgt_ids[np.repeat(is_kept, tgt_lengths)]

        # write the ids, then the report
        data = io.BytesIO()
        np.savez(
            data,
            src=src_ids,
            src_lengths=src_lengths[is_kept],
            tgt=tgt_ids,
            tgt_lengths=tgt_lengths[is_kept],
        )
        content = data.getvalue()
        write_bytes(shard_file(self.folder, number, "npz"), content)
        sha256 = hashlib.sha256(content).hexdigest()
        n_tokens = [len(src_ids), len(tgt_ids)]
        report = EncodeReport(int(is_kept.sum()), dropped, n_tokens, [sha256])
        write_json(shard_file(self.folder, number, "json"), asdict(report))
        return report
