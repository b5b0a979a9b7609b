"""Which pairs may enter training: the rules, what each of them dropped, and what the dev and test sets share.

A pair counts under the first rule that it breaks, and each rule keeps a few examples, so that a wrong rule is noticed.
Sentences of the dev and test sets in the training text are always counted and dropped on request. Equal pairs are found
by a 64-bit digest of the pair, later and over all corpora: `find_duplicates`. To add a rule, add a field to
`CleanConfig` and a line to `find_broken_rule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from nmt.config import CleanConfig, multiply_exactly
from nmt.corpus.reader import Block, Pair
from nmt.system.files import open_plain_file

UNREADABLE = "unreadable"
N_SAMPLES = 3  # that each rule keeps of a corpus
SAMPLE_LENGTH = 200  # characters


HeldOutPairs = dict[str, list[Pair]]  # of the dev and test sets, by name


@dataclass(frozen=True)
class HeldOutSet:
    """The sentences of a dev or test set, stripped as training sentences are."""

    src: frozenset[str]
    tgt: frozenset[str]
    pairs: frozenset[Pair]


def make_held_out_set(pairs: Sequence[Pair]) -> HeldOutSet:
    stripped = [Pair(src.strip(), tgt.strip()) for src, tgt in pairs]
    full = [pair for pair in stripped if pair.src and pair.tgt]
    src = frozenset(pair.src for pair in full)
    tgt = frozenset(pair.tgt for pair in full)
    return HeldOutSet(src, tgt, frozenset(full))


@dataclass
class Report:
    """How many pairs of a shard or a corpus were kept and dropped when they were collected or
    encoded.
    """

    lines: int = 0
    kept: list[int] = field(default_factory=list)  # of each shard
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # of the source, of the target
    dropped: dict[str, int] = field(default_factory=dict)  # by rule
    samples: dict[str, list[list[str]]] = field(default_factory=dict)  # the first few of each rule
    # by held-out set: pairs with its pair, its source, its target
    held_out: dict[str, list[int]] = field(default_factory=dict)

    @property
    def n_kept(self) -> int:
        return sum(self.kept)

    def drop(self, rule: str, src: str, tgt: str = "") -> None:
        self.dropped[rule] = self.dropped.get(rule, 0) + 1
        samples = self.samples.setdefault(rule, [])
        if len(samples) < N_SAMPLES:
            samples.append([src[:SAMPLE_LENGTH], tgt[:SAMPLE_LENGTH]])

    def extend(self, later: "Report") -> None:
        """Add the report on the pairs that follow."""
        self.lines += later.lines
        self.kept += later.kept
        self.tokens = _add(self.tokens, later.tokens)
        for rule, n in later.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, 0) + n
            self.samples[rule] = (self.samples.get(rule, []) + later.samples[rule])[:N_SAMPLES]
        for name, counts in later.held_out.items():
            self.held_out[name] = _add(self.held_out.get(name, [0, 0, 0]), counts)


def _add(before: list[int], later: list[int]) -> list[int]:
    return [a + b for a, b in zip(before, later, strict=True)]


def clean_block(
    block: Block, rules: CleanConfig | None, held_out: dict[str, HeldOutSet]
) -> tuple[list[Pair], Report]:
    """The stripped pairs of `block` that break no rule. Without rules, as in a dev set, all pairs as
    they are: only what could not be read is missing.
    """
    report = Report(
        lines=len(block.src) + len(block.bad), held_out={name: [0, 0, 0] for name in held_out}
    )
    for complaint in block.bad:
        report.drop(UNREADABLE, complaint)
    pairs = []
    for src, tgt in zip(block.src, block.tgt, strict=True):
        if rules is None:
            pairs.append(Pair(src, tgt))
            continue
        pair = Pair(src.strip(), tgt.strip())
        rule = find_broken_rule(pair, rules)
        if rule is None:
            rule = _search_held_out(pair, rules, held_out, report.held_out)
        if rule is None:
            pairs.append(pair)
        else:
            report.drop(rule, *pair)
    report.kept.append(len(pairs))
    return pairs, report


def digest_pairs(src: Sequence[bytes], tgt: Sequence[bytes]) -> np.ndarray:
    """Compute the digests by which `find_duplicates` compares pairs, (pairs,) uint64."""
    digests = [
        blake2b(b"%b\n%b" % pair, digest_size=8).digest() for pair in zip(src, tgt, strict=True)
    ]
    return np.frombuffer(b"".join(digests), "<u8")


def find_broken_rule(pair: Pair, rules: CleanConfig) -> str | None:
    """The first rule that the pair itself breaks, as the ledger names it."""
    src, tgt = pair
    if not src or not tgt:
        return "empty side"
    if "\0" in src or "\0" in tgt:  # no vocabulary has it, so it would become an unknown piece
        return "NUL character"
    if rules.identical and src == tgt:
        return "identical sides"
    if rules.max_words is not None or rules.max_ratio is not None:
        return _find_broken_length(pair, rules)
    return None


def _find_broken_length(pair: Pair, rules: CleanConfig) -> str | None:
    """The rules that count words, which takes time."""
    if rules.max_ratio is None and rules.max_words is not None:
        # n words have at least 2n - 1 characters, so most sides need no counting.
        if max(len(pair.src), len(pair.tgt)) <= 2 * rules.max_words:
            return None
    shorter, longer = sorted((len(pair.src.split()), len(pair.tgt.split())))
    if rules.max_words is not None and longer > rules.max_words:
        return f"more than {rules.max_words} words"
    if rules.max_ratio is not None and longer > multiply_exactly(shorter, rules.max_ratio):
        return f"length ratio above {rules.max_ratio:g}"
    return None


def _search_held_out(
    pair: Pair,
    rules: CleanConfig,
    held_out: dict[str, HeldOutSet],
    shared: dict[str, list[int]],
) -> str | None:
    """Count in `shared` what the pair has in common with each set; the rule that drops it for that."""
    broken = None
    for name, known in held_out.items():
        has_pair = pair in known.pairs
        has_src = pair.src in known.src
        has_tgt = pair.tgt in known.tgt
        if not (has_src or has_tgt):
            continue
        for i, is_found in enumerate((has_pair, has_src, has_tgt)):
            shared[name][i] += is_found
        if broken is None and rules.held_out == "drop-pairs" and has_pair:
            broken = f"pair of the {name} set"
        if broken is None and rules.held_out == "drop-sides":
            broken = f"side of the {name} set"
    return broken


def find_duplicates(files: Sequence[Path]) -> np.ndarray:
    """True for each pair that equals an earlier one; `files` hold the digests of consecutive pairs."""
    parts = [np.empty(0, "<u8")]
    for path in files:
        with open_plain_file(path) as file:
            parts.append(np.fromfile(file, "<u8"))
    digests = np.concatenate(parts)
    # Equal digests come together, and stay in the order of the corpus because the sort is stable.
    order = np.argsort(digests, kind="stable")
    in_order = digests[order]
    is_duplicate = np.zeros(len(digests), bool)
    is_duplicate[order[1:]] = in_order[1:] == in_order[:-1]
    return is_duplicate
