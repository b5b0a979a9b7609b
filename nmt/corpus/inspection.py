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
from nmt.system.tables import Table

CHUNK = 1 << 22  # ids or sentences in memory at a time


def describe_store(folder: Path) -> str:
    train = open_store(folder, "train")
    verify(folder)
    ledger = read_ledger(folder)
    vocab = load_vocab(folder)
    stores = {"train": train}
    if ids_file("valid", "src") in read_manifest(folder):
        stores["valid"] = open_store(folder, "valid")
    src, tgt = ledger.languages
    rows = []
    for split, store in stores.items():
        rows.append([escape_line(f"{split} {src}"), *count_side(folder, store.src, vocab.src)])
        rows.append([escape_line(f"{split} {tgt}"), *count_side(folder, store.tgt, vocab.tgt)])
    head = ["", "sentences", "pieces", "pieces/word", "<unk>"]
    figures = "\n".join(Table(head, rows).to_lines(numbers=range(1, len(head))))
    return "\n\n".join([format_ledger(ledger), *format_samples(ledger), figures])


def count_side(store: Path, side: Side, vocab: Vocab) -> list[str]:
    """Count the sentences and pieces of one side of `store`, its pieces per word, and its share of <unk>."""
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
    n_pieces = len(side.ids)
    pieces_per_word = n_pieces / max(int(n_by_piece @ word_starts), 1)
    unk_share = int(n_by_piece[UNK]) / max(n_pieces, 1)
    return [f"{len(side):,}", f"{n_pieces:,}", f"{pieces_per_word:.3f}", f"{unk_share:.4%}"]


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
