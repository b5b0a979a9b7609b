"""A test set by its name, and whether it is what its name says.

newstest2014 is scored in at least three versions, and a BLEU names none of them: the full 3,003 lines, the 2,737 that
WMT scored in 2014, copies with other quotes or other Unicode. So the lines of the known sets are held against their
digest: a set asked for by name that differs is refused, files that differ are read with a warning. A set asked for by
name is the same text wherever it comes from.
"""

import contextlib
import hashlib
import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus import downloads as remote
from nmt.corpus.reader import PACKED, Pair, describe, read_pairs
from nmt.corpus.text_files import TextFile, read_lines
from nmt.system.errors import UserError

# sha256 of each side as `digest` computes it, after the number of lines. The sets of 2012 and 2013 have the same lines
# in every pair of languages, that of 2014 has others in each. Two copies of different origin agreed on each of these.
KNOWN = {
    "newstest2012": (
        3003,
        {
            "en": "4ad37ce6758a083d4c73801896bc74350ae3d9b3cd68d086f6f5790d37e4c164",
            "de": "10563e0591c9ed7b11805e5173d175c5786a4823da1f9dee354795a3b6514b97",
            "fr": "e4efc61d0afe4f8b6d5fb14c8f7c161b82b0bb2daa952bcb87c893535e9e4db1",
        },
    ),
    "newstest2013": (
        3000,
        {
            "en": "80b81d23ddfd16724aa21b288b21f29c825c8838807aecbc65fe8a1b313325de",
            "de": "026f4fd1fe147ece7eb201ef46063482990554d342e05db9480b1258d71d3d4f",
            "fr": "d197faafd03242c13f4589cc4c8391a8d33da7be08feab5b8759593ee04fda2e",
        },
    ),
    "newstest2014 de-en": (
        3003,
        {
            "en": "7294bccf2879a97b3706b95c9595f1459617a8ee7130d5d8581c910e69736971",
            "de": "ae5d110486bc33d7175e9e28c7d0051eb3e5fcd2166dd93371089852c091a20e",
        },
    ),
    "newstest2014 en-fr": (
        3003,
        {
            "en": "9a12cb6e8efb3509ebede627e4a9c83ee64935509d561ff70f4b7bd5f93f6096",
            "fr": "9ed99a750c7818b7bbc62230ed0b1a1673325989bdcf9f81a7d7e67bde8ca473",
        },
    ),
}
# What WMT's filtered English-German set of 2014, sacreBLEU's wmt14, leaves out of the full one: 14 documents of German
# origin, 266 lines, here from 0. Worked out from a tokenised copy of it, which has the other 150 in another order.
DROPPED = (
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
)
# Lines of the sets that are most often confused, for advice where two numbers of lines differ.
KNOWN_SIZES = {
    3003: "newstest2014 in full (sacreBLEU's wmt14/full)",
    2737: "sacreBLEU's filtered wmt14",
    3000: "newstest2013",
}
WMT14_SPLITS = {"newstest2014": "test", "newstest2013": "validation"}  # of wmt/wmt14 on the hub
SIDES = ("the source", "the reference")


@dataclass(frozen=True)
class TestSet:
    name: str  # as asked for, or as the corpus is described
    src: list[str]
    ref: list[str]
    src_sha256: str  # as `digest` computes them
    ref_sha256: str
    known_as: str | None  # newstest2014: the known set that it is, by its digests
    subset: (
        tuple[int, ...] | None
    )  # of newstest2014 en-de: the lines, from 0, that sacreBLEU's wmt14 holds
    warning: str | None  # it looks like a known set, and is not

    @property
    def is_verified(self) -> bool:
        return self.known_as is not None and self.warning is None

    @property
    def label(self) -> str:
        """For signatures: a known set's name, or those of the files with the beginning of the reference's digest."""
        files = "+".join(Path(part).name for part in self.name.split(" + "))
        return self.known_as or f"{re.sub(r'[^!-{}~]', '_', files)}#{self.ref_sha256[:8]}"


def open_test_set(asked: str | CorpusConfig, data: DataConfig) -> TestSet:
    """The set of that name or of that corpus, from data.src to data.tgt."""
    if isinstance(asked, CorpusConfig):
        return _judged(describe(asked), list(read_pairs(asked, data)), _claims(asked), data, SIDES)
    src, ref = _files(asked, data)
    pairs = read_pairs(CorpusConfig(src=str(src), tgt=str(ref)), replace(data, root="."))
    claim = remote.NEWSTEST_OF.get(asked, asked)
    lines = [Pair(plain(pair.src), plain(pair.tgt)) for pair in pairs]
    test_set = _judged(asked, lines, {claim}, data, (str(src), str(ref)))
    if test_set.warning:
        raise UserError(
            f"{test_set.warning}; put the real one there, or remove it and let sacreBLEU fetch it"
        )
    return test_set


def open_reference(path: Path, data: DataConfig) -> TestSet:
    """A reference alone, which is enough to score a file; known by its digest."""
    ref = list(read_lines(TextFile(path)))
    sha256 = digest(ref)
    known_as = next(
        (
            title.split()[0]
            for title, (_, digests) in KNOWN.items()
            if digests.get(data.tgt) == sha256 and {data.src, data.tgt} <= digests.keys()
        ),
        None,
    )
    return TestSet(path.name, [], ref, "", sha256, known_as, _subset(known_as, data, []), None)


def plain(line: str) -> str:
    """As sacreBLEU writes the lines of its test sets: no space at the ends, one between words, none of them special."""
    return " ".join(line.split())


def digest(lines: Sequence[str]) -> str:
    """sha256 of the plain lines in UTF-8, each with \\n at its end."""
    return hashlib.sha256("".join(plain(line) + "\n" for line in lines).encode()).hexdigest()


def find_lines(whole: Sequence[Pair], part: Sequence[Pair]) -> tuple[int, ...] | None:
    """Which pairs of `whole`, from 0 and in its order, make up `part`, in whatever order; None if others do."""
    places: dict[Pair, list[int]] = {}
    for i, pair in enumerate(whole):
        places.setdefault(Pair(*map(plain, pair)), []).append(i)
    found: list[int] = []
    for pair in part:
        free = places.get(Pair(*map(plain, pair)))
        if not free:
            return None
        after = (
            found[-1] + 1 if found else 0
        )  # of equal pairs the one that goes on where the last one was
        found.append(free.pop(free.index(after) if after in free else 0))
    return tuple(sorted(found))


# ---- where it lies ----------------------------------------------------------------------------------------------


def _files(name: str, data: DataConfig) -> tuple[Path, Path]:
    """The two files of a set: sacreBLEU's own, else NAME.LANG or NAME-src.LANG and NAME-ref.LANG beside the corpora."""
    try:
        src, ref = remote.texts_of_test_set(name, f"{data.src}-{data.tgt}")
        return src.path, ref.path
    except UserError as error:
        problem = error
    stems = list(dict.fromkeys([name, remote.NEWSTEST_OF.get(name, name)]))
    folders = _folders(data)
    for folder in folders:
        for stem in stems:
            src_path = _one_of(folder, stem, "src", data.src)
            ref_path = _one_of(folder, stem, "ref", data.tgt)
            if src_path and ref_path:
                return src_path, ref_path
    raise UserError(
        f"{problem} (or put {stems[-1]}.{data.src} and {stems[-1]}.{data.tgt} into {folders[0]})"
    ) from None


def _folders(data: DataConfig) -> list[Path]:
    corpora = [corpus for corpus in (data.test, data.valid, *data.train) if corpus is not None]
    names = [
        name
        for corpus in corpora
        for name in (corpus.archive or corpus.src, corpus.file)
        if name is not None
    ]
    return list(
        dict.fromkeys([Path(data.root), *((Path(data.root) / name).parent for name in names)])
    )


def _one_of(folder: Path, stem: str, side: str, language: str) -> Path | None:
    for name in (f"{stem}.{language}", f"{stem}-{side}.{language}"):
        for ending in ("", *PACKED):
            if (path := folder / f"{name}{ending}").is_file():
                return path
    return None


# ---- what it is -------------------------------------------------------------------------------------------------


def _claims(corpus: CorpusConfig) -> set[str]:
    """The sets that a corpus names: newstest2013.en + newstest2013.de name one."""
    if corpus.sacrebleu is not None:
        return {remote.NEWSTEST_OF.get(corpus.sacrebleu, corpus.sacrebleu)}
    named = [
        set(re.findall(r"newstest20\d\d", Path(name).name))
        for name in (corpus.src, corpus.tgt)
        if name
    ]
    return set.intersection(*named) if named else set()


def _judged(
    name: str, pairs: list[Pair], claims: set[str], data: DataConfig, labels: tuple[str, str]
) -> TestSet:
    sides = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    ours, languages = (digest(sides[0]), digest(sides[1])), (data.src, data.tgt)
    known_as, warning = None, None
    for title, (n, digests) in KNOWN.items():
        known, theirs = title.split()[0], tuple(digests.get(language, "") for language in languages)
        if ours == theirs:
            known_as, warning = known, None
            if known not in claims and any(re.match("newstest|wmt", claim) for claim in claims):
                warning = (
                    f"{labels[0]} and {labels[1]} are {known}, not {' or '.join(sorted(claims))}"
                )
            break
        same = [a == b for a, b in zip(ours, theirs, strict=True)]
        if all(theirs) and (known in claims or any(same)):
            k = same.index(False)
            warning = (
                f"{labels[k]} is not the {languages[k]} side of {known}: "
                f"{_difference(sides[k], n, ours[k], theirs[k])}"
            )
    return TestSet(name, *sides, *ours, known_as, _subset(known_as, data, pairs), warning)


def _difference(lines: list[str], n: int, ours: str, theirs: str) -> str:
    """What is wrong with lines that should be others, as closely as digests can tell."""
    for title, (_, sides) in KNOWN.items():
        for language, other in sides.items():
            if ours == other:
                return f"it is {title}, {language}"
    if len(lines) != n:
        return f"{len(lines):,} lines, not {n:,}"
    changes: dict[str, Callable[[str], str]] = {
        "is not in the normal form NFC": partial(unicodedata.normalize, "NFC"),
        "has characters written as in HTML": html.unescape,
    }
    for what, change in changes.items():
        changed = [change(line) for line in lines]
        if digest(changed) == theirs:
            first = next(
                i for i, (a, b) in enumerate(zip(lines, changed, strict=True), 1) if a != b
            )
            return f"line {first} {what}, and perhaps others; else it is the same"
    return f"its sha256 begins with {ours[:12]}, not {theirs[:12]}"


def _subset(known_as: str | None, data: DataConfig, pairs: list[Pair]) -> tuple[int, ...] | None:
    """What is in sacreBLEU's filtered wmt14 too: by its own copy where that lies in its cache, else by the table."""
    if (known_as, data.src, data.tgt) != ("newstest2014", "en", "de"):
        return None
    if pairs and (cached := remote.cached_test_set("wmt14", "en-de")) is not None:
        with contextlib.suppress(UserError):  # half a copy says nothing
            corpus = CorpusConfig(src=cached[0].name, tgt=cached[1].name)
            return find_lines(pairs, list(read_pairs(corpus, DataConfig())))
    return tuple(sorted(set(range(KNOWN["newstest2014 de-en"][0])).difference(*DROPPED)))
