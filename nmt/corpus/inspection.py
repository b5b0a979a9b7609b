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
from nmt.system.errors import UserError
from nmt.system.escapes import escape_line
from nmt.system.files import read_manifest, verify
from nmt.system.run_folder import ids_file

CHUNK = 1 << 22  # ids or sentences in memory at a time


def describe_store(folder: Path) -> str:
    splits = {"train": open_store(folder, "train")}
    verify(folder)
    ledger = read_ledger(folder)
    vocab = load_vocab(folder)
    if ids_file("valid", "src") in read_manifest(folder):
        splits["valid"] = open_store(folder, "valid")
    figures = []
    for split, store in splits.items():
        sides = ((store.src, vocab.src), (store.tgt, vocab.tgt))
        for language, (side, its_vocab) in zip(ledger.languages, sides, strict=True):
            counted = count_pieces(folder, side, its_vocab)
            figures.append(escape_line(f"{split} {language}: {counted}"))
    return "\n\n".join([format_ledger(ledger), *format_samples(ledger), "\n".join(figures)])


def count_pieces(store: Path, side: Side, vocab: Vocab) -> str:
    """Count the pieces of one side of `store`, and how many there are for each word."""
    word_starts = np.array([piece.count(SPACE) for piece in vocab.list_pieces()])
    n_by_piece = np.zeros(len(word_starts), np.int64)
    for first in range(0, len(side.ids), CHUNK):
        n = np.bincount(side.ids[first : first + CHUNK], minlength=len(word_starts))
        if len(n) > len(word_starts):
            raise UserError(
                f"{store}: holds id {len(n) - 1}, but its BPE model has only {len(word_starts)} "
                "pieces; the store is damaged, prepare it again"
            )
        n_by_piece += n
    per_word = len(side.ids) / max(n_by_piece @ word_starts, 1)
    return (
        f"{len(side.ids):,} pieces, {per_word:.3f} for each word, {n_by_piece[UNK]:,} of them <unk>"
    )


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
