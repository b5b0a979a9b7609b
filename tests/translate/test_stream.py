"""What an interrupted translation leaves is cut back to whole lines."""

from pathlib import Path

from pytest import mark

from nmt.translate.stream import keep_whole_lines
from nmt.translate.translator import Translation


@mark.parametrize(
    "text", [b"", b"a", b"a\n", b"a\nb", b"\n\n", b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20)]
)
def test_a_torn_line_is_cut_off(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(text)
    assert keep_whole_lines(str(path)) == text.count(b"\n")
    assert path.read_bytes() == text[: text.rfind(b"\n") + 1]


def test_lines_are_kept_by_whole_chunks(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text, kept in ((b"1\n2\n3\n4\n5\n6\n7", b"1\n2\n3\n4\n5\n6\n"), (b"1\n2\n", b"")):
        path.write_bytes(text)
        assert keep_whole_lines(str(path), 3) == kept.count(b"\n")
        assert path.read_bytes() == kept


def test_what_ends_in_the_same_pieces_three_times_is_a_loop() -> None:
    for ids in ((5, 7, 8, 7, 8, 7, 8), (4, 3, 3, 3)):
        assert Translation("", 0.0, ids).is_loop
        assert not Translation("", 0.0, ids[-4:-1]).is_loop
        assert not Translation("", 0.0, (*ids, 2)).is_loop
