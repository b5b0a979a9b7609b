"""What a user may have changed is never replaced, unless it is forced."""

from pathlib import Path

from pytest import fixture, mark, raises

from nmt.system.errors import UserError
from nmt.system.files import seal
from nmt.system.output_folder import (
    MAX_CARD_BYTES,
    check_replaceable,
    is_unedited_card,
    sign_card,
)
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE


@fixture
def out(tmp_path: Path) -> Path:
    """What a command wrote: one file, and the manifest."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "part").write_text("1")
    seal(folder)
    return folder


def check(out: Path, is_forced: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    check_replaceable(out, "a result", lambda names: names == {"part"}, is_forced, inputs)


def test_only_what_the_command_wrote(out: Path, tmp_path: Path) -> None:
    check(out)
    (out / ".0123456789abcdef.4711.tmp").touch()  # of a command that was killed
    check(out)
    check(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")
    (out / "notes.txt").write_text("mine")
    for is_forced in (False, True):
        with raises(UserError, match=r"than a result \(notes.txt\); choose another -o DIR; no"):
            check(out, is_forced)
        with raises(UserError, match="notes.txt: is a file; give a folder"):
            check(out / "notes.txt", is_forced)
    with raises(UserError, match="contains the input"):
        check(out, is_forced=True, inputs=(out / "part",))
    (out / "notes.txt").unlink()
    (out / MANIFEST_FILE).write_text("{}")
    for is_forced in (False, True):
        with raises(UserError, match="contains something other than a result"):
            check(out, is_forced)


@mark.parametrize("name", ["export.json", CARD_FILE])
def test_not_what_another_command_or_the_user_wrote(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    if name != CARD_FILE:
        seal(tmp_path)
    for is_forced in (False, True):
        with raises(UserError, match=f"something other than a result .{name}.; choose"):
            check(tmp_path, is_forced)


def test_a_signed_card_until_somebody_edits_it(out: Path) -> None:
    card = out / CARD_FILE
    card.write_text(sign_card("# Title\n\ntext\n"))
    assert is_unedited_card(card)
    check(out)
    edits = [
        sign_card("# Title\n").replace("Title", "Titel"),
        sign_card("text\n") + "mine\n",
        "# My own\n",
        "",
        "\n",
        sign_card("text\n").replace("\n", "\r\n"),
        sign_card("text\n").removesuffix("\n"),
    ]
    room = MAX_CARD_BYTES - len(sign_card("\n"))
    for n in (room, room + 1):
        card.write_text(sign_card("x" * n + "\n"))
        assert is_unedited_card(card) == (n == room)
    for text in edits:
        card.write_text(text, newline="")
        assert not is_unedited_card(card)
        with raises(UserError, match="README.md: was edited"):
            check(out)
    check(out, is_forced=True)
    card.unlink()
    card.symlink_to(out / "part")
    with raises(UserError, match="README.md: was edited"):
        check(out)


def test_a_card_in_the_manifest_until_somebody_edits_it(out: Path) -> None:
    card = out / CARD_FILE
    card.write_text("text\n")
    seal(out)
    check(out)
    card.write_text("mine\n")
    with raises(UserError, match="README.md: was edited"):
        check(out)
    card.unlink()
    check(out)
