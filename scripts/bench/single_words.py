"""How well does a model translate one word by itself, and how should the word be written?

    python scripts/bench/single_words.py runs/multi30k/average --src train.en --tgt train.de

Draws words of the training text, and counts how many translations have a word that often stands in the
references of their lines: one of the three with the largest Dice coefficient. That is lenient, and knows
no synonyms, so the counts compare ways to write a word; they are no accuracy.
"""

import argparse
import random
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean

import nmt.api
from nmt.commands.cli import run_command
from nmt.corpus.text_files import TextFile, read_lines
from nmt.system.errors import UserError

LINES = 200_000  # of the training text
WORDS = 200  # that are drawn
LEAST_LINES = 20  # that have the word
LEAST_LETTERS = 3  # of a word, because shorter ones are mostly articles and prepositions
N_MEANINGS = 3


def list_ways(word: str) -> dict[str, str]:
    """Write a word in each way that is compared; the keys show how."""
    title = word.capitalize()
    return {
        "dog": word,
        "Dog": title,
        "DOG": word.upper(),
        "dog.": f"{word}.",
        "Dog.": f"{title}.",
        "A dog.": f"A {word}.",
    }


def split_words(line: str) -> list[str]:
    return re.findall(r"\w+", line.lower())


class Text:
    """The words of each line of one side, and in how many lines each stands."""

    def __init__(self, path: Path) -> None:
        self.lines: list[set[str]] = []
        self.counts: Counter[str] = Counter()
        for line in islice(read_lines(TextFile(path)), LINES):
            words = set(split_words(line))
            self.lines.append(words)
            self.counts.update(words)

    def draw_words(self) -> list[str]:
        known = []
        for word, n_lines in sorted(self.counts.items()):
            if n_lines >= LEAST_LINES and len(word) >= LEAST_LETTERS and word.isalpha():
                known.append(word)
        if len(known) < WORDS:
            raise UserError(
                f"only {len(known)} words, and not {WORDS}, stand in {LEAST_LINES} lines"
            )
        return random.Random(1).sample(known, WORDS)


def find_meanings(words: list[str], src: Text, tgt: Text) -> list[set[str]]:
    """Find for each source word the target words that go with it best."""
    together: dict[str, Counter[str]] = {}
    for word in words:
        together[word] = Counter()
    for src_words, tgt_words in zip(src.lines, tgt.lines, strict=True):
        for word in src_words & together.keys():
            together[word].update(tgt_words)
    meanings = []
    for word, counts in together.items():
        scored = []
        for other, n_lines in counts.items():
            dice = 2 * n_lines / (src.counts[word] + tgt.counts[other])
            scored.append((-dice, other))
        scored.sort()
        meanings.append({other for _, other in scored[:N_MEANINGS]})
    return meanings


def work(args: argparse.Namespace) -> int:
    src, tgt = Text(args.src), Text(args.tgt)
    if len(src.lines) != len(tgt.lines):
        raise UserError(f"{args.src} has {len(src.lines)} lines, {args.tgt} {len(tgt.lines)}")
    words = src.draw_words()
    meanings = find_meanings(words, src, tgt)

    translator = nmt.api.load(args.model, settings=args.settings)
    written: dict[str, list[str]] = {}
    for word in words:
        for way, text in list_ways(word).items():
            written.setdefault(way, []).append(text)
    print("written   translated   by one or two words   words on average")
    for way, lines in written.items():
        n_right = n_short = 0
        lengths = []
        for meaning, best in zip(meanings, translator.translate(lines), strict=True):
            output = split_words(best.text)
            lengths.append(len(output))
            if meaning & set(output):
                n_right += 1
                n_short += len(output) <= 2
        print(f"{way:<9} {n_right:>10}   {n_short:>19}   {fmean(lengths):>16.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Translate words one by one.")
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="such as decoding.max_extra=2")
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--tgt", type=Path, required=True)
    args = parser.parse_intermixed_args()
    return run_command(lambda: work(args), "single_words")


if __name__ == "__main__":
    sys.exit(main())
