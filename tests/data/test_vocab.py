"""The joint BPE against SentencePiece itself, and text that must come back as it went in."""

import hashlib
import re
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch, fixture, mark, raises
from support.capture import Capture, read_stderr
from support.sentencepieces import train_sentencepiece

from nmt.config import VocabConfig
from nmt.corpus.encoder import CorpusEncoder
from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
from nmt.data.vocab import (
    BOS,
    EOS,
    PAD,
    UNK,
    SymbolKind,
    Vocab,
    VocabPair,
    append_symbols,
    is_extension,
)
from nmt.system.errors import UserError

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box “quietly” — ½ of them, naïve, Übermaß"
LINES = [" ".join(WORDS.split()[i * k % 19] for k in range(1, 9)) for i in range(99)] + [
    "tab\there\u2028\u0085\xa0."
]
SIZE = 120


def train_model(lines: Sequence[str], config: VocabConfig, tags: Sequence[str] = ()) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_word_counts(
            Path(folder) / "words.tsv", tally_words([line.encode() for line in lines])
        )
        return train_bpe(Path(folder) / "words.tsv", config, tags)


@fixture(scope="module")
def model() -> bytes:
    return train_model(LINES, VocabConfig(size=SIZE))


@fixture(scope="module")
def vocab(model: bytes) -> Vocab:
    return Vocab(model)


def test_ids_and_pieces_are_those_of_sentencepiece(vocab: Vocab, model: bytes) -> None:
    truth = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert vocab.size == truth.get_piece_size() == SIZE
    assert (
        (truth.pad_id(), truth.unk_id(), truth.bos_id(), truth.eos_id())
        == (PAD, UNK, BOS, EOS)
        == (0, 1, 2, 3)
    )
    ids = vocab.encode(LINES)
    assert ids == [truth.encode(line) for line in LINES]
    assert vocab.pieces(ids[0]) == truth.encode(LINES[0], out_type=str)
    assert not {PAD, UNK, BOS, EOS} & set(chain.from_iterable(ids))
    assert vocab.digest == hashlib.sha256(model).hexdigest()


def test_words_and_counts_teach_what_lines_teach() -> None:
    model = train_sentencepiece(LINES[:99], SIZE, character_coverage=1.0)
    truth = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = Vocab(train_model(LINES[:99], VocabConfig(size=SIZE)))
    assert vocab.pieces(range(SIZE)) == truth.id_to_piece(list(range(SIZE)))


def test_a_model_whose_pieces_span_spaces_encodes_whole_lines() -> None:
    lines = ["ice cream is good", "an ice cream", "cream of ice cream"] * 9
    options = {"split_by_whitespace": False, "normalization_rule_name": "nmt_nfkc"}
    vocab = Vocab(train_sentencepiece(lines, 40, **options))
    lines = ["an ice cream", "ﬁne  ½ ice"]
    assert not vocab.is_wordwise
    ids, _ = CorpusEncoder(vocab)([line.encode() for line in lines])
    assert ids.tolist() == list(chain.from_iterable(vocab.encode(lines)))
    assert vocab.encode(lines[:1])[0] != list(
        chain.from_iterable(vocab.encode(lines[0].split(" ")))
    )


def test_with_byte_fallback_nothing_is_unknown() -> None:
    vocab = Vocab(train_model(LINES, VocabConfig(size=400, byte_fallback=True)))
    ids = vocab.encode(["the \N{SNOWMAN} 漢字"])
    assert UNK not in ids[0] and vocab.decode(ids) == ["the \N{SNOWMAN} 漢字"]


@mark.parametrize(
    "text",
    [
        "“quietly” — ½ of them, naïve",
        "a tab\there",
        "line\u2028end",
        "next\u0085line",
        "no\xa0break",
        "",
        "the the",
    ],
)
def test_text_comes_back_as_it_went_in(vocab: Vocab, text: str) -> None:
    assert vocab.decode(vocab.encode([text])) == [text]


def test_only_runs_of_spaces_are_lost(vocab: Vocab) -> None:
    assert vocab.decode(vocab.encode(["  the  dog "])) == ["the dog"]


def test_the_sign_for_a_space_comes_back_as_a_space(vocab: Vocab) -> None:
    """As docs/data.md says."""
    assert vocab.decode(vocab.encode(["the\u2581fox"])) == ["the fox"]


def test_control_ids_have_no_text_and_the_unknown_is_marked(vocab: Vocab) -> None:
    (ids,) = vocab.encode(["the dog"])
    assert vocab.decode([[BOS, *ids, EOS, PAD, PAD], [], [PAD]]) == ["the dog", "", ""]
    assert vocab.encode(["the \N{SNOWMAN}"])[0][-1] == UNK
    assert "\N{DOUBLE QUESTION MARK}" in vocab.decode(vocab.encode(["the \N{SNOWMAN}"]))[0]


def test_written_tags_are_text_not_special_ids(vocab: Vocab) -> None:
    assert not {PAD, BOS, EOS} & set(vocab.encode(["<s> </s> <pad>"])[0])


def test_appended_symbols_are_whole_and_change_no_other_id(vocab: Vocab, model: bytes) -> None:
    long = "<" + "x" * 200 + ">"  # its length takes two bytes
    appended = append_symbols(model, ["<bt>", long], SymbolKind.USER_DEFINED)
    appended = append_symbols(appended, ["<de>"], SymbolKind.CONTROL)
    grown, truth = Vocab(appended), sentencepiece.SentencePieceProcessor(model_proto=appended)
    assert grown.pieces(range(SIZE, grown.size)) == ["<bt>", long, "<de>"]
    assert grown.extends(vocab) and not vocab.extends(grown)
    assert is_extension(grown, vocab) and not is_extension(vocab, vocab)
    pair, longer = VocabPair(vocab, vocab), VocabPair(grown, vocab)
    assert is_extension(longer, pair) and not is_extension(pair, longer)
    assert not is_extension(grown, pair) and not is_extension(longer, vocab)
    assert [truth.is_control(SIZE + i) for i in range(3)] == [False, False, True]

    assert grown.encode(LINES) == vocab.encode(LINES)
    (before,), (words,) = grown.encode([f"fox <bt>{long} dog"]), grown.encode(["fox dog"])
    assert [i for i in before if i >= SIZE] == [SIZE, SIZE + 1]
    assert before[0] == words[0] and before[-1] == words[-1]
    assert grown.decode([before]) == [f"fox <bt>{long} dog"]
    # the characters of a control symbol are text, and another model is not extended
    assert SIZE + 2 not in grown.encode(["<de>"])[0]
    other = train_model(LINES, VocabConfig(size=SIZE - 10))
    assert not grown.extends(Vocab(other))


def test_the_same_lines_give_the_same_bytes(model: bytes) -> None:
    assert train_model(LINES, VocabConfig(size=SIZE)) == model


@mark.parametrize(
    "size, message",
    [
        (5000, r"vocab\.size: 5000 is too large .* use at most (\d+)"),
        (
            20,
            r"vocab\.size: 20 is too small: .* need (\d+) pieces; raise it or lower vocab\.character_coverage",
        ),
    ],
)
def test_an_impossible_size_names_the_possible(size: int, message: str, capfd: Capture) -> None:
    with raises(UserError, match=message) as caught:
        train_model(LINES, VocabConfig(size=size))
    found = re.search(message, str(caught.value))
    assert found
    bound = int(found[1])
    assert Vocab(train_model(LINES, VocabConfig(size=bound))).size == bound
    assert read_stderr(capfd) == ""


@mark.parametrize("lines", [[], ["", " "], ["x" * 5000]])
def test_no_text_is_refused(lines: list[str]) -> None:
    with raises(UserError, match="no text to learn the BPE from"):
        train_model(lines, VocabConfig(size=100))


def test_a_file_that_is_no_model_is_named(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "vocab.model"
    with raises(UserError, match=r"vocab\.model: cannot be read \(No such file"):
        Vocab.load(path)
    for damaged in (b"", b"rubbish", model[:-5]):
        path.write_bytes(damaged)
        with raises(UserError, match=r"vocab\.model: damaged BPE model"):
            Vocab.load(path)
    path.write_bytes(model)
    assert Vocab.load(path).digest == Vocab(model).digest


def test_a_model_with_other_special_ids_is_refused(tmp_path: Path) -> None:
    defaults = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # SentencePiece's
    (tmp_path / "other.model").write_bytes(train_sentencepiece(LINES, SIZE, **defaults))
    with raises(
        UserError, match=r"other\.model: BPE model with pad, unk, bos, eos = \(-1, 0, 1, 2\)"
    ):
        Vocab.load(tmp_path / "other.model")


# ---- symbols ------------------------------------------------------------------------------------------------------

TAG, URL = "<bt>", "<url>"
WITH_SYMBOLS = ["a <url> b", "see (<url>), or <url><url>", "<bt> the fox", "x<bt>y", ">>de<<"]


@fixture(scope="module")
def symbols() -> Vocab:
    config = VocabConfig(size=SIZE, user_symbols=(URL,))
    return Vocab(train_model([*LINES, *WITH_SYMBOLS * 50], config, [TAG, ">>de<<", URL]))


def test_a_tag_is_one_piece_that_no_text_contains(symbols: Vocab) -> None:
    tag = symbols.find_symbol(TAG)
    assert symbols.pieces([tag, symbols.find_symbol(">>de<<")]) == [TAG, ">>de<<"]
    for line, ids in zip(WITH_SYMBOLS, symbols.encode(WITH_SYMBOLS), strict=True):
        assert tag not in ids and symbols.find_symbol(">>de<<") not in ids, line
    assert symbols.decode([[tag, *symbols.encode(["the fox"])[0]]]) == ["the fox"]


def test_a_user_symbol_is_one_piece_wherever_it_occurs(symbols: Vocab) -> None:
    url = symbols.find_symbol(URL)
    for line, ids in zip(WITH_SYMBOLS, symbols.encode(WITH_SYMBOLS), strict=True):
        assert ids.count(url) == line.count(URL)
        assert symbols.decode([ids])[0].count(URL) == line.count(URL)


@mark.parametrize("symbol", ["the", "<none>", "<s>", "<unk>", "", "t"])
def test_what_is_no_symbol_is_refused(symbol: str, symbols: Vocab) -> None:
    with raises(UserError, match="is not a symbol of this BPE model; .*user_symbols"):
        symbols.find_symbol(symbol)


LETTERS = st.text(
    st.sampled_from("thequickbrown “½ï \t\r\0\u2581\u2585\u3000\u0301☃😀"), max_size=30
)
LONG_WORDS = st.text("thequick", min_size=28, max_size=36)
BAD_ENDS = [b"", b"x", b"\0", b"\0\0", b"\xff", b"\xff\xff"]
PARTS = st.lists(st.sampled_from(["<url>", "<bt>", " ", "fox", "x", "<", "url"])).map("".join)


@given(
    st.lists(LETTERS | PARTS | LONG_WORDS),
    st.sampled_from([(0, 5, 3), (3, 5, 4), (1000, 1 << 18, 21)]),
)
def test_looking_words_up_gives_the_ids_of_lines(
    vocab: Vocab, symbols: Vocab, lines: list[str], sizes: tuple[int, int, int]
) -> None:
    with MonkeyPatch.context() as patch:
        names = ("MAX_KNOWN_WORDS", "WORDS_AT_A_TIME", "SLOT_BITS")
        for name, size in zip(names, sizes, strict=True):
            patch.setattr(f"nmt.corpus.encoder.{name}", size)
        for one in (vocab, symbols):
            encode = CorpusEncoder(one)
            for some in (lines, lines[::-1], lines[:1]):  # new words, then known ones
                ids, counts = encode([line.encode() for line in some])
                rows = one.encode(some)
                assert ids.tolist() == list(chain.from_iterable(rows))
                assert counts.tolist() == list(map(len, rows))


def test_words_that_share_slots_are_told_apart_by_bytes_and_length(
    vocab: Vocab, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.corpus.encoder.WORDS_AT_A_TIME", 60)
    monkeypatch.setattr("nmt.corpus.encoder.MAX_KNOWN_WORDS", 60)
    monkeypatch.setattr("nmt.corpus.encoder.SLOT_BITS", 7)
    word = b"thequick" * 9
    words = [word[:n] + end for n in range(70) for end in BAD_ENDS]
    encode = CorpusEncoder(vocab)
    for lines in (words, words[::-1], [b" ".join(words)]):
        ids, _ = encode(lines)
        rows = [row for line in lines for row in vocab.encode(line.split(b" "))]
        assert ids.tolist() == list(chain.from_iterable(rows))
