"""Lines that are hard to tokenise, and damaged copies of lines: the inputs of the golden files, made instead of stored.

They are the same on every machine and every Python: all draws are `Random.random`, whose sequence Python keeps, and no
character is so new that the tables of Perl and ours could differ on it. tests/golden has the digests. The real lines
that are used beside them lie outside the project and are only read.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

WORDS = {
    "de": "Haus Straße über grün läuft und der Älteste schön Öl weiß Ärger ÜBUNG Fußball z ja kommt Jahr Uhr heute "
    "Müller Berlin ein daß Größe nicht Änderung EU ist im dieser Preis Ware läßt Bücher oder würde".split(),
    "fr": "maison été où garçon Noël œuvre l'eau d'été qu'il aujourd'hui jusqu'à C'est à Événement Île français et "
    "ÉTAT deux petit n'a s'y rue année âge là élève ce presqu'île grand DU cœur jour plutôt façon".split(),
}
SHORT = {
    "de": (
        "Dr Prof Nr Hr Fr z.B d.h bzw usw ca vgl Abs Art Bd Jan Dez Mio 1 3 24 St u.a i.V A x Str Tel "
        "II 12.30"
    ).split(),
    "fr": "M Mme Dr av boul cf p.ex c.-à-d art ann etc N.B no Nos A b J.-C vol pp chap réf tél B.P 2 17 IV Sté".split(),
}
QUOTES = (
    "„“ “” “„ ”” «» »« ‹› ‚‘ ‘’ ’’ ‛’ \"\" '' `` `´ ``'' 「」 《》 〈〉 【】 ″″ ＂＂ ＇＇ 〝〞 ‟”".split()
    + ["« ", '" ']
)
DASHES = "- -- --- – — ― ‐ ‑ ‒ − ━ ﹣ － ~ ～ · / \\ _ + = × & @ # * ^".split()
NUMBERS = (
    "1.000,50 1,234.5 3, ,5 5. .5 15.30 1/2 ½ 2² 10% ％ １２３ ０,５ ٣٤ Ⅳ ⅳ 一,二 〇 1'000 90's '68 5,a a,5 "
    "5,,6 ,,5 7,,, 1,2,3 1.2.3. 3. -5 +49-30 1e-9 0x1F 1:0 20-30 5°C №5 3ª ② Ⅳ,5 3,〇"
).split()
LINKS = (
    "http://a.b/c?d=e&f=g#h https://www.x-y.de/ü_1.html www.example.org/~me/ ftp://h:21 mailto:a.b-c+d@e-f.fr "
    "jean.dupont@exemple.fr @name #tag C:\\dir\\f.txt /usr/lib a.b.c d.E x@y file.tar.gz"
).split()
ENTITIES = (
    "&amp; &quot; &apos; &lt;b&gt; &#124; &#91; &nbsp; &amp;amp; & && <br/> <b> </i> @-@ @@".split()
    + ["##AT##-##AT##", '<a href="x">']
)
BRACKETS = (
    "[ ] ( ) { } < > | || [1] (a) {x|y} <c (s.o.) [...] (?) )( ]] ¿ ¡ ;-) :( §5 § ¶ • † ‡ ¦".split()
)
ELLIPSES = "... … .. .... ..... .…. ?.. ..! ..., ,... x..y ...' '... . .. ....... .,. .'. .-. (..) ..\"".split()
SPACES = [
    "\0",
    "\1",
    "\t",
    "\v",
    "\f",
    "\r",
    "\x1b",
    "\x1c",
    "\x1d",
    "\x1e",
    "\x1f",
    "\x7f",
    "\x85",
    "\xa0",
    "\xad",
    "\u1680",
    "\u180e",
    "\u2002",
    "\u2009",
    "\u200b",
    "\u200c",
    "\u200d",
    "\u200e",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\u2060",
    "\u3000",
    "\ufeff",
    "\ufffd",
    "  ",
    "    ",
]
LETTERS = [
    "e\u0301",
    "a\u0308",
    "n\u0303\u0323",
    "\u0301",
    "हिन्दी",
    "क्षि",
    "ไทย",
    "שָׁלוֹם",
    "مَرْحَبًا",
    "Ελλάδα",
    "Привет",
    "ß",
    "ẞ",
    "ǅ",
    "ﬁ",
    "ª",
    "º",
    "ⓐ",
    "Ⓑ",
    "İ",
    "ı",
    "ſ",
    "ʼ",
    "ʻokina",
    "\U0001d504",
    "\U00010400",
    "\U00010428",
    "\U00020000",
]
MONEY = "€5 $3.50 £1,000 ¥ 5€ 5,-€ ₹ ¢ US$ ₤ 3.50$. ¤".split()
ASIA = "漢字、かな 。カナ，名 한국어！ ？ ： ； （） ～ 中国。 、 ・ １ ９％ ．5 日本．x ∶ ﹐ ｡ 東京－大阪 ー".split()
SIGNS = [
    "😀",
    "❤\ufe0f",
    "☃",
    "™",
    "©",
    "®",
    "°",
    "µ",
    "→",
    "√2",
    "👨\u200d👩",
    "🇩🇪",
    "♪",
    "★",
    "\ue000",
    "´",
    "¨",
    "ˆ",
    "¸",
]
HYPHENS = [
    "{}-{}",
    "{}-{}-{}",
    "-{}",
    "{}-",
    "{}--{}",
    "{} - {}",
    "{}- {}",
    "{} -{}",
    "a-{}-ü-b",
    "ü-é-à",
    "{}-{}-",
    "-",
    "5-{}",
    "--{}",
    "É-Ü-{}",
    "A-B-C-D",
    "{}-'{}'",
    "{}-漢-{}",
    "{}.-{}",
    "{}/-{}",
]
APOSTROPHES = [
    "{}'{}",
    "{}’{}",
    "'{}'",
    "''{}''",
    "{}'",
    "'{}",
    "{}''{}",
    "rock'n'{}",
    "{}'s",
    "{} ' {}",
    "'{}'{}'",
    "l’{}",
    "{}`{}",
    "{}´{}",
    "'",
    "''",
    "{}'.",
    "{}.'",
    "5'{}",
    "{}'5",
    "({}')",
    "d''{}",
    "'-{}",
    "{}‘{}",
    "{}','{}'",
]
ENDS = [
    ".",
    ".",
    ".",
    "!",
    "?",
    "",
    ".'",
    '."',
    ".”",
    ".“",
    ".)",
    "...",
    "…",
    ".»",
    " .",
    ",",
    "5,",
    "5.",
    ". ",
    ".’",
    "。",
    "．",
    ":",
    ".]",
    "?!",
    ".-",
    "..",
    " ...",
    "'.",
    '".',
    "z.B.",
    "A.",
    "'",
    " '",
    "%.",
    ".\xa0",
    ".,",
    ",.",
    ".'\"",
    ".|",
]
NEARLY_EMPTY = [
    "",
    " ",
    "   ",
    "\xa0",
    "\t",
    "\x1c",
    "\x1f ",
    "\u3000",
    "-",
    ".",
    "..",
    "'",
    "''",
    ",",
    '"',
    "。",
    "…",
    "A.",
    "a.'",
    "\0",
    "\ufeff",
    ".'",
    "&",
    "\u2028",
    "1,",
    ",1",
    "\x85 ",
]
REAL = {
    "de": ("news-en-de/newstest2013.de", "news-en-de/newstest2012.de"),
    "fr": ("news-en-fr/newstest2013.fr", "multi30k/test.fr"),
}


def real_lines(data: Path, language: str, n: int) -> list[str]:
    """The first n lines of the real text of a language; `data` is a folder like that which NMT_TEST_DATA names."""
    text = b"".join((data / name).read_bytes() for name in REAL[language])
    return text.decode().split("\n")[:n]


def awkward_lines(language: str, n: int, seed: int) -> list[str]:
    """Meaningless lines without line feeds: each is a few pieces, most of them a trap, some glued together."""
    rng = random.Random(seed)

    def pick(items: Sequence[str]) -> str:
        return items[int(rng.random() * len(items))]

    def word() -> str:
        chosen = pick(WORDS[language])
        return [chosen, chosen, chosen, chosen.lower(), chosen.upper()][int(rng.random() * 5)]

    def filled(forms: Sequence[str]) -> str:
        return pick(forms).replace("{}", word(), 1).replace("{}", word())

    def quoted() -> str:
        marks = pick(QUOTES)
        inside = word() + pick(["", "", " " + word(), ",", ".", "!", " ", "-" + word()])
        return (
            marks[: len(marks) // 2]
            + inside
            + marks[len(marks) // 2 :]
            + pick(["", "", ",", ".", ";", "-"])
        )

    def abbreviated() -> str:
        gap = pick([" ", " ", "", "\xa0", "  "])
        return (
            pick(SHORT[language]) + "." + gap + pick([word(), pick(NUMBERS), pick(SHORT[language])])
        )

    def any_of(items: Sequence[str]) -> Callable[[], str]:
        return lambda: pick(items)

    kinds = [
        word,
        word,
        word,
        lambda: word() + ",",
        quoted,
        quoted,
        quoted,
        abbreviated,
        abbreviated,
        lambda: filled(HYPHENS),
        lambda: filled(HYPHENS),
        lambda: filled(APOSTROPHES),
        lambda: filled(APOSTROPHES),
        lambda: word() + pick(SPACES) + word(),
        lambda: word() + pick(LETTERS) + word(),
        *map(
            any_of,
            (
                DASHES,
                NUMBERS,
                NUMBERS,
                LINKS,
                ENTITIES,
                BRACKETS,
                ELLIPSES,
                SPACES,
                LETTERS,
                MONEY,
                ASIA,
                SIGNS,
            ),
        ),
    ]
    lines = []
    for _ in range(n):
        if rng.random() < 0.02:
            lines.append(pick(NEARLY_EMPTY))
            continue
        line = ""
        for _ in range(1 + int(rng.random() * 9)):
            line += kinds[int(rng.random() * len(kinds))]() + ("" if rng.random() < 0.15 else " ")
        lines.append((line if rng.random() < 0.1 else line.rstrip(" ")) + pick(ENDS))
    return lines


def damaged_pair(lines: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Damaged copies of some tokenised lines, and these lines: words lost, doubled and replaced.

    Seeds run from one line to hundreds and from too short to too long; each seventh has no four right words in a row.
    """
    rng = random.Random(seed)
    n = 1 + int(rng.random() ** 2 * 400)
    start = int(rng.random() * (len(lines) - n))
    loss, gain, wrong = rng.random() * 0.3, rng.random() * 0.3, rng.random() * 0.2
    if seed % 7 == 0:
        loss = gain = 0.0
    hypotheses = []
    for line in lines[start : start + n]:
        words: list[str] = []
        for word in line.split(" "):
            if rng.random() < wrong or seed % 7 == 0 and len(words) % 4 == 3:
                word = "falsch"
            if rng.random() >= loss:
                words.append(word)
            if rng.random() < gain:
                words.insert(int(rng.random() * (len(words) + 1)), word)
        hypotheses.append(" ".join(words))
    return hypotheses, list(lines[start : start + n])
