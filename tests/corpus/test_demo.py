"""The embedded corpus: what its generator makes, in three splits, clean, and no sentence twice."""

import hashlib
import runpy

from pytest import fixture
from support.checkout import ROOT

from nmt.corpus.demo import RANGES, generate_pairs

# Of all pairs, as the text that the generator makes. Stores and scores of the demo depend on it.
DIGEST = "553ca7890355fd9cb5c508dfc7f232f5f0e5e4cdb93c093a4e2b61f563c208e7"

Pairs = list[tuple[str, str]]


@fixture(scope="module")
def splits() -> dict[str, Pairs]:
    return {split: list(generate_pairs(split)) for split in RANGES}


def test_the_generator_still_makes_the_corpus(splits: dict[str, Pairs]) -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "make_demo.py"))["make_text"]()
    pairs = splits["test"] + splits["valid"] + splits["train"]
    assert text == "".join(f"{en}\t{de}\n" for en, de in pairs)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_the_splits_have_their_sizes_and_share_no_sentence(splits: dict[str, Pairs]) -> None:
    assert [len(splits[split]) for split in RANGES] == [500, 500, 20000]
    for side in zip(*(pair for pairs in splits.values() for pair in pairs), strict=True):
        assert len(set(side)) == 21000
