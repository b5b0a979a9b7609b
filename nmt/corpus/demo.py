"""The embedded English-German corpus, to try the whole toolkit offline: 21,000 pairs of a small grammar.

scripts/make_demo.py made it and describes the grammar. No sentence occurs twice on either side.
"""

import lzma
from collections.abc import Iterator
from itertools import islice

from nmt.config_files import find_shipped_configs
from nmt.corpus.text_files import TextPair

CORPUS = find_shipped_configs() / "demo.tsv.xz"  # English, tab, German
# Which lines each split has. Held-out text comes first, so that reading it takes no time.
RANGES = {"test": (0, 500), "valid": (500, 1000), "train": (1000, 21000)}


def generate_pairs(split: str) -> Iterator[TextPair]:
    """Yield the sentence pairs of one split, English first."""
    with lzma.open(CORPUS) as lines:
        for line in islice(lines, *RANGES[split]):
            en, de = line.decode().rstrip("\n").split("\t")
            yield en, de
