"""The known test sets: their names, sizes, digests, where others keep them, and what the paper calls
them. The one table of them is known_test_sets.json.

A set is known by its lines: the sha256 of each side, which two copies of different origin agreed
on. To add a set, add a row; whatever compares, names, downloads or advises reads this table. Rows
without digests are known by name alone.

The subset of newstest2014 is WMT's filtered English-German set of 2014: without 14 documents of
German origin, 266 lines. It was worked out from a tokenised copy, which has the other 150 documents
in another order.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WMT14 = "wmt/wmt14"  # on Hugging Face


@dataclass(frozen=True)
class KnownSubset:
    """The lines of a set that another evaluation kept, in one direction."""

    sacrebleu: str
    direction: tuple[str, str]
    left_out: tuple[range, ...]  # lines of the whole set, from 0


@dataclass(frozen=True)
class KnownSet:
    name: str
    sacrebleu: str  # its name there
    lines: int | None = None
    texts: Sequence[Mapping[str, str]] = ()  # sha256 by language; a text for each set of lines
    hub_split: str | None = None  # of WMT14
    subset: KnownSubset | None = None

    def name_text(self, text: Mapping[str, str]) -> str:
        """`newstest2014 de-en`, where not all pairs of languages have the same lines."""
        if len(self.texts) == 1:
            return self.name
        languages = "-".join(sorted(text))
        return f"{self.name} {languages}"

    def list_names(self, hub_config: str) -> tuple[str, ...]:
        """List the names that `nmt.paper` gives to this set: from files, from the hub, and from
        sacreBLEU.
        """
        hub = f"wmt14 {hub_config} {self.hub_split}"
        return self.name, hub, f"sacrebleu {self.sacrebleu}"

    def list_subset(self, src: str, tgt: str) -> tuple[int, ...]:
        """List the lines of the whole set, from 0, that its subset for these languages holds, if it has one."""
        if self.subset is None or self.subset.direction != (src, tgt):
            return ()
        remaining = set(range(self.lines or 0))
        return tuple(sorted(remaining.difference(*self.subset.left_out)))


def _read_table() -> Iterator[KnownSet]:
    table = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    for row in json.loads(table):
        subset = row.pop("subset", None)
        if subset is not None:
            left_out = tuple(range(first, end) for first, end in subset["left_out"])
            subset = KnownSubset(subset["sacrebleu"], tuple(subset["direction"]), left_out)
        yield KnownSet(**row, subset=subset)


KNOWN_SETS = tuple(_read_table())
_BY_NAME = {known.name: known for known in KNOWN_SETS}
PAPER_DEV_SET = _BY_NAME["newstest2013"]  # section 6.2
PAPER_TEST_SET = _BY_NAME["newstest2014"]
SACREBLEU_NAMES = {known.name: known.sacrebleu for known in KNOWN_SETS}
OUR_NAMES = {known.sacrebleu: known.name for known in KNOWN_SETS}
WMT14_SPLITS = {known.name: known.hub_split for known in KNOWN_SETS if known.hub_split is not None}


def find_filtered_set(n_lines: int, src: str, tgt: str) -> KnownSet | None:
    """Return the known set whose subset for these languages has this number of lines.

    Another text may have as many lines: the digest of the subset is not known.
    """
    for known in KNOWN_SETS:
        if n_lines == (len(known.list_subset(src, tgt)) or None):
            return known
    return None


def name_sizes() -> dict[int, str]:
    """Name the paper's sets by their numbers of lines, for advice on a file of another length."""
    names = {}
    for known in (PAPER_DEV_SET, PAPER_TEST_SET):
        assert known.lines is not None
        names[known.lines] = known.name
        if known.subset is not None:
            names[known.lines] = f"{known.name} in full (sacreBLEU's {known.sacrebleu})"
            n_kept = len(known.list_subset(*known.subset.direction))
            names[n_kept] = f"sacreBLEU's filtered {known.subset.sacrebleu}"
    return names
