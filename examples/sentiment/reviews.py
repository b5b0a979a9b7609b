"""Reviews and their labels: from a .tsv, from folders of .txt files, or made here.

Those made here say something plainly, deny its opposite, or both: "The plot is a joy. The music is
hardly dull." and "The plot is dull. The music is hardly a joy." Exchanging the two words exchanges the
labels, and the words of the review stay the same. So a bag of words learns nothing from such a review:
only the order tells what is denied.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nmt.corpus.text_files import TextFile, read_lines
from nmt.system.errors import UserError

HELD_OUT = 10  # without a test set, every tenth review is held out as one
SUBJECTS = "film,plot,story,acting,music,ending,cast,dialogue,humour,camera work".split(",")
GOOD = "good,brilliant,funny,gripping,convincing,touching,fresh,clever,a joy,a masterpiece".split(
    ","
)
BAD = "bad,dull,silly,boring,clumsy,weak,stale,lifeless,a mess,a waste of time".split(",")
# Some of these contain a negation too, which denies nothing.
STATEMENTS = [
    "the {} is {}",
    "I found the {} {}",
    "no doubt, the {} is {}",
    "never mind the title: the {} is {}",
    "the {}, not that I expected it, is {}",
    "everybody will call the {} {}",
    "simply {1}, this {0}",
]
DENIALS = [
    "the {} is not {} at all",
    "the {} is hardly {}",
    "the {} is anything but {}",
    "nobody will call the {} {}",
    "I never found the {} {}",
    "the {} is far from being {}",
    "not {1} at all, this {0}",
    "hardly {1}, this {0}",
]


class Review(NamedTuple):
    label: str
    text: str


class Corpus(NamedTuple):
    train: list[Review]
    test: list[Review]


def read_corpus(place: str | None, seed: int) -> Corpus:
    """Read what `--data` names; None: make reviews."""
    if place is None:
        return hold_out(make_reviews(9_000, seed), seed)
    path = Path(place)
    if path.is_file():
        return hold_out(list(read_tsv(path)), seed)
    if (path / "train" / "pos").is_dir():  # as IMDB's archive unpacks
        return Corpus(read_folder(path / "train"), read_folder(path / "test"))
    return hold_out(read_folder(path), seed)


def hold_out(reviews: list[Review], seed: int) -> Corpus:
    shuffled = random.Random(seed).sample(reviews, len(reviews))
    n_test = len(reviews) // HELD_OUT
    return Corpus(shuffled[n_test:], shuffled[:n_test])


def read_tsv(path: Path) -> Iterator[Review]:
    for number, line in enumerate(read_lines(TextFile(path)), 1):
        label, tab, text = line.partition("\t")
        if not (label.strip() and tab and text.strip()):
            raise UserError(f"{path}:{number}: each line must be a label, a tab, and a text")
        yield Review(label.strip(), text)


def read_folder(folder: Path) -> list[Review]:
    """Read the folders `pos` and `neg`, which have a file for each review."""
    reviews = []
    for label in ("neg", "pos"):
        for path in sorted((folder / label).glob("*.txt")):
            text = " ".join(read_lines(TextFile(path)))
            reviews.append(Review(label, text.replace("<br />", " ")))
    if not reviews:
        raise UserError(f"{folder}: has no pos/*.txt and neg/*.txt; give such a folder, or a .tsv")
    return reviews


def make_reviews(n: int, seed: int) -> list[Review]:
    """Make n reviews, no two of which are equal."""
    rng = random.Random(seed)
    reviews: dict[Review, None] = {}  # in order
    while len(reviews) < n:
        reviews[make_review(rng)] = None
    return list(reviews)


def make_review(rng: random.Random) -> Review:
    label, right, wrong = rng.choice([("pos", GOOD, BAD), ("neg", BAD, GOOD)])

    def state() -> str:
        return rng.choice(STATEMENTS).format(rng.choice(SUBJECTS), rng.choice(right))

    def deny() -> str:
        return rng.choice(DENIALS).format(rng.choice(SUBJECTS), rng.choice(wrong))

    plan = rng.choice([[state], [deny], [state, deny], [state, deny, state, deny]])
    clauses = [make_clause() for make_clause in plan]
    rng.shuffle(clauses)
    return Review(label, " ".join(f"{clause[0].upper()}{clause[1:]}." for clause in clauses))
