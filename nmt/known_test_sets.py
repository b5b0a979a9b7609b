"""The one table of known test sets: their names, sizes, digests, where others keep them, and what
the paper calls them.

A set is known by its lines: the sha256 of each side, which two copies of different origin agreed
on. To add a set, add a row; whatever compares, names, downloads or advises reads this table. Rows
without digests are known by name alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WMT14 = "wmt/wmt14"  # on Hugging Face


@dataclass(frozen=True)
class KnownSubset:
    """What was left of a set for another evaluation, in one direction."""

    sacrebleu: str
    direction: tuple[str, str]
    left_out: tuple[range, ...]  # lines of the whole set, from 0


@dataclass(frozen=True)
class KnownSet:
    name: str
    sacrebleu: str  # its name there
    lines: int | None = None
    texts: tuple[Mapping[str, str], ...] = ()  # sha256 by language; a text for each set of lines
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

    def find_subset(self, src: str, tgt: str) -> KnownSubset | None:
        if self.subset is not None and self.subset.direction == (src, tgt):
            return self.subset
        return None

    def subset_lines(self) -> tuple[int, ...]:
        """List the lines of the whole set, from 0, that the subset holds."""
        assert self.lines is not None and self.subset is not None
        remaining = set(range(self.lines))
        remaining.difference_update(*self.subset.left_out)
        return tuple(sorted(remaining))


NEWSTEST2012 = KnownSet(
    "newstest2012",
    "wmt12",
    lines=3003,
    texts=(
        {
            "en": "4ad37ce6758a083d4c73801896bc74350ae3d9b3cd68d086f6f5790d37e4c164",
            "de": "10563e0591c9ed7b11805e5173d175c5786a4823da1f9dee354795a3b6514b97",
            "fr": "e4efc61d0afe4f8b6d5fb14c8f7c161b82b0bb2daa952bcb87c893535e9e4db1",
        },
    ),
)
NEWSTEST2013 = KnownSet(
    "newstest2013",
    "wmt13",
    lines=3000,
    texts=(
        {
            "en": "80b81d23ddfd16724aa21b288b21f29c825c8838807aecbc65fe8a1b313325de",
            "de": "026f4fd1fe147ece7eb201ef46063482990554d342e05db9480b1258d71d3d4f",
            "fr": "d197faafd03242c13f4589cc4c8391a8d33da7be08feab5b8759593ee04fda2e",
        },
    ),
    hub_split="validation",
)
NEWSTEST2014 = KnownSet(
    "newstest2014",
    "wmt14/full",
    lines=3003,
    texts=(
        {
            "en": "7294bccf2879a97b3706b95c9595f1459617a8ee7130d5d8581c910e69736971",
            "de": "ae5d110486bc33d7175e9e28c7d0051eb3e5fcd2166dd93371089852c091a20e",
        },
        {
            "en": "9a12cb6e8efb3509ebede627e4a9c83ee64935509d561ff70f4b7bd5f93f6096",
            "fr": "9ed99a750c7818b7bbc62230ed0b1a1673325989bdcf9f81a7d7e67bde8ca473",
        },
    ),
    hub_split="test",
    # WMT's filtered English-German set of 2014: without 14 documents of German origin, 266 lines.
    # Worked out from a tokenised copy of it, which has the other 150 documents in another order.
    subset=KnownSubset(
        "wmt14",
        ("en", "de"),
        left_out=(
            range(161, 168),
            range(581, 611),
            range(629, 648),
            range(743, 785),
            range(865, 883),
            range(969, 978),
            range(1000, 1010),
            range(1100, 1108),
            range(1225, 1246),
            range(1435, 1455),
            range(1553, 1568),
            range(2230, 2297),
        ),
    ),
)
PAPER_DEV_SET = NEWSTEST2013  # section 6.2
PAPER_TEST_SET = NEWSTEST2014
KNOWN_SETS = (
    KnownSet("newstest2008", "wmt08"),
    KnownSet("newstest2009", "wmt09"),
    KnownSet("newstest2010", "wmt10"),
    KnownSet("newstest2011", "wmt11"),
    NEWSTEST2012,
    NEWSTEST2013,
    NEWSTEST2014,
    KnownSet("newstest2015", "wmt15"),
    KnownSet("newstest2016", "wmt16"),
    KnownSet("newstest2017", "wmt17"),
    KnownSet("newstest2018", "wmt18"),
    KnownSet("newstest2019", "wmt19"),
    KnownSet("newstest2020", "wmt20"),
    KnownSet("newstest2021", "wmt21"),
)

SACREBLEU_NAMES = {known.name: known.sacrebleu for known in KNOWN_SETS}
OUR_NAMES = {known.sacrebleu: known.name for known in KNOWN_SETS}
WMT14_SPLITS = {known.name: known.hub_split for known in KNOWN_SETS if known.hub_split is not None}


def find_filtered_set(n_lines: int, src: str, tgt: str) -> KnownSet | None:
    """Return the known set whose subset for these languages has this number of lines.

    Another text may have as many lines: the digest of the subset is not known.
    """
    for known in KNOWN_SETS:
        if known.find_subset(src, tgt) and len(known.subset_lines()) == n_lines:
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
            names[len(known.subset_lines())] = f"sacreBLEU's filtered {known.subset.sacrebleu}"
    return names
