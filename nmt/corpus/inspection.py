"""What a store holds, for people: its ledger, what each rule dropped, lengths, pieces per word, a
few pairs.

Everything is counted from the store alone, chunk by chunk, so that 36 million pairs need little
memory and neither corpora nor torch; every figure is exact. A damaged store is refused, not
described. Text of corpora is shown with its control and direction marks written out, so that
nothing in it can act on the terminal.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmt.corpus.cleaning import UNREADABLE
from nmt.corpus.ledger import CorpusAccount, Ledger, format_ledger, read_ledger
from nmt.data.store import Side, TokenStore, open_store
from nmt.data.vocab import SPACE, UNK, Vocab, Vocabulary, load_vocab
from nmt.system.errors import UserError
from nmt.system.files import read_manifest, verify
from nmt.system.run_folder import ids_file
from nmt.system.tables import Table

CHUNK = 1 << 22  # ids or sentences in memory at a time
N_PAIRS = 5  # decoded ones

Lengths = list[tuple[int, int]]  # (length, sentences of that length), ascending


@dataclass(frozen=True)
class SideFigures:
    """One language of one split."""

    sentences: int
    pieces: int
    words: int
    unk: int
    mean: float  # pieces per sentence, as are the next four
    pieces_per_word: float
    unk_share: float
    median: int
    p90: int
    p99: int
    longest: int
    lengths: Lengths


@dataclass(frozen=True)
class PairText:
    text: str
    pieces: list[str]


@dataclass(frozen=True)
class PairSample:
    number: int  # from 1
    src: PairText
    tgt: PairText


@dataclass(frozen=True)
class StoreReport:
    store: str
    ledger: Ledger
    splits: dict[str, dict[str, SideFigures]]  # split, then src or tgt
    pairs: list[PairSample]

    def to_plain(self) -> dict[str, Any]:
        return asdict(self) | {"ledger": self.ledger.to_plain()}


# ---- count ------------------------------------------------------------------------------------------------------


def inspect_store(folder: Path) -> StoreReport:
    train = open_store(folder, "train")
    verify(folder)
    ledger = read_ledger(folder)
    vocab = load_vocab(folder)
    stores = {"train": train}
    if ids_file("valid", "src") in read_manifest(folder):
        stores["valid"] = open_store(folder, "valid")
    src_starts, tgt_starts = _count_word_starts(vocab.src), _count_word_starts(vocab.tgt)
    splits = {
        split: {
            "src": count_side(folder, store.src, src_starts),
            "tgt": count_side(folder, store.tgt, tgt_starts),
        }
        for split, store in stores.items()
    }
    pairs = [_decode_pair(train, i, vocab) for i in spread_evenly(len(train), N_PAIRS)]
    return StoreReport(str(folder), ledger, splits, pairs)


def _count_word_starts(vocab: Vocab) -> np.ndarray:
    """Count the words that begin in each piece."""
    return np.array([piece.count(SPACE) for piece in vocab.list_pieces()])


def count_side(store: Path, side: Side, word_starts: np.ndarray) -> SideFigures:
    """The figures of one side of `store`; `word_starts[i]` is the number of words that begin in
    piece i.
    """
    # lengths, from the offsets: without the mark that ends each sentence
    counts: Counter[int] = Counter()
    for first in range(0, len(side), CHUNK):
        end = min(first + CHUNK, len(side))
        n_by_length = np.bincount(side.count_pieces(first, end))
        for length in np.flatnonzero(n_by_length).tolist():
            counts[length] += int(n_by_length[length])
    lengths = sorted(counts.items())

    # pieces, from the ids
    n_by_piece = np.zeros(len(word_starts), np.int64)
    for first in range(0, len(side.ids), CHUNK):
        n = np.bincount(side.ids[first : first + CHUNK], minlength=len(word_starts))
        if len(n) > len(word_starts):
            raise UserError(
                f"{store}: holds id {len(n) - 1}, but its BPE model has only {len(word_starts)} "
                "pieces; the store is damaged, prepare it again"
            )
        n_by_piece += n

    n_pieces = len(side.ids)
    n_words = int(n_by_piece @ word_starts)
    n_unk = int(n_by_piece[UNK])
    return SideFigures(
        sentences=len(side),
        pieces=n_pieces,
        words=n_words,
        unk=n_unk,
        mean=n_pieces / max(len(side), 1),
        pieces_per_word=n_pieces / max(n_words, 1),
        unk_share=n_unk / max(n_pieces, 1),
        median=percentile(lengths, 50),
        p90=percentile(lengths, 90),
        p99=percentile(lengths, 99),
        longest=max(counts, default=0),
        lengths=lengths,
    )


def percentile(lengths: Lengths, percent: int) -> int:
    """The smallest length that at least `percent` of the sentences do not exceed."""
    total = sum(n for _, n in lengths)
    wanted = -(-percent * total // 100)
    seen = 0
    for length, n in lengths:
        seen += n
        if seen >= wanted:
            return length
    return 0


def spread_evenly(n: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below n, evenly spread."""
    if n == 0:
        return []
    return sorted({(2 * i + 1) * n // (2 * wanted) for i in range(wanted)})


def _decode_pair(store: TokenStore, i: int, vocab: Vocabulary) -> PairSample:
    texts = []
    for side, its_vocab in ((store.src, vocab.src), (store.tgt, vocab.tgt)):
        ids = side.ids[side.offsets[i] : side.offsets[i + 1]].tolist()
        texts.append(PairText(its_vocab.decode([ids])[0], its_vocab.pieces(ids)))
    return PairSample(i + 1, *texts)


# ---- show -------------------------------------------------------------------------------------------------------


def escape_invisible(text: str) -> str:
    """Write control characters, direction marks and everything else invisible as <U+202E>."""
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)


def truncate(text: str, width: int) -> str:
    """`text`, made visible, in at most `width` columns of a terminal, of which a wide character
    takes two.
    """
    visible = escape_invisible(text)
    columns = 0
    end = 0  # where to cut so that the ellipsis fits
    for i, character in enumerate(visible):
        if columns < width:
            end = i
        is_wide = unicodedata.east_asian_width(character) in "WF"
        columns += 2 if is_wide else 1
        if columns > width:
            return visible[:end] + "\u2026"
    return visible


def format_report(report: StoreReport, width: int) -> str:
    """The report as text of at most `width` columns; only the ledger's table may be wider."""
    languages = report.ledger.languages
    blocks = [format_ledger(report.ledger)]
    for corpus in report.ledger.corpora:
        blocks += _format_samples(corpus, languages, width)
    blocks.append(_format_figures(report, languages))
    for pair in report.pairs:
        lines = [f"pair {pair.number:,}"]
        for language, side in zip(languages, (pair.src, pair.tgt), strict=True):
            indent = " " * (len(language) + 4)
            lines.append(truncate(f"  {language}  {side.text}", width))
            lines.append(truncate(indent + " ".join(side.pieces), width))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _format_samples(corpus: CorpusAccount, languages: Sequence[str], width: int) -> list[str]:
    """Format examples of what each rule dropped, in a block for each rule."""
    blocks = []
    for rule, samples in corpus.samples.items():
        lines = [f"{corpus.corpus}: {corpus.dropped[rule]:,} dropped, {rule}; for example"]
        for sample in samples:
            if rule == UNREADABLE:
                lines.append(f"  {sample[0]}")  # the complaint
                continue
            for language, text in zip(languages, sample, strict=True):
                lines.append(f"  {language}  {text}")
        blocks.append("\n".join(truncate(line, width) for line in lines))
    return blocks


def _format_figures(report: StoreReport, languages: Sequence[str]) -> str:
    head = "|sentences|pieces|mean|median|90 %|99 %|longest|pieces/word|<unk>".split("|")
    rows = []
    for split, sides in report.splits.items():
        for language, figures in zip(languages, sides.values(), strict=True):
            rows.append(
                [
                    f"{split} {language}",
                    f"{figures.sentences:,}",
                    f"{figures.pieces:,}",
                    f"{figures.mean:.1f}",
                    f"{figures.median:,}",
                    f"{figures.p90:,}",
                    f"{figures.p99:,}",
                    f"{figures.longest:,}",
                    f"{figures.pieces_per_word:.3f}",
                    f"{figures.unk_share:.4%}",
                ]
            )
    return "\n".join(Table(head, rows).to_lines(numbers=range(1, len(head))))
