"""The cleaning rules against their words, and repeats against a set."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pytest import raises

from nmt.config import CleanConfig, RunConfig
from nmt.config_files import load_config, override_config
from nmt.corpus.cleaning import (
    clean_block,
    digest_pairs,
    find_broken_rule,
    find_duplicates,
    make_held_out_set,
)
from nmt.corpus.reader import Block, Pair
from nmt.system.errors import UserError

WORDS = st.lists(st.sampled_from(["a", "b", "\u3000", "c\u2028d", "\u00a0e", ""]), max_size=6).map(
    " ".join
)


def block(pairs: list[tuple[str, str]], bad: tuple[str, ...] = ()) -> Block:
    return Block(1, [src for src, _ in pairs], [tgt for _, tgt in pairs], list(bad), 1.0)


@given(
    st.lists(st.tuples(WORDS, WORDS)),
    st.none() | st.integers(1, 5),
    st.none() | st.sampled_from([1.0, 1.5, 2.0]),
    st.booleans(),
)
def test_what_is_kept_keeps_the_rules_and_nothing_else_does(
    pairs: list[tuple[str, str]], max_words: int | None, max_ratio: float | None, identical: bool
) -> None:
    def keeps(src: str, tgt: str) -> bool:
        sizes = sorted((len(src.split()), len(tgt.split())))
        return (
            sizes[0] > 0
            and sizes[1] <= (max_words or 99)
            and sizes[1] <= (max_ratio or 99) * sizes[0]
            and not (identical and src.strip() == tgt.strip())
        )

    kept, report = clean_block(
        block(pairs, ("x:7: bad",)),
        CleanConfig(max_words=max_words, max_ratio=max_ratio, identical=identical),
        {},
    )
    assert kept == [(src.strip(), tgt.strip()) for src, tgt in pairs if keeps(src, tgt)]
    assert sum(report.dropped.values()) == len(pairs) + 1 - len(kept)
    assert report.samples["unreadable"] == [["x:7: bad", ""]]
    src, tgt = ([pair[i].encode() for pair in kept] for i in range(2))
    digests = digest_pairs(src, tgt).tolist()
    assert (len(digests), len(set(digests))) == (len(kept), len(set(kept)))


def test_a_pair_exactly_at_the_ratio_stays() -> None:
    """With 1.4 for example 45 and 63 words; one word more is too many."""
    for hundredths in range(100, 301):
        rules = CleanConfig(max_words=None, max_ratio=hundredths / 100)
        for shorter in range(1, 251):
            longest = shorter * hundredths // 100
            pair = Pair("a " * longest, "b " * shorter)
            assert find_broken_rule(pair, rules) is None, (rules.max_ratio, shorter)
            pair = Pair("b " * shorter, "a " * (longest + 1))
            assert find_broken_rule(pair, rules), (rules.max_ratio, shorter)


def test_a_nul_is_dropped_and_counted() -> None:
    pairs = [("a", "x"), ("a\0", "x"), ("a", "\0"), ("", "\0")]
    kept, report = clean_block(block(pairs), CleanConfig(preset="none"), {})
    assert kept == [("a", "x")]
    assert report.dropped == {"NUL character": 2, "empty side": 1}


def test_a_pair_of_two_held_out_sentences_need_not_be_a_held_out_pair() -> None:
    sets = {"dev": make_held_out_set([Pair("a ", "x"), Pair("b", "y"), Pair("", "")])}
    pairs = [("a", "x"), ("a", "y"), ("b", "z"), ("q", "x"), ("q", "q")]
    assert clean_block(block(pairs), CleanConfig(), sets)[1].held_out == {"dev": [1, 3, 3]}
    for rule, n_kept in (("keep", 5), ("drop-pairs", 4), ("drop-sides", 1)):
        cleaning = CleanConfig(held_out=rule)  # type: ignore[arg-type]
        assert len(clean_block(block(pairs), cleaning, sets)[0]) == n_kept


@given(
    st.lists(
        st.lists(st.integers(0, 6).map(lambda n: n * 0x2492492492492492), max_size=9), max_size=5
    )
)
def test_repeats_are_those_of_a_set(parts: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            np.array(part, "<u8").tofile(file)
        whole = [n for part in parts for n in part]
        assert find_duplicates(files).tolist() == [n in whole[:i] for i, n in enumerate(whole)]


def test_a_preset_fills_in_what_is_not_given() -> None:
    rules = load_config("base-enfr.yaml").data.clean
    assert (rules.max_words, rules.max_ratio, rules.max_pieces) == (175, 1.5, 255)
    rules = load_config("base-enfr.yaml", ["data.clean.max_words=99"]).data.clean
    assert (rules.max_words, rules.max_ratio) == (99, 1.5)
    assert load_config("base.yaml").data.clean == CleanConfig(
        "paper-ende", max_words=None, max_pieces=255
    )
    with raises(
        UserError, match="paper-en-de.* is not one of none, paper-ende, paper-enfr; did you mean"
    ):
        override_config(RunConfig(), ["data.clean.preset=paper-en-de"])
    with raises(UserError, match=r"data\.clean\.preset"):
        override_config(RunConfig(), ["data.clean.preset=[]"])
