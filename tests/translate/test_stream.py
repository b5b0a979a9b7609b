"""What an interrupted translation leaves is cut back to whole lines."""

from pathlib import Path

import pytest

from nmt.translate.stream import keep_whole_lines


@pytest.mark.parametrize(
    "text", [b"", b"a", b"a\n", b"a\nb", b"\n\n", b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20)]
)
def test_a_torn_line_is_cut_off(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(text)
    assert keep_whole_lines(str(path)) == text.count(b"\n")
    assert path.read_bytes() == text[: text.rfind(b"\n") + 1]
