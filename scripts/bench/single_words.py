"""How well does a model translate one word by itself, and how should the word be written?

    python scripts/bench/single_words.py runs/multi30k/average --src train.en --tgt train.de

Draws words of the training text, and counts how many translations have a word that often stands in the
references of their lines: one of the three with the largest Dice coefficient. That is lenient, and knows
no synonyms, so the counts compare ways to write a word; they are no accuracy.
"""

import argparse
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import nmt.api

LINES = 200_000  # of the training text
LEAST_LETTERS = 3  # of a word, because shorter ones are mostly articles and prepositions
N_MEANINGS = 3
WAYS = {
    "word": "{}".format,
    "Word": str.capitalize,
    "WORD": str.upper,
    "word.": "{}.".format,
    "Word.": lambda word: f"{word.capitalize()}.",
    "A word.": "A {}.".format,
}


def split_words(line: str) -> list[str]:
    return re.findall(r"\w+", line.lower())


def read_lines(path: Path) -> list[set[str]]:
    with open(path, encoding="utf-8") as file:
        return [set(split_words(line)) for line in itertools.islice(file, LINES)]


def find_meanings(
    words: list[str], src: list[set[str]], tgt: list[set[str]]
) -> dict[str, set[str]]:
    """Find for each source word the target words that go with it best."""
    n_src = Counter(itertools.chain.from_iterable(src))
    n_tgt = Counter(itertools.chain.from_iterable(tgt))
    n_both: dict[str, Counter[str]] = {word: Counter() for word in words}
    for src_words, tgt_words in zip(src, tgt, strict=True):
        for word in src_words & n_both.keys():
            n_both[word].update(tgt_words)
    meanings = {}
    for word, counts in n_both.items():
        dice = {other: 2 * n / (n_src[word] + n_tgt[other]) for other, n in counts.items()}
        meanings[word] = set(sorted(dice, key=lambda other: (-dice[other], other))[:N_MEANINGS])
    return meanings


def main() -> None:
    parser = argparse.ArgumentParser(description="Translate words one by one.")
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="such as decoding.max_extra=2")
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--tgt", type=Path, required=True)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--least", type=int, default=20, help="lines that have the word")
    args = parser.parse_args()

    src, tgt = read_lines(args.src), read_lines(args.tgt)
    counts = Counter(itertools.chain.from_iterable(src))
    known = [word for word, n in counts.items() if n >= args.least and word.isalpha()]
    drawn = random.Random(1).sample(
        sorted(word for word in known if len(word) >= LEAST_LETTERS), args.words
    )
    meanings = find_meanings(drawn, src, tgt)

    translator = nmt.api.load(args.model, settings=args.settings)
    print("written   translated   by one or two words   words on average")
    for way, write in WAYS.items():
        outputs = [split_words(best.text) for best in translator.translate(map(write, drawn))]
        right = [out for word, out in zip(drawn, outputs, strict=True) if meanings[word] & set(out)]
        short = sum(len(out) <= 2 for out in right)
        mean = sum(map(len, outputs)) / len(outputs)
        print(f"{way:<9} {len(right):>10}   {short:>19}   {mean:>16.2f}")


if __name__ == "__main__":
    main()
