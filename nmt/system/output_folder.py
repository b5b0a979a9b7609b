"""Whether a command may replace its output folder: only what the same command wrote there, or with
--force.

What the command wrote is known by the folder's manifest: nothing lies beside it, and the model card
is the one that it lists.
"""

import os
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from nmt.system.errors import UserError
from nmt.system.files import (
    digest_file,
    has_plain_file,
    list_own_names,
    read_manifest,
    write_json,
    write_text,
)
from nmt.system.run_folder import CARD_FILE, MANIFEST_FILE


def write_card(folder: Path, card: str) -> None:
    """Write README.md into a sealed folder, and its digest into the manifest. A kill in between
    leaves a card that counts as edited.
    """
    path = folder / CARD_FILE
    write_text(path, card)
    entry = {"sha256": digest_file(path), "size": path.stat().st_size}
    write_json(folder / MANIFEST_FILE, read_manifest(folder) | {CARD_FILE: entry})


def is_edited_card(folder: Path) -> bool:
    """Whether a sealed folder has a README.md other than the one that its manifest lists."""
    card = folder / CARD_FILE
    if not os.path.lexists(card):
        return False
    entry = read_manifest(folder).get(CARD_FILE)
    return entry is None or not has_plain_file(card) or digest_file(card) != entry["sha256"]


def check_replaceable(
    out: Path,
    kind: str,
    is_own: Callable[[Set[str]], bool],
    is_forced: bool = False,
    inputs: Iterable[Path] = (),
) -> None:
    """Refuse to replace the folder `out`, unless it is empty, `is_forced`, or what the same command
    wrote.

    `is_own` judges the names in a folder's manifest. --force never replaces an input.
    """
    if not os.path.lexists(out):
        return
    refusal = UserError(
        f"{out}: exists and contains something other than {kind}; choose another -o DIR, or replace it "
        "with --force; nothing was changed"
    )
    if not out.is_dir():
        raise refusal
    if is_forced:
        for path in inputs:
            if path.resolve().is_relative_to(out):
                raise UserError(f"{out}: contains the input {path}; choose another -o DIR")
        return
    names = list_own_names(out)
    if not names:
        return
    try:
        sealed = read_manifest(out).keys() - {CARD_FILE}
        is_edited = is_edited_card(out)
    except UserError:
        raise refusal from None
    if not is_own(sealed) or names - {CARD_FILE, MANIFEST_FILE} != sealed:
        raise refusal
    if is_edited:
        raise UserError(
            f"{out / CARD_FILE}: was edited, or was not written by nmt; move it away, choose "
            "another -o DIR, or replace the folder with --force; nothing was changed"
        )
