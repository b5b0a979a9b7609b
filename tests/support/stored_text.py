"""The training text of a store."""

from itertools import pairwise
from pathlib import Path

from nmt.data.store import open_store
from nmt.data.vocab import Vocab


def read_training_pairs(folder: Path) -> list[tuple[str, ...]]:
    vocab, train = Vocab.load(folder / "vocab.model"), open_store(folder, "train")
    sides = [
        vocab.decode([side.ids[a:b].tolist() for a, b in pairwise(side.offsets)])
        for side in (train.src, train.tgt)
    ]
    return list(zip(*sides, strict=True))
