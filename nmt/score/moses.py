"""The Moses side of the paper's score, in pure Python: what its Perl scripts of 2017 print, line for line.

Written anew, because sacremoses 0.2.0 is not those scripts outside European text: it splits Chinese and letters beyond
the BMP, keeps an Indic virama, and reads a full-width 1 as a 1 where the script made a quote of it. Its abbreviations
of German and French are the scripts' own, and are used. tests/score/test_moses.py holds 16,000 lines against Perl's output.
"""

import re
from collections.abc import Callable
from importlib.metadata import version

import regex  # for Perl's classes of characters, which `re` does not know

LISTS = f"sacremoses-{version('sacremoses')}"  # of abbreviations, for signatures

# replace-unicode-punctuation.perl, before its correction of 2019: a full-width 1 became a quote.
PUNCTUATION = str.maketrans(
    dict(
        zip(
            "，、”“∶：？《》）！（；１」「０３２５６９７８４～’━〈〉【】％…。．",
            [*',,""::?"")!(;"""032569784~\'-<>[]%', "...", ". ", ". "],
            strict=True,
        )
    )
)
JUNK = re.compile(r"[\0-\x08\x0e-\x1f]")  # not the white space among them
SYMBOL = regex.compile(r"([^\p{Alnum} .'`,\-])")
DOTS = re.compile(r"\.{2,}")
# What a match takes is not looked at again (in a,,5 the second comma stays with the 5), hence groups, no lookaround.
COMMAS = [
    (regex.compile(pattern), spaced)
    for pattern, spaced in (
        (r"(\P{N}),", r"\1 , "),
        (r",(\P{N})", r" , \1"),
        (r"(\p{N}),$", r"\1 ,"),
    )
]
LEFT = (
    (r"(\P{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\P{Alpha})'(\p{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\p{Alpha})", r"\1' \2"),
)
RIGHT = (
    (r"(\P{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"([^\p{Alpha}\p{N}])'(\p{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\P{Alpha})", r"\1 ' \2"),
    (r"(\p{Alpha})'(\p{Alpha})", r"\1 '\2"),
    (r"(\p{N})'(s)", r"\1 '\2"),
)
APOSTROPHES = {
    "en": RIGHT,
    "fr": LEFT,
    "it": LEFT,
    "ga": LEFT,
}  # l' eau, do n't; else each stands alone
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


def tokenizer(language: str) -> Callable[[str], str]:
    """replace-unicode-punctuation.perl, then tokenizer.perl -l LANGUAGE (no -a, escaping), as a function of one line.

    The line comes without its line feed. Nothing but white space comes back as it is, from Perl as from here.
    """
    from sacremoses.corpus import NonbreakingPrefixes

    entries = [
        entry.partition(" #NUMERIC_ONLY#") for entry in NonbreakingPrefixes().words(language)
    ]
    always = {prefix for prefix, numeric, _ in entries if not numeric}
    before_digits = {prefix for prefix, numeric, _ in entries if numeric}
    apostrophes = [
        (regex.compile(pattern), spaced) for pattern, spaced in APOSTROPHES.get(language, ())
    ]

    def is_kept(word: str, following: str) -> bool:
        """Whether the final dot of `word` belongs to it: an abbreviation, or no end, as the next word is lower case."""
        prefix = word[:-1]
        return (
            "." in prefix
            and bool(LETTER.search(prefix))
            or prefix in always
            or following[:1].islower()
            or prefix in before_digits
            and following[:1] in tuple("0123456789")
        )

    def tokenize(line: str) -> str:
        line = line.translate(PUNCTUATION)
        text = " ".join(JUNK.sub("", line).split())
        if not text:
            return "" if JUNK.search(line) else line
        text = SYMBOL.sub(r" \1 ", text)
        text = DOTS.sub(
            lambda run: " " + "\0" * len(run[0]) + " ", text
        )  # dots again at the end; JUNK left no other
        for pattern, spaced in COMMAS:
            text = pattern.sub(spaced, text)
        for pattern, spaced in apostrophes:
            text = pattern.sub(spaced, text)
        if not apostrophes:
            text = text.replace("'", " ' ")
        words = text.split()
        for i, word in enumerate(words):
            if word[-1] == "." and len(word) > 1 and not is_kept(word, (words + [""])[i + 1]):
                words[i] = word[:-1] + " ."
        text = " ".join(words)
        if text.endswith(".'"):
            text = text[:-2] + " . ' "
        return text.replace("\0", ".").translate(ESCAPES)

    return tokenize


def split_compounds(tokens: str) -> str:
    """`rich-text` -> `rich ##AT##-##AT## text`, by the rule of the authors' get_ende_bleu.sh.

    Its Perl reads bytes, so of A-B-C only the first hyphen is split (the B is used up), but of A-Ü-C both are.
    """
    return COMPOUND.sub(rb"\1 ##AT##-##AT## \2", tokens.encode(errors="surrogatepass")).decode(
        errors="surrogatepass"
    )


def plain_quotes(text: str) -> str:
    """The change made to Google's newstest2014 reference before it was tokenised: double quotes of print become plain.

    Known (tensor2tensor issue 317): all Unicode quotes, the low one included, which replace-unicode-punctuation.perl
    leaves alone. Our reading: double quotes only, guillemets among them. Of single ones nothing is known but that the
    script makes the apostrophe of U+2019, with or without this change.
    """
    return text.translate(QUOTES)
