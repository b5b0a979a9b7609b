"""Which pairs may enter training: the rules, what each of them dropped, and what the dev and test sets share.

A pair counts under the first rule it breaks, and each rule keeps a few examples, so that a wrong rule shows. Sentences
of the dev and test sets in the training text are counted always and dropped on request. Equal pairs are found by a
64-bit digest of the pair, later and over all corpora: `duplicates`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmt.config import CleanConfig
from nmt.corpus.reader import Block, Pair

UNREADABLE = "unreadable"
N_SAMPLES = 3
SAMPLE_LENGTH = 200
IN_MEMORY = 4_000_000  # digests sorted at a time


class HeldOut(NamedTuple):
    """The sentences of a dev or test set, stripped as training sentences are."""

    src: frozenset[str]
    tgt: frozenset[str]
    pairs: frozenset[Pair]


def held_out(pairs: Sequence[Pair]) -> HeldOut:
    stripped = [Pair(src.strip(), tgt.strip()) for src, tgt in pairs]
    full = [pair for pair in stripped if all(pair)]
    return HeldOut(
        frozenset(src for src, _ in full), frozenset(tgt for _, tgt in full), frozenset(full)
    )


@dataclass
class Dropped:
    """How many pairs each rule dropped, and the first few of them."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[list[str]]] = field(default_factory=dict)

    def add(self, rule: str, src: str, tgt: str = "") -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= N_SAMPLES:
            self.samples.setdefault(rule, []).append([src[:SAMPLE_LENGTH], tgt[:SAMPLE_LENGTH]])


@dataclass
class Cleaned:
    pairs: list[Pair]
    dropped: Dropped
    shared: dict[
        str, list[int]
    ]  # per held-out set: pairs of which it has the pair, the source, the target
    digests: np.ndarray  # (pairs,) uint64


def clean(block: Block, rules: CleanConfig, sets: dict[str, HeldOut]) -> Cleaned:
    """The stripped pairs of `block` that keep the rules."""
    cleaned = Cleaned([], Dropped(), {name: [0, 0, 0] for name in sets}, np.zeros(0, np.uint64))
    for complaint in block.bad:
        cleaned.dropped.add(UNREADABLE, complaint)
    for pair in map(Pair, map(str.strip, block.src), map(str.strip, block.tgt)):
        rule = _broken(*pair, rules) or _shared(pair, rules, sets, cleaned.shared)
        if rule:
            cleaned.dropped.add(rule, *pair)
        else:
            cleaned.pairs.append(pair)
    digests = b"".join(
        blake2b("\n".join(pair).encode(), digest_size=8).digest() for pair in cleaned.pairs
    )
    cleaned.digests = np.frombuffer(digests, "<u8")
    return cleaned


def _broken(src: str, tgt: str, rules: CleanConfig) -> str | None:
    if not src or not tgt:
        return "empty side"
    if rules.identical and src == tgt:
        return "identical sides"
    if rules.max_words is not None or rules.max_ratio is not None:
        shorter, longer = sorted((len(src.split()), len(tgt.split())))
        if rules.max_words is not None and longer > rules.max_words:
            return f"more than {rules.max_words} words"
        if rules.max_ratio is not None and longer > rules.max_ratio * shorter:
            return f"length ratio above {rules.max_ratio:g}"
    return None


def _shared(
    pair: Pair, rules: CleanConfig, sets: dict[str, HeldOut], shared: dict[str, list[int]]
) -> str | None:
    rule = None
    for name, known in sets.items():
        found = pair in known.pairs, pair.src in known.src, pair.tgt in known.tgt
        if any(found):
            shared[name] = [n + is_found for n, is_found in zip(shared[name], found, strict=True)]
            if found[0] and rules.held_out == "drop-pairs":
                rule = rule or f"pair of the {name} set"
            elif rules.held_out == "drop-sides":
                rule = rule or f"side of the {name} set"
    return rule


def duplicates(files: Sequence[Path]) -> np.ndarray:
    """True for each pair that equals an earlier one; `files` hold the digests of consecutive pairs.

    The digests are sorted in ranges of their values, so that few are in memory at a time.
    """
    sizes = [file.stat().st_size // 8 for file in files]
    again = np.zeros(sum(sizes), bool)
    n_ranges = -(-len(again) // IN_MEMORY)
    for i in range(n_ranges):
        found, places = [], []
        for file, start in zip(files, np.cumsum([0, *sizes]), strict=False):
            digests = np.fromfile(file, "<u8")
            here = np.flatnonzero(
                (digests >> np.uint64(32)) * np.uint64(n_ranges) >> np.uint64(32) == i
            )
            found.append(digests[here])
            places.append(start + here)
        digests, place = np.concatenate(found), np.concatenate(places)
        order = np.argsort(digests, kind="stable")  # equal ones stay in the order of the corpus
        is_repeat = digests[order][1:] == digests[order][:-1]
        again[place[order[1:]][is_repeat]] = True
    return again
