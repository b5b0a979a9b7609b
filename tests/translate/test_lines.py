"""Lines as they come from a pipe, and the prefixes that go with them."""

import bz2
import gzip
import itertools
import lzma
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from pytest import mark, raises
from support.capture import Capture, read_errors

from nmt.system.errors import UserError
from nmt.translate.lines import LARGEST_CHUNK, MAX_LINE_BYTES, LineReader, add_prefixes, open_input


def read_pipe(data: bytes, sizes: Iterator[int]) -> LineReader:
    """What reads `data` from a pipe, into which it comes in such portions."""
    reader, writer = os.pipe()

    def feed() -> None:
        start = 0
        while start < len(data):
            start += os.write(writer, data[start : start + next(sizes)])
        os.close(writer)

    threading.Thread(target=feed, daemon=True).start()
    return LineReader(reader, "x")


@mark.parametrize(
    "data, lines",
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
            for chunk in read_pipe(data, itertools.repeat(size)).read_chunks()
            for line in chunk.lines
        ] == lines


def test_chunks_grow_keep_order_and_end() -> None:
    rng = Random(3)
    texts = [f"{n} {'x' * rng.randrange(80)}" for n in range(9_000)]
    data = "\n".join(texts).encode()
    sizes = (rng.choice((7, 4_000, 90_000)) for _ in itertools.count())
    for skip in (0, 1, 31, 32, 5_000, 9_000):
        chunks = list(read_pipe(data, sizes).read_chunks(skip))
        assert [line for chunk in chunks for line in chunk.lines] == texts[skip:]
        assert [chunk.first for chunk in chunks] == list(
            itertools.accumulate((len(chunk.lines) for chunk in chunks[:-1]), initial=skip + 1)
        )[: len(chunks)]
        assert all(len(chunk.lines) <= LARGEST_CHUNK and chunk.share == 0 for chunk in chunks)
        assert skip or len(chunks[0].lines) <= 32
    with raises(UserError, match="has 9,000 lines, fewer than the 9,001"):
        list(read_pipe(data, sizes).read_chunks(9_001))


def test_of_a_file_it_is_known_how_much_was_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("line\n" * 100)
    with open_input(str(tmp_path / "x")) as reader:
        assert reader.size == 500
        assert [chunk.share for chunk in reader.read_chunks()] == [0.32, 0.96, 1.0]


def test_lines_are_given_as_soon_as_they_come() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\nthi")
    chunks = LineReader(reader, "x").read_chunks()
    assert next(chunks).lines == ["first", "second"]
    os.write(writer, b"rd\n")
    assert next(chunks).lines == ["third"]
    os.close(writer)
    assert list(chunks) == []


def test_lines_that_are_not_utf8_are_named_and_counted(capsys: Capture) -> None:
    list(read_pipe(b"ok\n" + b"\xff\xff\n" * 50 + b"ok\n", itertools.repeat(99)).read_chunks())
    errors = read_errors(capsys)
    assert (
        len(errors) == 4
        and errors[0].startswith("warning: x:2:1: byte 0xff")
        and "x: 50 lines" in errors[3]
    )


def test_a_file_without_line_ends_is_an_error() -> None:
    chunks = read_pipe(
        b"one\n" + bytes(MAX_LINE_BYTES + 200_000), itertools.repeat(1 << 16)
    ).read_chunks()
    assert next(chunks).lines == ["one"]
    with raises(UserError, match="x:2: is longer than"):
        next(chunks)


@mark.parametrize(
    "n, message", [(300, None), (299, "ends after line 299"), (301, "has more lines .*300")]
)
@mark.parametrize("skip", [0, 150])
def test_each_prefix_goes_with_its_line(n: int, message: str | None, skip: int) -> None:
    lines = read_pipe(b"".join(b"%d\n" % i for i in range(300)), itertools.repeat(50)).read_chunks(
        skip
    )
    others = read_pipe(b"".join(b"p%d\n" % i for i in range(n)), itertools.repeat(33))
    found: list[tuple[str, str]] = []

    def go() -> None:
        for chunk in add_prefixes(lines, others, skip):
            found.extend(zip(chunk.lines, chunk.prefixes, strict=True))

    if message is None:
        go()
        assert len(found) == 300 - skip
    else:
        with raises(UserError, match=message):
            go()
    assert found and all(prefix == f"p{line}" for line, prefix in found)


@mark.parametrize(
    "tool, compress",
    [("gzip", gzip.compress), ("xz", lzma.compress), ("bzip2", bz2.compress)],
)
def test_compressed_bytes_are_refused_whatever_the_file_is_called(
    tool: str, compress: Callable[[bytes], bytes]
) -> None:
    data = compress(b"a red house\n" * 9)
    with raises(UserError, match=f"x: is compressed; decompress it first: {tool} -dc"):
        list(read_pipe(data, itertools.repeat(5)).read_chunks())
    (chunk,) = read_pipe(b"BZh is a text\n", itertools.repeat(5)).read_chunks()
    assert chunk.lines == ["BZh is a text"]
