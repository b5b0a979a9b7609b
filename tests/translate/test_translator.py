"""Text to text against sentence-by-sentence search, parts of long lines, alignments against plain attention, and lines
as they come from a pipe."""

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import sentences
from torch import Tensor
from untrained import DECODING, SHAPE, make_model, make_vocab

from nmt.config import DecodingConfig, ModelConfig
from nmt.data.batch import pack
from nmt.data.vocab import BOS, EOS, SPACE, Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.translate.alignment import align
from nmt.translate.batching import split_by_budget
from nmt.translate.lines import LARGEST_CHUNK, MAX_LINE_BYTES, LineReader, add_prefixes
from nmt.translate.long_lines import split_pieces
from nmt.translate.search import search
from nmt.translate.stream import keep_whole_lines
from nmt.translate.translator import LineTooLong, Request, Translator

SOURCES = [src for src, _ in sentences(30, seed=5)]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return make_vocab(tmp_path_factory.mktemp("words"))


def translator(
    vocab: Vocab, config: DecodingConfig = DECODING, shape: ModelConfig = SHAPE
) -> Translator:
    return Translator(make_model(vocab, shape), vocab, config, torch.device("cpu"))


def test_a_batch_is_bounded_by_what_its_hypotheses_may_say() -> None:
    def sizes(n_pieces: int, n_lines: int, **settings: Any) -> set[int]:
        batches = list(
            split_by_budget([[5] * n_pieces] * n_lines, DecodingConfig(**settings), n_best=300)
        )
        assert sorted(i for batch in batches for i in batch) == list(range(n_lines))
        return {len(batch) for batch in batches[:-1]}

    assert sizes(32, 1_000) == {4_096 // 32}  # usual ones: the source alone decides
    assert sizes(2, 3_000) == {16 * 4_096 // (4 * 52)}
    assert sizes(1_000, 20, beam=16) == {3}
    assert sizes(1_000, 20, beam=1_000) == {1}
    assert sizes(32, 100, sample=True) == {2}


def test_the_best_few_are_those_of_each_sentence_alone(vocab: Vocab) -> None:
    ours = translator(vocab)
    lines = [SOURCES[0], "", *SOURCES[1:], "   "]
    found = ours.find_candidates(lines, Request(n_best=2))
    for line, candidates in zip(lines, found, strict=True):
        ids = vocab.encode([line])[0]
        if not ids:
            assert [(one.text, one.score, one.piece_ids) for one in candidates] == [("", 0.0, ())]
            continue
        alone = search(ours.model, pack([[*ids, EOS]]), DECODING, 2)[0]
        assert [one.text for one in candidates] == vocab.decode([one.ids for one in alone])
        assert [one.score for one in candidates] == pytest.approx(
            [one.score for one in alone], abs=1e-5
        )
    assert [one.text for one in ours.translate(lines)] == [
        candidates[0].text for candidates in found
    ]
    assert len({one[0].text for one in found}) > 10  # the model does listen


def test_a_model_in_training_is_in_training_again_afterwards(vocab: Vocab) -> None:
    ours = translator(vocab, shape=replace(SHAPE, dropout=0.5))
    ours.model.train()
    assert ours.translate(SOURCES) == ours.translate(SOURCES)  # without dropout
    assert ours.model.training


def test_a_model_that_is_no_number_is_a_failure(vocab: Vocab) -> None:
    ours = translator(vocab)
    ours.model.projection.weight.fill_(float("nan"))
    with pytest.raises(Failure, match="NaN or infinite"):
        ours.translate(SOURCES[:3])


# ---- long lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "longest", "parts"),
    [
        ("_a|_b|_c|.", 4, ["_a|_b|_c|."]),
        (
            "_a|_b.|_c|_d.|_e|_f.",
            4,
            ["_a|_b.", "_c|_d.|_e|_f."],
        ),  # at a sentence, though it is not the half
        ("_a|_b|,|_c|_d|_e", 5, ["_a|_b|,", "_c|_d|_e"]),
        ("_a.|_b,|_c|_d|_e", 4, ["_a.", "_b,|_c|_d|_e"]),
        ("_a|x|x|_b|_c|x", 5, ["_a|x|x", "_b|_c|x"]),
        ("_a|_b|_3|.|14|_c|_d", 5, ["_a|_b|_3|.|14", "_c|_d"]),  # not within a number
        ('_a|_b|.|"|_c|_d|_e', 5, ['_a|_b|.|"', "_c|_d|_e"]),
    ],
)
def test_lines_part_where_sentences_do_else_clauses_else_words(
    pieces: str, longest: int, parts: list[str]
) -> None:
    row = pieces.replace("_", SPACE).split("|")
    assert [
        "|".join(row[i] for i in part).replace(SPACE, "_") for part in split_pieces(row, longest)
    ] == parts


def test_parts_without_any_place_to_part() -> None:
    assert split_pieces(["x"] * 10, 4) == [range(0, 4), range(4, 7), range(7, 10)]
    assert split_pieces(list("今日は。明日も。"), 5) == [range(0, 4), range(4, 8)]


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_short_and_make_up_the_line(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 400)
    pieces = [
        rng.choice(("", SPACE)) + rng.choice(("x", "yy", ".", ",", "。", '"')) for _ in range(n)
    ]
    longest = rng.randint(1, 50)
    parts = split_pieces(pieces, longest)
    assert [i for part in parts for i in part] == list(range(len(pieces)))
    assert all(0 < len(part) <= longest for part in parts)
    assert len(parts) <= 4 * -(-len(pieces) // longest)


def test_a_long_line_in_parts_is_its_parts(vocab: Vocab) -> None:
    ours = translator(vocab, replace(DECODING, long_lines="split", max_source=12))
    lines = [". ".join(SOURCES[:9]), SOURCES[3], "", ", ".join(SOURCES[9:15])]
    together = ours.find_candidates(lines, Request(2, is_aligned=True))
    for line, candidates in zip(lines, together, strict=True):
        ids = vocab.encode([line])[0]
        parts = ours.split_line(ids, 0, 1)
        assert (len(parts) > 3) is (line in (lines[0], lines[3]))
        alone = [
            search(ours.model, pack([[*ids[part.start : part.stop], EOS]]), DECODING, 2)[0]
            for part in parts
        ]
        ranked = sorted(itertools.product(*alone), key=lambda row: -sum(one.score for one in row))[
            :2
        ]
        sums = [sum(one.score for one in row) for row in ranked]
        assert [one.score for one in candidates] == pytest.approx(sums, abs=1e-4)
        best = ranked[0]
        assert candidates[0].text == " ".join(vocab.decode([one.ids for one in best]))
        links = [
            part.start + link
            for part, one in zip(parts, best, strict=True)
            for link in align(ours.model, [ids[part.start : part.stop]], [one.ids])[0]
        ]
        assert candidates[0].alignment == tuple(links) and len(links) == len(
            candidates[0].piece_ids
        )


def test_a_line_that_is_too_long_is_refused_by_number(vocab: Vocab) -> None:
    ours = translator(vocab, replace(DECODING, long_lines="refuse", max_source=40))
    with pytest.raises(
        LineTooLong, match=r"line 12 has [0-9]+ pieces, more than 40; .*max_source.*long_lines"
    ) as told:
        ours.translate([*SOURCES[:2], " ".join(SOURCES)], first=10)
    assert told.value.index == 2


@pytest.mark.parametrize("how", ["cut", "split"])
def test_learned_positions_bound_a_line_too(
    how: str, vocab: Vocab, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(DECODING, long_lines="split" if how == "split" else "cut")
    ours = translator(vocab, config, replace(SHAPE, positions="learned", max_positions=30))
    (one,) = ours.translate([" ".join(SOURCES)], first=7)
    assert one.score < 0 and "line 7 has" in capsys.readouterr().err


# ---- alignments ---------------------------------------------------------------------------------------------------


def looked_at(model: Transformer, src: list[int], tgt: list[int]) -> list[list[list[float]]]:
    """The memory attention of each layer, heads averaged, one sentence at a time and with plain products."""
    source = pack([[*src, EOS]])
    memory, target = model.encode(source), pack([[BOS, *tgt]])
    x = model.embed(model.tgt_embedding, model.tgt_positions, target)
    layers = []

    def attended(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1), weights

    for layer in model.decoder:
        q, k, v = layer.attention.split(layer.attention_residual.before(x))
        mixed, _ = attended(q, k, v, True)
        x = layer.attention_residual.after(x, layer.attention.output(mixed))
        cross = layer.memory_attention
        keys, values = cross.keys_values(memory)
        mixed, weights = attended(
            cross.heads(cross.q(layer.memory_residual.before(x))), keys, values, False
        )
        layers.append(weights.mean(0).tolist())
        x = layer.memory_residual.after(x, cross.output(mixed))
        x = layer.feed_forward_residual.after(
            x, layer.feed_forward(layer.feed_forward_residual.before(x))
        )
    return layers


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@torch.no_grad()
def test_alignments_are_the_places_looked_at_most(
    n_layers: int, vocab: Vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.translate.alignment.MAX_CELLS", 200)  # several groups
    model = make_model(vocab, replace(SHAPE, n_layers=n_layers))
    rng = random.Random(1)
    src, tgt = (
        [[rng.randrange(4, vocab.size) for _ in range(rng.randint(shortest, 9))] for _ in range(12)]
        for shortest in (1, 0)
    )
    src[4] = []
    found = align(model, src, tgt)
    for source, target, links in zip(src, tgt, found, strict=True):
        rows = looked_at(model, source, target)[max(0, n_layers - 2)][: len(target)]
        assert links == [max(range(max(1, len(source))), key=row.__getitem__) for row in rows]
    assert found[4] == [0] * len(tgt[4])


# ---- lines of a stream --------------------------------------------------------------------------------------------


def piped(data: bytes, sizes: Iterator[int]) -> LineReader:
    """What reads `data` from a pipe, into which it comes in such portions."""
    reader, writer = os.pipe()

    def feed() -> None:
        start = 0
        while start < len(data):
            start += os.write(writer, data[start : start + next(sizes)])
        os.close(writer)

    threading.Thread(target=feed, daemon=True).start()
    return LineReader(reader, "x")


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r", ["a", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        ("a\u2028b\u0085c\x0bd\x0ce\rf\n \n".encode(), ["a\u2028b\u0085c\x0bd\x0ce\rf", " "]),
        (b"a\x00b\n", ["a\x00b"]),
        (b"a\n\xff\xfe b\r\nc", ["a", "\ufffd\ufffd b", "c"]),
        (b"\xef\xbb\xbf\xff", ["\ufffd"]),
        ("\u00e9".encode()[:1], ["\ufffd"]),
    ],
)
def test_lines_end_with_a_line_feed_and_nothing_else(data: bytes, lines: list[str]) -> None:
    for size in (1, 2, 1 << 16):
        assert [
            line
            for chunk in piped(data, itertools.repeat(size)).read_chunks()
            for line in chunk.lines
        ] == lines


def test_chunks_grow_keep_order_and_end() -> None:
    rng = random.Random(3)
    texts = [f"{n} {'x' * rng.randrange(80)}" for n in range(9_000)]
    data = "\n".join(texts).encode()
    sizes = (rng.choice((7, 4_000, 90_000)) for _ in itertools.count())
    for skip in (0, 1, 31, 32, 5_000, 9_000):
        chunks = list(piped(data, sizes).read_chunks(skip))
        assert [line for chunk in chunks for line in chunk.lines] == texts[skip:]
        assert [chunk.first for chunk in chunks] == list(
            itertools.accumulate((len(chunk.lines) for chunk in chunks[:-1]), initial=skip + 1)
        )[: len(chunks)]
        assert all(len(chunk.lines) <= LARGEST_CHUNK for chunk in chunks) and (
            not chunks or chunks[-1].n_bytes == len(data)
        )
        assert skip or len(chunks[0].lines) <= 32
    with pytest.raises(UserError, match="has 9,000 lines, fewer than the 9,001"):
        list(piped(data, sizes).read_chunks(9_001))


def test_a_live_source_is_not_waited_for() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\nthi")
    chunks = LineReader(reader, "x").read_chunks()
    assert next(chunks).lines == ["first", "second"]
    os.write(writer, b"rd\n")
    assert next(chunks).lines == ["third"]
    os.close(writer)
    assert list(chunks) == []


def test_lines_that_are_not_utf8_are_named_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    list(piped(b"ok\n" + b"\xff\xff\n" * 50 + b"ok\n", itertools.repeat(99)).read_chunks())
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 4
        and told[0].startswith("warning: x:2:1: byte 0xff")
        and "x: 50 lines" in told[3]
    )


def test_what_has_no_line_ends_is_no_text() -> None:
    chunks = piped(
        b"one\n" + bytes(MAX_LINE_BYTES + 200_000), itertools.repeat(1 << 16)
    ).read_chunks()
    assert next(chunks).lines == ["one"]
    with pytest.raises(UserError, match="x:2: .*line end"):
        next(chunks)


@pytest.mark.parametrize(
    ("n", "told"), [(300, None), (299, "ends after 299 lines"), (301, "has more lines .* 300")]
)
@pytest.mark.parametrize("skip", [0, 150])
def test_prefixes_go_with_their_lines(n: int, told: str | None, skip: int) -> None:
    lines = piped(b"".join(b"%d\n" % i for i in range(300)), itertools.repeat(50)).read_chunks(skip)
    others = piped(b"".join(b"p%d\n" % i for i in range(n)), itertools.repeat(33))
    found: list[tuple[str, str]] = []

    def go() -> None:
        for chunk in add_prefixes(lines, others, skip):
            assert chunk.prefixes is not None
            found.extend(zip(chunk.lines, chunk.prefixes, strict=True))

    if told is None:
        go()
        assert len(found) == 300 - skip
    else:
        with pytest.raises(UserError, match=told):
            go()
    assert found and all(prefix == f"p{line}" for line, prefix in found)


@pytest.mark.parametrize(
    "text", [b"", b"a", b"a\n", b"a\nb", b"\n\n", b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20)]
)
def test_what_is_torn_is_cut_off(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(text)
    assert keep_whole_lines(str(path)) == text.count(b"\n")
    assert path.read_bytes() == text[: text.rfind(b"\n") + 1]


def test_parting_takes_time_in_proportion() -> None:
    def seconds(n: int) -> float:
        pieces = (["x"] * 7 + [SPACE + "y"]) * (n // 8)
        began = time.process_time()
        split_pieces(pieces, 1_000)
        return time.process_time() - began

    assert min(seconds(80_000) for _ in range(3)) < 16 * min(
        seconds(10_000) for _ in range(3)
    )  # 8 times, and room


def test_the_shortest_table_of_several_models_bounds_a_line(
    vocab: Vocab, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = replace(SHAPE, positions="learned", max_positions=16)
    ours = Translator(
        make_model(vocab),
        vocab,
        DECODING,
        torch.device("cpu"),
        [make_model(vocab, learned, seed=3)],
    )
    assert ours.translate(["red " * 20, "blue dog"])[0].score < 0
    assert "and is cut to 15" in capsys.readouterr().err


def test_a_prefix_is_bounded_as_a_line_is(vocab: Vocab) -> None:
    ours = translator(vocab, shape=replace(SHAPE, positions="learned", max_positions=16))
    ids = vocab.encode(["hund hund hund hund hund hund hund hund"])[0][:16]
    with pytest.raises(
        LineTooLong, match="line 8: its prefix has 16 pieces, more than 15; "
    ) as told:
        ours.find_candidates(["red", "blue"], Request(), ["", *vocab.decode([ids])], 7)
    assert told.value.index == 1
    found = ours.find_candidates(["red"], Request(), vocab.decode([ids[:15]]))[0][0]
    assert found.piece_ids == tuple(ids[:15])  # nothing more has a place


def test_a_search_that_no_memory_holds_is_a_failure(vocab: Vocab) -> None:
    with pytest.raises(Failure, match="not enough memory .* lower decoding.beam"):
        translator(vocab, replace(DECODING, beam=10**13)).translate(["red dog"])
