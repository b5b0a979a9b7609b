"""Finds a test set by its name, and checks that it is the set of that name.

newstest2014 is scored in at least three versions, and a BLEU score names none of them: the full
3,003 lines, the 2,737 that WMT scored in 2014, copies with other quotes or other Unicode. So the
lines of the known sets are compared with their digests: a set asked for by name that differs is
refused, files that differ are read with a warning. A set asked for by name is the same text
wherever it comes from.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.downloads import find_test_set_files
from nmt.corpus.reader import Pair, describe_corpus, read_pairs
from nmt.corpus.text_files import TextFile, read_lines
from nmt.known_test_sets import KNOWN_SETS, OUR_NAMES, KnownSet
from nmt.system.errors import UserError

LABELS = ("the source", "the reference")
SPACES = re.compile(r"[^\S\x1c-\x1f]+")


@dataclass(frozen=True)
class TestSet:
    name: str  # as asked for, or as the corpus is described
    src: list[str]
    ref: list[str]
    src_sha256: str  # as `digest_lines` computes them
    ref_sha256: str
    known_as: str | None  # newstest2014: the known set that it is, by its digests
    subset: tuple[int, ...] | None  # of newstest2014 en-de: the lines, from 0, in sacreBLEU's wmt14
    warning: str | None  # it looks like a known set, and is not
    more_refs: tuple["Reference", ...] = ()  # further translations of the same source

    @property
    def more_references(self) -> list[list[str]]:
        """The lines of each further translation."""
        return [reference.lines for reference in self.more_refs]

    @property
    def label(self) -> str:
        """For signatures: a known set's name, or those of the files with the beginning of the
        reference's digest.
        """
        label = self.known_as
        if label is None:
            label = f"{_join_names(self.name)}#{self.ref_sha256[:8]}"
        for more in self.more_refs:
            label += f"+{_replace_odd(more.path.name)}#{digest_lines(more.lines)[:8]}"
        return label


@dataclass(frozen=True)
class Reference:
    """A further reference translation, read from a file."""

    path: Path
    lines: list[str]


def is_label_of(label: str, corpus: CorpusConfig) -> bool:
    """Whether a label is that of the set of a corpus, which need not be read for that."""
    names = {_join_names(describe_corpus(corpus)), *_find_claims(corpus)}
    return label.partition("#")[0] in names


def _join_names(name: str) -> str:
    """Return the names of a set's files without their folders."""
    return _replace_odd("+".join(Path(part).name for part in name.split(" + ")))


def _replace_odd(name: str) -> str:
    """Return a name in the form that a signature can hold."""
    return re.sub(r"[^!-{}~]", "_", name)


def open_test_set(name_or_corpus: str | CorpusConfig, data: DataConfig) -> TestSet:
    """The set of that name or of that corpus, from data.src to data.tgt."""
    if isinstance(name_or_corpus, str):
        shown = name = name_or_corpus
    else:
        shown = describe_corpus(name_or_corpus)
        if name_or_corpus.sacrebleu is None:
            pairs = list(read_pairs(name_or_corpus, data))
            return _make_test_set(shown, pairs, _find_claims(name_or_corpus), data, LABELS)
        name = name_or_corpus.sacrebleu
    src, ref = find_test_set_files(name, data)
    corpus = CorpusConfig(src=str(src), tgt=str(ref))
    read = read_pairs(corpus, replace(data, root="."))
    pairs = [Pair(*map(normalize_line, pair)) for pair in read]
    claim = OUR_NAMES.get(name, name)
    test_set = _make_test_set(shown, pairs, {claim}, data, (str(src), str(ref)))
    if test_set.warning:
        raise UserError(
            f"{test_set.warning}; replace it with the real test set, or remove it so that sacreBLEU downloads it"
        )
    return test_set


def open_reference(path: Path, data: DataConfig) -> TestSet:
    """Open only a reference, which is enough to score a file; it is recognised by its digest."""
    ref = list(read_lines(TextFile(path)))
    sha256 = digest_lines(ref)
    known_as = None
    for known, text in _list_texts():
        if data.src in text and text.get(data.tgt) == sha256:
            known_as = known.name
            break
    return TestSet(path.name, [], ref, "", sha256, known_as, _find_subset(known_as, data), None)


def add_references(test_set: TestSet, paths: Sequence[Path]) -> TestSet:
    """The set with further references, one file each."""
    more: list[Reference] = []
    known = [test_set.ref]
    for path in paths:
        lines = list(read_lines(TextFile(path)))
        if len(lines) != len(test_set.ref):
            raise UserError(
                f"{path}: has {len(lines):,} lines, but the first reference {len(test_set.ref):,}; "
                "give one line for each source sentence"
            )
        if lines in known:
            raise UserError(f"{path}: is the same text as another reference; give each once")
        known.append(lines)
        more.append(Reference(path, lines))
    return replace(test_set, more_refs=tuple(more))


def normalize_line(line: str) -> str:
    """As sacreBLEU writes the lines of its test sets: words with one plain space between them, none
    at the ends. U+001C to U+001F stay: Moses' tokenizer removes them, and so joins words.
    """
    return SPACES.sub(" ", line).strip(" ")


def digest_lines(lines: Sequence[str]) -> str:
    """sha256 of the normalised lines in UTF-8, each with \\n at its end."""
    text = "".join(normalize_line(line) + "\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


# ---- what it is -------------------------------------------------------------------------------------------------


def _list_texts() -> Iterator[tuple[KnownSet, Mapping[str, str]]]:
    """Every text of which the digests are known."""
    for known in KNOWN_SETS:
        for text in known.texts:
            yield known, text


def _find_claims(corpus: CorpusConfig) -> set[str]:
    """The sets that a corpus names: newstest2013.en + newstest2013.de name one."""
    if corpus.src is None or corpus.tgt is None:
        return set()
    src, tgt = (re.findall(r"newstest20\d\d", Path(name).name) for name in (corpus.src, corpus.tgt))
    return set(src) & set(tgt)


def _make_test_set(
    name: str, pairs: list[Pair], claims: set[str], data: DataConfig, labels: tuple[str, str]
) -> TestSet:
    src = [pair.src for pair in pairs]
    ref = [pair.tgt for pair in pairs]
    digests = digest_lines(src), digest_lines(ref)
    known_as, warning = _identify((src, ref), digests, claims, data, labels)
    return TestSet(name, src, ref, *digests, known_as, _find_subset(known_as, data), warning)


def _identify(
    sides: tuple[list[str], list[str]],
    digests: tuple[str, str],
    claims: set[str],
    data: DataConfig,
    labels: tuple[str, str],
) -> tuple[str | None, str | None]:
    """The known set that these lines are, and what is wrong with them if they claim to be one, or
    half of them are one.
    """
    languages = data.src, data.tgt
    warning = None
    for known, text in _list_texts():
        if data.src not in text or data.tgt not in text:
            continue
        is_same = [
            text[language] == ours for language, ours in zip(languages, digests, strict=True)
        ]
        if all(is_same):
            claims_another = any(claim.startswith(("newstest", "wmt")) for claim in claims)
            if known.name in claims or not claims_another:
                return known.name, None
            names = " or ".join(sorted(claims))
            return known.name, f"{labels[0]} and {labels[1]} are {known.name}, not {names}"
        if known.name in claims or any(is_same):
            i = is_same.index(False)
            problem = _describe_difference(sides[i], known, digests[i], text[languages[i]])
            warning = f"{labels[i]} is not the {languages[i]} side of {known.name}: {problem}"
    return None, warning


def _describe_difference(lines: list[str], known: KnownSet, ours: str, theirs: str) -> str:
    """What is wrong with lines that should be those of `known`, as closely as digests can tell."""
    for other, text in _list_texts():
        for language, sha256 in text.items():
            if sha256 == ours:
                return f"it is {other.name_text(text)}, {language}"
    if known.lines is not None and len(lines) != known.lines:
        return f"{len(lines):,} lines, not {known.lines:,}"
    return f"its sha256 begins with {ours[:12]}, not {theirs[:12]}"


def _find_subset(known_as: str | None, data: DataConfig) -> tuple[int, ...] | None:
    """The lines that are in sacreBLEU's filtered wmt14 too."""
    for known in KNOWN_SETS:
        if known.name == known_as:
            return known.list_subset(data.src, data.tgt) or None
    return None
