"""Finds text whose score would be wrong, before it is scored.

A scorer accepts whatever it is given, be it BPE pieces, `&quot;` or half a test set, and calls the
result BLEU. A problem is fatal if the score would certainly be wrong; the others are warnings,
because such text may be genuine. Both sides are compared line by line: real text contains entities
and code too, but then so does its reference. These functions open no text, change nothing
and print nothing but what `warn_of_unrelated` and `warn_of_traces` warn of.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from nmt.known_test_sets import name_sizes
from nmt.system.progress import say

# If a whole file is in pieces or escaped, far more than one line in a hundred shows it, and fewer
# lines change a score by less than a tenth of its confidence interval. So one marked line in 3,003
# is not fatal, but one in two is.
MIN_SHARE = 0.01
# Of the lines that could be marked (those with a comma, a quote, ...), nearly all are if a tool was
# used, and at most one in a hundred is in real text.
MIN_SHARE_OF_POSSIBLE = 0.5
# Names, code and titles are rightly copied from the source, but not in more lines than this.
MAX_COPIED = 0.05

# Translations have similar lengths: within 1,000 lines of six real corpora (captions, news, manuals,
# short sentences), the logarithms of the lengths correlate by 0.82 to 0.98. With one side shifted by
# a line, by at most 0.28.
ALIGNED = 0.5
MIN_SPREAD = 0.1  # of the logarithms: if all lines have one length, lengths say nothing
MIN_LINES = 100  # of which the lengths say something
# Kinds of letters that a whole text may have lost: the share of its other side's lines that must have them, and of
# how many lines at least. Of German, French, Spanish or Czech text, a third to nine tenths have accented ones.
BEYOND_ASCII = re.compile(r"[^\W\d_a-zA-Z]")
FOLDS = (
    (str.lower, "upper-case", 0.5, 1),
    (str.upper, "lower-case", 0.5, 1),
    (partial(BEYOND_ASCII.sub, ""), "accented or other non-ASCII", 0.1, 200),
)
UNSPACED = {"ja": "Japanese", "th": "Thai", "zh": "Chinese"}


@dataclass(frozen=True)
class Text:
    name: str  # for messages: a file or a test set
    lines: Sequence[str]
    language: str
    is_of_model: bool = False  # translated just now, not read from a file


@dataclass(frozen=True)
class Problem:
    is_fatal: bool
    message: str  # one line: the first place, what is wrong, how often, and the remedy


@dataclass(frozen=True)
class Trace:
    """What another tool leaves in a line, and how the same text looks without it (None if that
    cannot be known).
    """

    what: str
    pattern: re.Pattern[str]
    remedy: str
    unmarked: re.Pattern[str] | None = None
    is_one_sided: bool = False  # wrong only if the other side does not have it

    def find_lines(self, text: Text) -> list[int]:
        return _find_lines(self.pattern, text)

    def find_unmatched(self, marked: list[int], other: Text) -> list[int]:
        """Return the marked lines whose other side is not marked."""
        return sorted(set(marked) - set(self.find_lines(other)))

    def is_systematic(self, text: Text, marked: list[int]) -> bool:
        """Whether a tool made these marks: they are in enough lines, and in most of those that
        could have them.
        """
        if not marked or len(marked) < MIN_SHARE * len(text.lines):
            return False
        if self.unmarked is None:
            return True
        unmarked = set(_find_lines(self.unmarked, text)) - set(marked)
        return len(marked) >= MIN_SHARE_OF_POSSIBLE * (len(marked) + len(unmarked))


FOREIGN_MARKS = Trace(
    "pieces or marks that another tool adds",
    re.compile(r"\uffed|\u0120|\S</w>|</?s>|(?:^| )##\w|^<\w+> "),
    "join the pieces and remove the marks",
    is_one_sided=True,
)
TRACES = (
    # Wrong on either side: pieces must not be scored, and neither is ever written by hand.
    Trace(
        "BPE was left in",
        re.compile(r"\S@@(?= |$)|\u2581"),
        "join the pieces first (sed -E 's/@@( |$)//g', or SentencePiece's decoding)",
    ),
    Trace(
        "compounds are already split",
        re.compile(r"##AT##|(?<=\S) @(?:-|/|&#45;)@ (?=\S)"),
        "the paper's BLEU splits them itself and would split twice: give detokenised text "
        "(sacremoses detokenize; sed 's/ ##AT##-##AT## /-/g; s/ @-@ /-/g')",
    ),
    # Spaces before ? ! : ; are correct French, so they do not count; ` .` counts only at the end of
    # a line, because text may contain ` .NET` or ` ...`.
    Trace(
        "Moses or HTML entities",
        re.compile(r"&(?:quot|apos|amp|lt|gt|bar|bra|ket|#[0-9]{2,5}|#x[0-9a-f]+);"),
        "unescape them (sacremoses detokenize, or html.unescape)",
        re.compile(r"[\"'&|<>\[\]]"),
        is_one_sided=True,
    ),
    Trace(
        "spaces before commas and full stops, as a tokenizer leaves them",
        re.compile(r"\S \.(?: ?(?:[\"'»“”]|&quot;|&apos;))*\s*$|\S ,(?= |$)"),
        "detokenise it (sacremoses detokenize)",
        re.compile(r"[^\s.]\.[\"'»“”]*\s*$|[^\s,],(?= |$)"),
        is_one_sided=True,
    ),
    FOREIGN_MARKS,
    Trace(
        "columns or JSON around the text",
        re.compile(r"\t| \|\|\| |^\{\""),
        "give the text alone (nmt-translate: without --n-best, --scores, --alignments, --json)",
        is_one_sided=True,
    ),
    Trace(
        "UTF-8 that was read as Latin-1",
        re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac"),
        "convert the original file to UTF-8 once",
        is_one_sided=True,
    ),
    Trace(
        "accents apart from their letters (Unicode NFD)",
        # only what NFC composes: other languages write accents that it leaves apart
        re.compile(
            "[aeiouAEIOU][\u0300-\u0302\u0308]|[anoANO]\u0303|[cC]\u0327|[cenrszCENRSZ]\u030c"
        ),
        "normalise to NFC (uconv -x any-nfc)",
        is_one_sided=True,
    ),
)
CARRIAGE_RETURN = Trace(
    "a carriage return",
    re.compile("\r"),
    "convert the file with dos2unix; lines must end with \\n only",
)
REPLACEMENT = Trace(
    "the replacement character U+FFFD",
    re.compile("\ufffd"),
    "the text was decoded with the wrong encoding; convert the original file to UTF-8",
)
BYTE_ORDER_MARK = Trace(
    "a byte order mark", re.compile("\ufeff"), "save the file as UTF-8 without one"
)
OF_MODEL = "the model wrote it; look for it in the training text, or train for longer"
UNKNOWN = re.compile(r"<unk>|\u2047|(?:^| )UNK(?= |$)")


def find_problems(
    hypotheses: Text,
    references: Text,
    sources: Text | None = None,
) -> list[Problem]:
    """Return everything that is wrong or suspicious about scoring `hypotheses` against
    `references`, fatal problems first.
    """
    unusable = [
        *_check_not_empty(hypotheses, references),
        *_check_lengths(hypotheses, references),
    ]
    if unusable:
        return unusable[:1]
    problems = [
        *_check_empty_lines(hypotheses, references),
        *_check_traces(hypotheses, references),
        *_check_characters(hypotheses, references),
        *_check_characters(references, hypotheses),
        *_check_unknown_pieces(hypotheses),
        *check_letters(hypotheses, references),
        *check_letters(references, hypotheses),
        *_check_script(hypotheses),
    ]
    if sources is not None:
        problems += _check_copies(hypotheses, references, sources)
    return sorted(problems, key=lambda problem: not problem.is_fatal)


# ---- what cannot be scored at all -----------------------------------------------------------------------------------


def _check_not_empty(hypotheses: Text, references: Text) -> Iterator[Problem]:
    """Report a side without any text. Translations that are all empty are allowed and score 0: a
    model early in training produces them."""
    for text in (hypotheses, references):
        n = len(text.lines)
        has_text = any(line.strip() for line in text.lines)
        if not n or (text is references and not has_text):
            seen = f"all {n:,} lines are empty" if n else "there are no lines"
            yield Problem(
                True,
                f"{text.name}:1: nothing to score: {seen}; give one line of text for each source "
                "sentence",
            )


def _check_lengths(hypotheses: Text, references: Text) -> Iterator[Problem]:
    n, m = len(hypotheses.lines), len(references.lines)
    if n == m:
        return
    shorter = min(n, m)
    longer = hypotheses if n > m else references
    known_sizes = name_sizes()
    if n in known_sizes and m in known_sizes:
        remedy = (
            f"{n:,} is the size of {known_sizes[n]}, {m:,} that of {known_sizes[m]}: score against "
            "the references of the test set that was translated"
        )
    elif not any(line.strip() for line in longer.lines[shorter:]):
        remedy = f"the last lines of {longer.name} are empty: remove them if nothing belongs there"
    else:
        remedy = "give one line for each source sentence on both sides, separated only by \\n"
    yield Problem(
        True,
        f"{hypotheses.name}:{shorter + 1}: {n:,} translations cannot be scored against {m:,} "
        f"references of {references.name}; {remedy}",
    )


# ---- what other tools leave behind ----------------------------------------------------------------------------------


def _check_traces(hypotheses: Text, references: Text) -> Iterator[Problem]:
    for trace in TRACES:
        yield from _check_trace(trace, hypotheses, references, is_hypotheses=True)
        yield from _check_trace(trace, references, hypotheses, is_hypotheses=False)


def _check_trace(trace: Trace, text: Text, other: Text, is_hypotheses: bool) -> Iterator[Problem]:
    marked = trace.find_lines(text)
    unmatched = trace.find_unmatched(marked, other)
    is_systematic = trace.is_systematic(text, marked)
    what, remedy = trace.what, trace.remedy
    report = partial(_report, text, pattern=trace.pattern)
    if not trace.is_one_sided:
        if is_systematic:
            yield report(marked, what, remedy, is_fatal=True)
        elif unmatched:
            yield report(unmatched, what, remedy)
    elif is_systematic and len(unmatched) >= MIN_SHARE_OF_POSSIBLE * len(marked):
        yield report(marked, f"{what}, unlike {other.name}", remedy, is_fatal=True)
    elif is_systematic and is_hypotheses:
        remedy += " on both sides; as it is, the score is not comparable with others"
        yield report(marked, f"{what}, in {other.name} as well", remedy)
    elif len(unmatched) >= MIN_SHARE * len(text.lines):
        yield report(unmatched, f"{what}, unlike the same lines of {other.name}", remedy)


# ---- what may be genuine --------------------------------------------------------------------------------------------


def _check_empty_lines(hypotheses: Text, references: Text) -> Iterator[Problem]:
    for text, what, cause in (
        (hypotheses, "empty translations", "a weak model (decoding.min_length=1 avoids them)"),
        (references, "empty references", "a damaged file"),
    ):
        lines = [i for i, line in enumerate(text.lines) if not line.strip()]
        if lines:
            yield _report(
                text, lines, what, f"each is scored as an empty line; the cause may be {cause}"
            )


def _check_characters(text: Text, other: Text) -> Iterator[Problem]:
    for trace in (CARRIAGE_RETURN, REPLACEMENT, BYTE_ORDER_MARK):
        lines = trace.find_lines(text)
        if trace is REPLACEMENT:
            # A text may be about U+FFFD, but then its translation contains it too.
            lines = trace.find_unmatched(lines, other)
        if lines:
            remedy = OF_MODEL if text.is_of_model else trace.remedy
            yield _report(text, lines, trace.what, remedy, trace.pattern)


def _check_unknown_pieces(hypotheses: Text) -> Iterator[Problem]:
    lines = _find_lines(UNKNOWN, hypotheses)
    share = len(lines) / len(hypotheses.lines)
    if share >= MIN_SHARE:
        what = f"unknown pieces ({share:.1%} of the lines)"
        remedy = "check that the vocabulary is the one that the model was trained with"
        yield _report(hypotheses, lines, what, remedy, UNKNOWN)


def check_letters(text: Text, other: Text) -> Iterator[Problem]:
    """Report letters of a kind that `text` has lost: `other`, which has as many lines at most, has them."""
    if not any(line.strip() for line in text.lines):
        return
    for fold, missing, share, n_least in FOLDS:
        n_left = sum(line != fold(line) for line in text.lines)  # foreign names may keep theirs
        cased = [i for i, line in enumerate(other.lines) if line != fold(line)]
        is_lost = len(cased) >= max(share * len(other.lines), 20 * n_left)
        if is_lost and len(text.lines) >= n_least:
            what = f"hardly any {missing} letters, but {other.name} has some"
            remedy = "restore them, or change both sides in the same way before scoring"
            yield _report(text, cased, what, remedy)


def _check_script(hypotheses: Text) -> Iterator[Problem]:
    language = hypotheses.language[:2].lower()
    if language in UNSPACED:
        yield Problem(
            False,
            f"{hypotheses.name}: {UNSPACED[language]} has no spaces between words, so word-level BLEU "
            "means little; use chrF2, or sacreBLEU with a tokenizer for the language",
        )


def _check_copies(hypotheses: Text, references: Text, sources: Text) -> Iterator[Problem]:
    copied = []
    lines = zip(hypotheses.lines, references.lines, sources.lines, strict=True)
    for i, texts in enumerate(lines):
        hypothesis, reference, source = map(str.strip, texts)
        if hypothesis == source and source not in ("", reference):
            copied.append(i)
    if len(copied) >= MAX_COPIED * len(hypotheses.lines):
        what = f"a copy of the source sentence in {sources.name}"
        remedy = "check the file, and that the model was trained on pairs in two languages"
        yield _report(hypotheses, copied, what, remedy)


def warn_of_unrelated(name: str, lines: Sequence[str], other: str, others: Sequence[str]) -> None:
    """Say so if the lines of two texts have lengths like those of unrelated lines."""
    pairs = zip(lines, others, strict=False)  # none where a text is not given
    if look_unrelated([(len(line), len(its_other)) for line, its_other in pairs]):
        say(
            f"warning: {name} and {other} do not look like translations of each other: the lengths "
            "of their lines do not match; line n of one must be the translation of line n of the other"
        )


def warn_of_traces(name: str, lines: Sequence[str]) -> None:
    """Say what other tools have left in text to be trained on or translated."""
    text = Text(name, lines, "")
    for trace in TRACES:
        marked = trace.find_lines(text)
        # a tag of one's own looks like a mark
        if trace is not FOREIGN_MARKS and trace.is_systematic(text, marked):
            say(
                f"warning: {_report(text, marked, trace.what, trace.remedy, trace.pattern).message}"
            )


def look_unrelated(lengths: ArrayLike) -> bool:
    """Whether pairs have such lengths, a row for each pair, as unrelated lines."""
    logs = np.log1p(lengths)
    is_varied = len(logs) >= MIN_LINES and logs.std(0).min() >= MIN_SPREAD
    return is_varied and np.corrcoef(logs.T)[0, 1] < ALIGNED


# ---- messages -------------------------------------------------------------------------------------------------------


def _find_lines(pattern: re.Pattern[str], text: Text) -> list[int]:
    return [i for i, line in enumerate(text.lines) if pattern.search(line)]


def _report(
    text: Text,
    lines: list[int],
    what: str,
    remedy: str,
    pattern: re.Pattern[str] | None = None,
    is_fatal: bool = False,
) -> Problem:
    first = lines[0]
    quote = _quote(text.lines[first], pattern)
    return Problem(
        is_fatal,
        f"{text.name}:{first + 1}: {what}: {quote}, in {len(lines):,} of {len(text.lines):,} lines; {remedy}",
    )


def _quote(line: str, pattern: re.Pattern[str] | None) -> str:
    """Quote forty characters around the first match, in ASCII for any terminal."""
    match = pattern.search(line) if pattern else None
    begin = max(0, match.start() - 15) if match else 0
    end = begin + 40
    before = "..." if begin > 0 else ""
    after = "..." if end < len(line) else ""
    return before + ascii(line[begin:end]) + after
