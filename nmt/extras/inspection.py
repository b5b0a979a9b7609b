"""What a store holds, for people: its ledger, samples of what each rule dropped, pieces per word.

Everything is counted from the store alone, chunk by chunk, so that 36 million pairs need little
memory and neither corpora nor torch. A damaged store is refused, not described.
"""

from pathlib import Path

import numpy as np

from nmt.corpus.cleaning import UNREADABLE
from nmt.corpus.ledger import Ledger, format_ledger, read_ledger
from nmt.data.store import Side, open_store
from nmt.data.vocab import SPACE, UNK, Vocab, load_vocab
from nmt.system.escapes import escape_line
from nmt.system.files import read_manifest, verify
from nmt.system.run_folder import ids_file

CHUNK = 1 << 22  # ids or sentences in memory at a time


def describe_store(folder: Path) -> str:
    open_store(folder, "train")  # quick, and refuses what is no store
    verify(folder)
    ledger = read_ledger(folder)
    vocab = load_vocab(folder)
    splits = ["train"]
    if ids_file("valid", "src") in read_manifest(folder):
        splits.append("valid")
    figures = [escape_line(f"digest: {ledger.store}")]
    for split in splits:
        store = open_store(folder, split, vocab)
        sides = ((store.src, vocab.src), (store.tgt, vocab.tgt))
        for language, (side, its_vocab) in zip(ledger.languages, sides, strict=True):
            counted = count_pieces(side, its_vocab)
            figures.append(escape_line(f"{split} {language}: {counted}"))
    return "\n\n".join([format_ledger(ledger), *format_samples(ledger), "\n".join(figures)])


def count_pieces(side: Side, vocab: Vocab, chunk: int = CHUNK) -> str:
    """Count the pieces of one side of a store, and how many there are for each word."""
    word_starts = np.array([piece.count(SPACE) for piece in vocab.list_pieces()])
    n_by_piece = np.zeros(len(word_starts), np.int64)
    n_pieces = len(side.ids)
    for first in range(0, n_pieces, chunk):
        ids = side.read_ids(first, min(first + chunk, n_pieces))
        n_by_piece += np.bincount(ids, minlength=len(word_starts))
    per_word = n_pieces / max(n_by_piece @ word_starts, 1)
    return f"{n_pieces:,} pieces, {per_word:.3f} for each word, {n_by_piece[UNK]:,} of them <unk>"


def format_samples(ledger: Ledger) -> list[str]:
    """Format examples of what each rule dropped of each corpus, a block for each rule."""
    src, tgt = ledger.languages
    blocks = []
    for corpus in ledger.corpora:
        for rule, samples in corpus.samples.items():
            lines = [f"{corpus.corpus}: {corpus.dropped[rule]:,} dropped, {rule}; for example"]
            for src_text, tgt_text in samples:
                if rule == UNREADABLE:  # a complaint, and nothing
                    lines.append(f"  {src_text}")
                else:
                    lines += [f"  {src}  {src_text}", f"  {tgt}  {tgt_text}"]
            blocks.append("\n".join(map(escape_line, lines)))
    return blocks
