"""What is wrong with text that is about to be scored, told before a number is made of it.

A scorer counts whatever it is given: pieces of BPE, `&quot;`, half of a test set, and calls the result BLEU. Fatal is
what makes the number wrong for certain; a warning is what may be genuine. Both sides are looked at, line beside line,
because real text holds entities, code and English terms too, but then in the reference as well. Pure functions of
lists of lines: nothing is read, changed or printed here.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# One line in a hundred moves a score by less than the tenth part of its interval; a whole file that was left in pieces
# or escaped shows it in far more. So one odd line of 3,003 is no reason to refuse, one of two is.
SHARE = 0.01
# Of the lines with a comma or a full stop (a quote, an ampersand), so many have it the odd way when a tool did it:
# nearly all. Real text: at most one in a hundred.
MOST = 0.5
# So many lines may be copied or in another language by nature: names, code, untranslated titles.
MANY = 0.05

SIZES = {
    3003: "newstest2014 in full (sacreBLEU's wmt14/full)",
    2737: "sacreBLEU's filtered wmt14",
    3000: "newstest2013",
}

FEW = 30  # lines
UNSPACED = {"ja": "Japanese", "th": "Thai", "zh": "Chinese"}
LANGUAGES = {
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "sv": "Swedish",
}
FREQUENT = {
    "cs": "a je se na v že s z do o to i jako pro po za ale by si jsou byl který jeho",
    "de": "der die das und ist ein eine einen einem einer mit auf für von zu den dem des im nicht sich sie es auch "
    "wird werden oder kann wenn er ich wir wie aus bei als nach sind haben hat vor",
    "en": "the of and to is that it for with are this by from be you not or have they he she his her their which can "
    "a an i we if on at has were when will your there been",
    "es": "el la los las y en un una por con para que de no es se del su como más pero al lo",
    "fr": "le la les des et est un une dans pour que qui sur avec du au aux en ne pas par ce cette il elle ou sont "
    "de l d qu vous nous être leur ses",
    "it": "il lo la gli di che e un una per con non è del della i si sono le da nel alla anche più",
    "nl": "de het een en van is dat niet met op voor zijn te aan er ook bij naar wordt ik hij door maar",
    "pl": "i w na z nie się to jest do że o jak po dla ale od przez który są może",
    "pt": "o os as de que e um uma para com não é do da no na em por se mais mas ao como",
    "ru": "и в не на что с по как это из для к от но он она его за же был бы",
    "sv": "och att det som en är av för på med till inte ett den jag de har om var men vi",
}
SPOKEN = {
    word: [language for language, words in FREQUENT.items() if word in words.split()]
    for word in " ".join(FREQUENT.values()).split()
}
WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Text:
    name: str  # for messages: a file or a test set
    lines: Sequence[str]
    language: str


@dataclass(frozen=True)
class Finding:
    is_fatal: bool
    told: str  # one line: where first, what, how often, and the remedy


@dataclass(frozen=True)
class Mark:
    """What another tool leaves in a line, and how the same place looks untouched (None: not to be known)."""

    what: str
    left: re.Pattern[str]
    untouched: re.Pattern[str] | None
    remedy: str

    def lines(self, text: Text) -> list[int]:
        return [i for i, line in enumerate(text.lines) if self.left.search(line)]

    def is_all_over(self, text: Text, marked: list[int]) -> bool:
        """In more than odd lines, and in most of those that could have it."""
        if len(marked) < SHARE * len(text.lines) or not marked:
            return False
        if self.untouched is None:
            return True
        known = set(marked)
        whole = sum(
            bool(self.untouched.search(line)) for i, line in enumerate(text.lines) if i not in known
        )
        return len(marked) >= MOST * (len(marked) + whole)


# Wrong on whichever side: no one scores pieces, and these two never stand in text that somebody wrote.
PIECES = Mark(
    "BPE was left in",
    re.compile(r"\S@@(?= |$)|\u2581"),
    None,
    "join the pieces first (sed -E 's/@@( |$)//g', or SentencePiece's decoding)",
)
SPLIT = Mark(
    "compounds are split already",
    re.compile(r"##AT##|(?<=\S) @(?:-|/|&#45;)@ (?=\S)"),
    None,
    "the paper's BLEU splits them itself and would split twice: give detokenised text (sacremoses detokenize; "
    "sed 's/ ##AT##-##AT## /-/g; s/ @-@ /-/g')",
)
# Wrong where one side alone has it. A French line has its spaces before ? ! : ; by right, so those do not count; and
# ` .` counts at the end alone, since ` .NET` and ` ...` are words.
ESCAPED = Mark(
    "entities of Moses or HTML",
    re.compile(r"&(?:quot|apos|amp|lt|gt|bar|bra|ket|#[0-9]{2,5}|#x[0-9a-f]+);"),
    re.compile(r"[\"'&|<>\[\]]"),
    "unescape them (sacremoses detokenize, or html.unescape)",
)
TOKENISED = Mark(
    "spaces before commas and full stops, as a tokenizer leaves them",
    re.compile(r"\S \.(?: ?(?:[\"'»“”]|&quot;|&apos;))*\s*$|\S ,(?= |$)"),
    re.compile(r"[^\s.]\.[\"'»“”]*\s*$|[^\s,],(?= |$)"),
    "detokenise it (sacremoses detokenize)",
)
UNKNOWN = re.compile(r"<unk>|\u2047|(?:^| )UNK(?= |$)")
ODD_CHARACTERS = (
    (
        re.compile("\r"),
        "a carriage return",
        "convert the file with dos2unix; lines end with \\n alone",
    ),
    (
        re.compile("\ufffd"),
        "the replacement character U+FFFD",
        "it was decoded with the wrong encoding; make it UTF-8",
    ),
    (re.compile("\ufeff"), "a byte order mark", "save the file as UTF-8 without one"),
)


def findings(hypotheses: Text, references: Text, sources: Text | None = None) -> list[Finding]:
    """All that is odd about scoring `hypotheses` against `references`, what is fatal first."""
    if impossible := list(nothing(hypotheses, references)) or list(unequal(hypotheses, references)):
        return impossible
    found = [
        *empty(
            hypotheses, "translations", ", or does a weak model prefer them (decoding.min_length=1)"
        ),
        *empty(references, "references", ""),
        *on_either_side(PIECES, hypotheses, references),
        *on_either_side(SPLIT, hypotheses, references),
        *on_one_side(ESCAPED, hypotheses, references),
        *on_one_side(TOKENISED, hypotheses, references),
        *odd_characters(hypotheses, references),
        *odd_characters(references, hypotheses),
        *other_language(references, None),
        *other_language(hypotheses, references),
        *unknown_pieces(hypotheses),
        *lower_cased(hypotheses, references),
        *same(hypotheses, references),
        *shifted(hypotheses, references),
    ]
    found += few(hypotheses)
    if sources is not None:
        found += copied(hypotheses, references, sources)
    return sorted(found, key=lambda finding: not finding.is_fatal)


def nothing(hypotheses: Text, references: Text) -> Iterator[Finding]:
    """No lines, or no reference at all. Translations that are all empty are worth their 0: a model at its beginning."""
    for text, is_empty in (
        (hypotheses, not hypotheses.lines),
        (references, not any(map(str.strip, references.lines))),
    ):
        if is_empty:
            seen = "only empty lines" if text.lines else "no lines"
            yield Finding(
                True,
                f"{text.name}:1: nothing to score: {seen} ({len(text.lines):,}); give one line of text "
                "for each source sentence",
            )


def unequal(hypotheses: Text, references: Text) -> Iterator[Finding]:
    n, m = len(hypotheses.lines), len(references.lines)
    if n == m:
        return
    longer = hypotheses if n > m else references
    if n in SIZES and m in SIZES:
        remedy = (
            f"{n:,} is the size of {SIZES[n]}, {m:,} that of {SIZES[m]}: score against the references of the "
            f"test set that was translated{', wmt14/full for 3,003 lines' if n == 3003 else ''}"
        )
    elif not any(line.strip() for line in longer.lines[min(n, m) :]):
        remedy = f"the last of {longer.name} are empty: remove them if nothing belongs there"
    else:
        remedy = "line for line they must belong together: give one for each source sentence, cut at \\n alone"
    yield Finding(
        True,
        f"{hypotheses.name}:{min(n, m) + 1}: {n:,} translations cannot be scored against {m:,} "
        f"references of {references.name}; {remedy}",
    )


def few(hypotheses: Text) -> Iterator[Finding]:
    if len(hypotheses.lines) < FEW:
        yield Finding(
            False,
            f"{hypotheses.name}: {len(hypotheses.lines)} lines are too few for an interval or a p to "
            "mean anything; score more",
        )
    if (language := hypotheses.language[:2].lower()) in UNSPACED:
        yield Finding(
            False,
            f"{hypotheses.name}: {UNSPACED[language]} has no spaces between words, which BLEU counts "
            "here; take chrF2, or sacreBLEU with a tokeniser for it",
        )


def empty(text: Text, noun: str, why: str) -> Iterator[Finding]:
    if lines := [i for i, line in enumerate(text.lines) if not line.strip()]:
        yield warning(
            text, lines, f"empty {noun}", f"they count as they are; were they lost on the way{why}?"
        )


def on_either_side(mark: Mark, hypotheses: Text, references: Text) -> Iterator[Finding]:
    for text, other in ((hypotheses, references), (references, hypotheses)):
        marked = mark.lines(text)
        if mark.is_all_over(text, marked):
            yield Finding(True, told(text, marked, mark.what, mark.remedy, mark.left))
        elif odd := sorted(set(marked) - set(mark.lines(other))):
            yield warning(text, odd, mark.what, mark.remedy, mark.left)


def on_one_side(mark: Mark, hypotheses: Text, references: Text) -> Iterator[Finding]:
    for text, other in ((hypotheses, references), (references, hypotheses)):
        marked = mark.lines(text)
        odd = sorted(set(marked) - set(mark.lines(other)))
        is_all_over = mark.is_all_over(text, marked)
        if is_all_over and len(odd) >= MOST * len(marked):
            yield Finding(
                True,
                told(
                    text, marked, f"{mark.what}, which {other.name} has not", mark.remedy, mark.left
                ),
            )
        elif is_all_over and text is hypotheses:
            yield warning(
                text,
                marked,
                f"{mark.what}, in {other.name} as well",
                f"{mark.remedy} on both sides, or compare the score with nobody's",
                mark.left,
            )
        elif len(odd) >= SHARE * len(text.lines):
            yield warning(
                text, odd, f"{mark.what}, which {other.name} has not there", mark.remedy, mark.left
            )


def odd_characters(text: Text, other: Text) -> Iterator[Finding]:
    for (
        pattern,
        what,
        remedy,
    ) in ODD_CHARACTERS:  # a manual may speak of U+FFFD, and its translation then does too
        if lines := [
            i
            for i, (line, beside) in enumerate(zip(text.lines, other.lines, strict=True))
            if pattern.search(line) and not (pattern.search(beside) and pattern.pattern == "\ufffd")
        ]:
            yield warning(text, lines, what, remedy, pattern)


def unknown_pieces(hypotheses: Text) -> Iterator[Finding]:
    lines = [i for i, line in enumerate(hypotheses.lines) if UNKNOWN.search(line)]
    if lines and len(lines) >= SHARE * len(hypotheses.lines):
        yield warning(
            hypotheses,
            lines,
            f"unknown pieces ({len(lines) / len(hypotheses.lines):.1%} of the lines)",
            "is the vocabulary the one that the model was trained with?",
            UNKNOWN,
        )


def other_language(text: Text, references: Text | None) -> Iterator[Finding]:
    """Text as a whole, or many of its lines where the references' are not, with another language's frequent words."""
    own, counts = text.language[:2].lower(), [spoken(line) for line in text.lines]
    lines = {i: other for i, count in enumerate(counts) if (other := foreign(count, own))}
    if whole := foreign(sum(counts, Counter()), own):
        lines = dict.fromkeys(
            lines or [next(i for i, count in enumerate(counts) if count[whole])], whole
        )
    else:
        if references is not None:
            lines = {
                i: other
                for i, other in lines.items()
                if not foreign(spoken(references.lines[i]), own)
            }
        if len(lines) < MANY * len(text.lines) or not lines:
            return
    other = Counter(lines.values()).most_common(1)[0][0]
    looks = f"looks like {LANGUAGES[other]}, not {LANGUAGES.get(own, text.language)}"
    yield warning(
        text,
        [i for i in lines if lines[i] == other],
        f"all in all {looks}" if whole else looks,
        "is it the right file, side and language pair?",
    )


def spoken(line: str) -> Counter[str]:
    """For each language, how many words of the line are among its most frequent."""
    return Counter(
        language for word in WORD.findall(line.lower()) for language in SPOKEN.get(word, ())
    )


def foreign(count: Counter[str], own: str) -> str | None:
    """The language that has three frequent words and three times as many as the text's own."""
    if not count:
        return None
    other, n = count.most_common(1)[0]
    return other if other != own and n >= 3 and n >= 3 * count[own] else None


def lower_cased(hypotheses: Text, references: Text) -> Iterator[Finding]:
    if any(map(str.strip, hypotheses.lines)) and not any(
        line != line.lower() for line in hypotheses.lines
    ):
        if lines := [i for i, line in enumerate(references.lines) if line != line.lower()]:
            if len(lines) >= MOST * len(references.lines):
                yield warning(
                    hypotheses,
                    lines,
                    f"no upper-case letter at all, {references.name} has them",
                    "score with lower case on both sides, or restore the case",
                )


def same(hypotheses: Text, references: Text) -> Iterator[Finding]:
    lines = [
        i
        for i, (a, b) in enumerate(zip(hypotheses.lines, references.lines, strict=True))
        if a.strip() == b.strip()
    ]
    if len(lines) >= (1 - SHARE) * len(references.lines):
        yield warning(
            hypotheses,
            lines,
            f"equal to {references.name}: the score is 100 or next to it",
            "is this the reference itself?",
        )


def copied(hypotheses: Text, references: Text, sources: Text) -> Iterator[Finding]:
    if len(sources.lines) != len(hypotheses.lines):
        yield Finding(
            False,
            f"{sources.name}:1: {len(sources.lines):,} source sentences for {len(hypotheses.lines):,} "
            "translations; are they of one test set?",
        )
        return
    lines = [
        i
        for i, (line, source, reference) in enumerate(
            zip(hypotheses.lines, sources.lines, references.lines, strict=True)
        )
        if line.strip() and line.strip() == source.strip() != reference.strip()
    ]
    if lines and len(lines) >= MANY * len(sources.lines):
        yield warning(
            hypotheses,
            lines,
            f"the source sentence of {sources.name}, untranslated",
            "is it the right file, and was the model trained on pairs in two languages?",
        )


def shifted(hypotheses: Text, references: Text) -> Iterator[Finding]:
    """Long sentences have long translations: where they do a few lines further on, lines were lost or doubled."""
    ours, theirs = (
        [len(line) for line in text.lines[:10_000]] for text in (hypotheses, references)
    )
    n = len(ours)
    if n < 20:  # fewer lines fit by chance
        return
    fits = {
        by: correlation(ours[max(by, 0) : n + min(by, 0)], theirs[max(-by, 0) : n - max(by, 0)])
        for by in range(-3, 4)
    }
    best = max(fits, key=lambda by: fits[by])
    # Chance moves a correlation by about 1 / sqrt(n); neighbouring lines may be alike, as where a corpus was sorted.
    if fits[best] > fits[0] + max(0.1, 1.5 / math.sqrt(n)) and fits[best] > 0.5:
        lines = "1 line" if abs(best) == 1 else f"{abs(best)} lines"
        what = f"lengths fit {references.name} {lines} {'earlier' if best > 0 else 'later'}"
        remedy = "was a line lost or doubled?"
    elif n >= 100 and fits[0] < 0.2:  # real translations: above 0.7
        what, remedy = (
            f"lengths do not fit {references.name}",
            "are they in another order, or of another test set?",
        )
    else:
        return
    yield Finding(
        False,
        f"{hypotheses.name}:1: the translations' {what} (correlation {fits[best]:.2f}, as they stand "
        f"{fits[0]:.2f}) in {n:,} lines; {remedy}",
    )


def correlation(xs: Sequence[int], ys: Sequence[int]) -> float:
    try:
        return statistics.correlation(xs, ys)
    except statistics.StatisticsError:  # all of one length
        return 1.0


def warning(
    text: Text, lines: list[int], what: str, remedy: str, pattern: re.Pattern[str] | None = None
) -> Finding:
    return Finding(False, told(text, lines, what, remedy, pattern))


def told(
    text: Text, lines: list[int], what: str, remedy: str, pattern: re.Pattern[str] | None = None
) -> str:
    return (
        f"{text.name}:{lines[0] + 1}: {what}: {quoted(text.lines[lines[0]], pattern)}, in {len(lines):,} of "
        f"{len(text.lines):,} lines; {remedy}"
    )


def quoted(line: str, pattern: re.Pattern[str] | None) -> str:
    """Forty characters around what was found, for any terminal."""
    found = pattern.search(line) if pattern else None
    begin = max(0, found.start() - 15) if found else 0
    piece = line[begin : begin + 40]
    return "..." * (begin > 0) + ascii(piece) + "..." * (begin + 40 < len(line))
