"""Lines that are hard to tokenise, and damaged copies of lines: the inputs of the golden files.

They are made instead of stored, from the traps of awkward.json, and are the same on every machine
and every Python: all draws are `Random.random`, whose sequence Python keeps, and no character is so
new that the tables of Perl and ours could differ on it. tests/golden has the digests. The real
lines that are used beside them lie outside the project and are only read.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from nmt.system.strict_json import Fields

# Words, and what is hard about each kind of text
TRAPS: Fields = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PLAIN_TRAPS = "dashes numbers numbers links entities brackets ellipses spaces letters money asia signs".split()
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
    rng = Random(seed)

    def pick(items: Sequence[str]) -> str:
        return items[int(rng.random() * len(items))]

    def word() -> str:
        chosen = pick(TRAPS["words"][language])
        return [chosen, chosen, chosen, chosen.lower(), chosen.upper()][int(rng.random() * 5)]

    def filled(forms: Sequence[str]) -> str:
        return pick(forms).replace("{}", word(), 1).replace("{}", word())

    def quoted() -> str:
        marks = pick(TRAPS["quotes"])
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
            pick(TRAPS["short"][language])
            + "."
            + gap
            + pick([word(), pick(TRAPS["numbers"]), pick(TRAPS["short"][language])])
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
        lambda: filled(TRAPS["hyphens"]),
        lambda: filled(TRAPS["hyphens"]),
        lambda: filled(TRAPS["apostrophes"]),
        lambda: filled(TRAPS["apostrophes"]),
        lambda: word() + pick(TRAPS["spaces"]) + word(),
        lambda: word() + pick(TRAPS["letters"]) + word(),
        *(any_of(TRAPS[name]) for name in PLAIN_TRAPS),
    ]
    lines = []
    for _ in range(n):
        if rng.random() < 0.02:
            lines.append(pick(TRAPS["nearly_empty"]))
            continue
        line = ""
        for _ in range(1 + int(rng.random() * 9)):
            line += kinds[int(rng.random() * len(kinds))]() + ("" if rng.random() < 0.15 else " ")
        lines.append((line if rng.random() < 0.1 else line.rstrip(" ")) + pick(TRAPS["ends"]))
    return lines


def damaged_pair(lines: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Damaged copies of some tokenised lines, and these lines: words lost, doubled and replaced.

    Seeds run from one line to hundreds and from too short to too long; each seventh has no four right words in a row.
    """
    rng = Random(seed)
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
