"""Whether a command may replace what is where its output goes: only its own earlier output. --force
replaces a model card that was edited, and nothing else that nmt did not write.

A file is known by a mark near its beginning. A folder is known by its manifest: nothing lies beside
what it lists, and the model card is as nmt wrote it. A card that changes after the manifest was written
carries its own digest in its last line instead.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from nmt.system.errors import UserError
from nmt.system.files import (
    check_writable,
    digest_file,
    list_own_names,
    open_plain_file,
    read_bytes,
    read_manifest,
    restore_folder,
)
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE

SIGNATURE = "<!-- Written by nmt; once edited, it is left alone. sha256 of all above: {} -->\n"
MAX_CARD_BYTES = 1 << 20
BEGIN_BYTES = 1_000  # of a file, which hold its mark


def sign_card(card: str) -> str:
    """Add a last line by which `is_unedited_card` recognises the text."""
    return card + SIGNATURE.format(hashlib.sha256(card.encode()).hexdigest())


def is_unedited_card(path: Path) -> bool:
    """Whether the file is as `sign_card` made it: neither the user's own nor edited since."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        return False
    text = read_bytes(path).decode(errors="replace")
    above, _, _ = text.removesuffix("\n").rpartition("\n")
    return text == sign_card(f"{above}\n")


def check_replaceable_file(path: Path, kind: str, marks: Iterable[str]) -> None:
    """Refuse to write the file `path` if that is impossible, or would replace something else than
    `kind`, which has one of `marks` near its beginning.
    """
    check_writable(path)
    if not path.exists():
        return
    with open_plain_file(path) as file:
        begin = file.read(BEGIN_BYTES)
    if not any(mark.encode() in begin for mark in marks):
        raise UserError(f"{path}: exists and is not {kind}; choose another place, or move it away")


def check_replaceable(
    out: Path,
    kind: str,
    is_own: Callable[[Set[str]], bool],
    is_forced: bool,
    inputs: Iterable[Path],
) -> None:
    """Refuse to replace the folder `out`, unless it is empty or what the same command wrote.

    `is_own` judges the names in a folder's manifest. --force replaces an edited card too. An input
    is never replaced.
    """
    restore_folder(out)
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file; give a folder")
    for path in inputs:
        if path.resolve().is_relative_to(out):
            raise UserError(f"{out}: contains the input {path}; choose another -o DIR")
    others = list_own_names(out)
    if not others:
        return
    try:
        manifest = read_manifest(out)
    except UserError:
        manifest = {}
    if is_own(manifest.keys() - {CARD_FILE}):
        others -= manifest.keys() | {CARD_FILE, MANIFEST_FILE}
    if others:
        raise UserError(
            f"{out}: exists and contains something other than {kind} ({min(others)}); choose another -o "
            "DIR; nothing was changed"
        )
    card = out / CARD_FILE
    if is_forced or not os.path.lexists(card):
        return
    if not _is_own_card(card, manifest.get(CARD_FILE)):
        raise UserError(
            f"{card}: was edited, or was not written by nmt; move it away, choose "
            "another -o DIR, or replace the folder with --force; nothing was changed"
        )


def _is_own_card(card: Path, entry: dict[str, str] | None) -> bool:
    """Whether a card is as its folder's manifest says or, where that is silent, as its own last
    line says.
    """
    if entry is None:
        return is_unedited_card(card)
    return not card.is_symlink() and card.is_file() and digest_file(card) == entry["sha256"]
