"""Lines against brute force on bytes, in every packing and inside archives; damage is one line and
never silent.
"""

import io
import re
import zipfile
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch, mark, raises
from support.packing import pack, pack_archive, tar

from nmt.corpus.text_files import TextFile, decode_lines, read_line_blocks, read_lines
from nmt.system.errors import UserError

NOT_LINE_ENDS = ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\x1d", "\x1e", "\0", "\ufeff"]
PACKINGS = ["", ".gz", ".xz", ".bz2", ".zst"]
ARCHIVES = [".tar", ".tgz", ".tar.gz", ".txz", ".tar.xz", ".tbz2", ".tar.zst", ".zip"]


def lines_of(text: TextFile, size: int = 7) -> list[str]:
    lines: list[str] = []
    for raw, _ in read_line_blocks(text, size):
        texts, bad = decode_lines(raw, len(lines) + 1, text.name)
        assert not bad
        lines += texts
    return lines


def complaint(text: TextFile) -> str:
    with raises(UserError) as caught:
        lines_of(text)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(text.path.parent), "ROOT")


def brute(content: bytes) -> list[str]:
    lines = [
        re.sub(b"\r$(?!\n)", b"", line)
        for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ]
    return [line.decode() for line in (lines[:-1] if content.endswith(b"\n") else lines)]


# ---- lines ------------------------------------------------------------------------------------------------------


@mark.parametrize(
    "content, lines",
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"\n", [""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r", ["a"]),
        (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        *((f"a{c}b{c}\nc\n".encode(), [f"a{c}b{c}", "c"]) for c in NOT_LINE_ENDS),
    ],
)
def test_a_line_ends_with_newline_and_nothing_else(
    tmp_path: Path, content: bytes, lines: list[str]
) -> None:
    (tmp_path / "x").write_bytes(content)
    assert lines_of(TextFile(tmp_path / "x")) == lines


@given(
    st.lists(st.text("a é😀\r\n\u2028\u0085\v\0\ufeff", max_size=4), min_size=1), st.integers(1, 9)
)
def test_blocks_equal_brute_force(pieces: list[str], size: int) -> None:
    content = "\n".join(pieces).encode() or b"\n"
    raw = io.BytesIO(content).readlines()
    blocks = [decode_lines(raw[i : i + size], i + 1, "x") for i in range(0, len(raw), size)]
    assert [text for texts, _ in blocks for text in texts] == brute(content)
    assert not any(bad for _, bad in blocks)


@given(
    st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"") + b"\n"), min_size=1)
)
def test_a_line_is_complained_of_exactly_where_python_cannot_decode_it(raw: list[bytes]) -> None:
    texts, bad = decode_lines(raw, 5, "x")
    assert len(texts) == len(raw)
    for i, line in enumerate(raw):
        try:
            assert texts[i] == re.sub("\r?\n$", "", line.decode()) and i not in bad
        except UnicodeDecodeError as error:
            assert texts[i] == "" and bad[i].startswith(f"x:{i + 5}:{error.start + 1}: byte 0x")


@mark.parametrize("suffix", PACKINGS)
def test_packed_lines_equal_brute_force_and_the_share_grows_to_one(
    tmp_path: Path, suffix: str
) -> None:
    draw = Random(1)
    content = (
        "".join(draw.choice("ab é\n\n\r\u2028\u0085\v\f\0😀") for _ in range(20_000)).encode()
        + b"end"
    )
    file = tmp_path / f"x{suffix}"
    # Packed files may be joined
    file.write_bytes(pack(content[:9000], suffix) + pack(content[9000:], suffix))
    assert lines_of(TextFile(file), 1000) == brute(content)
    shares = [share for _, share in read_line_blocks(TextFile(file), 10)]
    assert shares == sorted(shares) and 0 < shares[0] <= shares[-1] == 1
    assert suffix or max(abs(share - i / len(shares)) for i, share in enumerate(shares, 1)) < 0.1


# ---- archives ---------------------------------------------------------------------------------------------------

MEMBERS = {
    "training/a.de-en.en": "one\u2028\ntwo\n" * 5000,
    "training/a.de-en.de": "eins\nzwei\n" * 5000,
    "last": "x",
}


@mark.parametrize("suffix", ARCHIVES)
def test_a_member_streams_from_its_archive(tmp_path: Path, suffix: str) -> None:
    inner = "training/b.en.gz"
    contents = {name: text.encode() for name, text in MEMBERS.items()} | {
        inner: pack(b"c\nd\n", inner)
    }
    path = tmp_path / f"wmt{suffix}"
    path.write_bytes(pack_archive(contents, path.name))
    for name, text in MEMBERS.items():
        assert lines_of(TextFile(path, name)) == text.removesuffix("\n").split("\n")
    assert lines_of(TextFile(path, inner)) == ["c", "d"]
    assert complaint(TextFile(path, "training/a.de-en.fr")) == (
        f"ROOT/wmt{suffix}: has no member 'training/a.de-en.fr'; give one of its 4 files, such as "
        "'training/a.de-en.en', 'training/a.de-en.de', 'training/b.en.gz'"
    )
    assert list(tmp_path.iterdir()) == [path]
    shares = [share for _, share in read_line_blocks(TextFile(path, "training/a.de-en.de"), 100)]
    assert shares == sorted(shares) and shares[-1] == 1


@mark.parametrize("suffix", PACKINGS[1:])
def test_a_packed_member_is_unpacked_and_a_leading_dot_does_not_matter(
    tmp_path: Path, suffix: str
) -> None:
    content = "".join(f"zeile {i}\n" for i in range(30_000)).encode()
    (tmp_path / "giga.tar").write_bytes(
        tar({f"./giga.en{suffix}": pack(content, suffix), "z": b""})
    )
    for name in (f"giga.en{suffix}", f"./giga.en{suffix}"):
        assert lines_of(TextFile(tmp_path / "giga.tar", name), 1000) == brute(content)
    assert complaint(TextFile(tmp_path / "giga.tar", "z")).startswith(
        "ROOT/giga.tar:z: is empty; it should hold"
    )


@mark.parametrize("suffix", [".tgz", ".tar.xz", ".tbz2"])
def test_damage_behind_the_member_is_found_too(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    packed = bytearray(pack(tar({"a": b"a\n", "b": Random(0).randbytes(300_000)}), suffix))
    path.write_bytes(packed)
    assert lines_of(TextFile(path, "a")) == ["a"]
    packed[-50_000] ^= 1
    path.write_bytes(packed)
    assert re.match(
        rf"ROOT/x{suffix}:a: is corrupt after line [01] \(", complaint(TextFile(path, "a"))
    )


def test_a_damaged_member_of_a_zip_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    packed = bytearray(pack_archive({"a": Random(0).randbytes(9_000).hex(" ").encode()}, "x.zip"))
    packed[4_000] ^= 1
    path.write_bytes(packed)
    assert complaint(TextFile(path, "a")).startswith("ROOT/x.zip:a: is corrupt after line 0 (")


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    packed = bytearray(pack_archive({"a": b"text\n"}, "x.zip"))
    packed[packed.rindex(b"PK\1\2") + 8] |= 1  # the flags in the directory at the end
    (tmp_path / "x.zip").write_bytes(packed)
    message = complaint(TextFile(tmp_path / "x.zip", "a"))
    assert message == "ROOT/x.zip:a: is encrypted; decrypt the archive"


@mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_two_members_of_one_name_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a", "first\n")
        archive.writestr("a", "second\n")
    message = complaint(TextFile(tmp_path / "x.zip", "a"))
    assert message == "ROOT/x.zip:a: occurs more than once in the archive; pack it again"


# ---- damage -----------------------------------------------------------------------------------------------------


@mark.parametrize("suffix", [*PACKINGS[1:], ".tgz", ".tar", ".zip"])
def test_a_cut_file_is_one_line_wherever_it_is_cut(tmp_path: Path, suffix: str) -> None:
    content = "".join(f"{Random(i).random()}\n" for i in range(5000)).encode()
    is_archive = suffix in ARCHIVES
    path, member = tmp_path / f"x.en{suffix}", "x.en" if is_archive else None
    packed = pack_archive({"x.en": content}, suffix) if is_archive else pack(content, suffix)
    if suffix == ".tar":
        packed = packed[: 512 + len(content)]  # a tar without its last padding is whole
    for length in (0, 1, 5, 17, 600, len(packed) // 2, len(packed) - 9, len(packed) - 1):
        path.write_bytes(packed[:length])
        name = re.escape(f"ROOT/x.en{suffix}" + (":x.en" if is_archive else ""))
        assert re.match(
            rf"{name}: (is corrupt after line \d+ \(.+\); download or compress it again|is empty;)",
            complaint(TextFile(path, member)),
        )


@mark.parametrize("suffix", PACKINGS[1:])
def test_a_damaged_second_part_is_not_taken_for_the_end(tmp_path: Path, suffix: str) -> None:
    part = bytearray(pack(b"a\n" * 9, suffix))
    (tmp_path / f"x{suffix}").write_bytes(part + part)
    assert lines_of(TextFile(tmp_path / f"x{suffix}")) == ["a"] * 18
    second = bytearray(part)
    second[0] ^= 1
    for damaged in (part + second, part + b"garbage", part + part[:-1], part + part[:9]):
        (tmp_path / f"x{suffix}").write_bytes(damaged)
        assert "corrupt after line" in complaint(TextFile(tmp_path / f"x{suffix}"))
    (tmp_path / "x.xz").write_bytes(pack(b"a\n", ".xz") + bytes(8))  # padding
    assert lines_of(TextFile(tmp_path / "x.xz")) == ["a"]


@mark.parametrize("suffix", PACKINGS[1:])
def test_text_named_as_if_packed_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_bytes(b"plain text\n" * 100)
    assert complaint(TextFile(tmp_path / f"x{suffix}")).startswith(
        f"ROOT/x{suffix}: is corrupt after line 0 ("
    )


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    assert (
        complaint(TextFile(tmp_path / "x")) == "ROOT/x: cannot be read (No such file or directory)"
    )
    assert complaint(TextFile(tmp_path)).endswith("cannot be read (Is a directory)")


def test_lines_are_counted_through_all_blocks(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.corpus.text_files.LINES_AT_ONCE", 2)
    (tmp_path / "x").write_bytes(b"a\nb\nc\nd\n\xff\n")
    with raises(UserError, match="x:5:1: byte 0xff"):
        list(read_lines(TextFile(tmp_path / "x")))
