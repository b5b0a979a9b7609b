"""The Moses tokens behind the paper's score, in pure Python: what its Perl scripts of 2017 print,
line for line.

`replace_unicode_punctuation` is one script and `make_tokenizer` another; nmt/score/metrics.py says
which of them a metric applies to which side. This is not sacremoses, because its version 0.2.0
differs from those scripts outside European text: it splits Chinese and letters beyond the BMP,
keeps an Indic virama, and reads a full-width 1 as a 1 where the script made it a quote. Its lists
of abbreviations for German and French are the scripts' own, and are used here.
tests/score/test_moses.py compares 16,000 lines with Perl's output.
"""

import re
from collections.abc import Callable
from importlib.metadata import version

import regex  # for Perl's classes of characters, which `re` does not know

ABBREVIATIONS = f"sacremoses-{version('sacremoses')}"  # where the lists come from, for signatures

# replace-unicode-punctuation.perl, before its correction of 2019: a full-width 1 became a quote.
PUNCTUATION = str.maketrans(
    dict(
        zip(
            "，、”“∶：？《》！（；１」「０３２５６９７８４）～’━〈〉【】％…",
            [*',,""::?""!(;"""032569784)~\'-<>[]%', "..."],
            strict=True,
        )
    )
)
FULL_STOP = re.compile("[。．] *")  # becomes a dot and one space
CONTROL = re.compile(r"[\0-\x08\x0e-\x1f]")  # control characters, except white space
HYPHEN = regex.compile(r"(\p{Alnum})-(?=\p{Alnum})")
SYMBOL = regex.compile(r"([^\p{Alnum} .'`,\-])")
DOT_RUNS = re.compile(r"\.{2,}")
# Groups instead of lookaround, because Perl does not look again at what a match consumed: in a,,5
# the second comma stays with the 5.
COMMAS = [
    (regex.compile(r"(\P{N}),"), r"\1 , "),
    (regex.compile(r",(\P{N})"), r" , \1"),
    (regex.compile(r"(\p{N}),$"), r"\1 ,"),
]
# Where an apostrophe belongs: to the word on its left (l' eau) or on its right (do n't); elsewhere
# it is a word.
APOSTROPHE_LEFT = (
    (r"(\P{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\P{Alpha})'(\p{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\p{Alpha})", r"\1' \2"),
)
APOSTROPHE_RIGHT = (
    (r"(\P{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"([^\p{Alpha}\p{N}])'(\p{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\p{Alpha})", r"\1 '\2"),
    (r"(\p{N})'(s)", r"\1 '\2"),
)
APOSTROPHES = {
    "en": APOSTROPHE_RIGHT,
    "fr": APOSTROPHE_LEFT,
    "it": APOSTROPHE_LEFT,
    "ga": APOSTROPHE_LEFT,
}
LETTER = regex.compile(r"\p{Alpha}")
ESCAPES = str.maketrans(
    {
        "&": "&amp;",
        "|": "&#124;",
        "<": "&lt;",
        ">": "&gt;",
        "'": "&apos;",
        '"': "&quot;",
        "[": "&#91;",
        "]": "&#93;",
    }
)
COMPOUND = re.compile(rb"(\S)-(\S)")
QUOTES = str.maketrans(dict.fromkeys("„“”‟«»", '"'))


def replace_unicode_punctuation(line: str) -> str:
    """Do what replace-unicode-punctuation.perl does, which knows no language.

    It leaves the low quote and guillemets alone.
    """
    return FULL_STOP.sub(". ", line).translate(PUNCTUATION)


def make_tokenizer(language: str, is_aggressive: bool = False) -> Callable[[str], str]:
    """Return tokenizer.perl -l LANGUAGE, with its escaping, for a single line.

    If `is_aggressive`, return it with -a, which also splits at hyphens inside words: `Est @-@ Ouest`.
    The line has no line feed. A line of white space alone is returned unchanged, as Perl does.
    """
    is_abbreviation = _make_abbreviation_test(language)
    rules = APOSTROPHES.get(language, ())
    apostrophes = [(regex.compile(pattern), spaced) for pattern, spaced in rules]

    def separate_final_dots(words: list[str]) -> str:
        followers = [*words[1:], ""]
        for i, (word, follower) in enumerate(zip(words, followers, strict=True)):
            if word[-1] == "." and len(word) > 1 and not is_abbreviation(word[:-1], follower):
                words[i] = word[:-1] + " ."
        return " ".join(words)

    def tokenize(line: str) -> str:
        text = " ".join(CONTROL.sub("", line).split())
        if not text:
            return "" if CONTROL.search(line) else line
        text = SYMBOL.sub(r" \1 ", text)
        if is_aggressive:
            text = HYPHEN.sub(r"\1 @-@ ", text)
        # Runs of dots become \0, which CONTROL has left nowhere else, until all other dots are
        # done.
        text = DOT_RUNS.sub(lambda run: " " + "\0" * len(run[0]) + " ", text)
        for pattern, spaced in COMMAS:
            text = pattern.sub(spaced, text)
        for pattern, spaced in apostrophes:
            text = pattern.sub(spaced, text)
        if not apostrophes:
            text = text.replace("'", " ' ")
        text = separate_final_dots(text.split())
        if text.endswith(".'"):
            text = text[:-2] + " . ' "
        return text.replace("\0", ".").translate(ESCAPES)

    return tokenize


def _make_abbreviation_test(language: str) -> Callable[[str, str], bool]:
    """Return a test of whether the final dot of a word belongs to it, given the word without it and
    the next word.
    """
    from sacremoses.corpus import NonbreakingPrefixes

    always, before_digits = set(), set()
    for entry in NonbreakingPrefixes().words(language):
        prefix, is_numeric, _ = entry.partition(" #NUMERIC_ONLY#")
        if is_numeric:
            before_digits.add(prefix)
        else:
            always.add(prefix)

    def is_abbreviation(word: str, follower: str) -> bool:
        if "." in word and LETTER.search(word):  # z.B.
            return True
        if word in always or follower[:1].islower():  # a lower-case word goes on with the sentence
            return True
        return word in before_digits and follower[:1] in tuple("0123456789")

    return is_abbreviation


def split_compounds(tokens: str) -> str:
    """Turn `rich-text` into `rich ##AT##-##AT## text`, by the rule of the authors'
    get_ende_bleu.sh.

    Its Perl reads bytes. So it splits only the first hyphen of A-B-C, because the match consumes
    the B, but both of A-Ü-C.
    """
    # Surrogates are kept, so that no text is refused for its encoding.
    data = tokens.encode(errors="surrogatepass")
    return COMPOUND.sub(rb"\1 ##AT##-##AT## \2", data).decode(errors="surrogatepass")


def make_quotes_plain(text: str) -> str:
    """Replace typographic double quotes, as was done to the copy of newstest2014's reference that
    Google released, before it was tokenised.

    What is known (M. Popel, tensor2tensor issue 317): all Unicode quotes became plain double ones,
    among them the low one, which replace-unicode-punctuation.perl leaves alone. Our reading is that
    guillemets did too, and that single quotes and apostrophes did not.
    """
    return text.translate(QUOTES)
