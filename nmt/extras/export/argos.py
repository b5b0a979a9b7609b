"""Packages that Argos Translate and LibreTranslate install: a zip of a CTranslate2 model, the
SentencePiece model and what they are called.

Argos splits a text into sentences, encodes each with the one SentencePiece model, searches with a beam of
4 and a length penalty of 0.2, and decodes. So a model with two vocabularies, or one that wants a tag in
front of its source, cannot be packed.
"""

import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from nmt.checkpoint.checkpoint import Checkpoint
from nmt.extras.export.export import export
from nmt.extras.export.parity import Agreement
from nmt.languages import name_language
from nmt.system.errors import UserError
from nmt.system.files import replace_file
from nmt.system.output_folder import check_replaceable_file
from nmt.system.run_folder import CARD_FILE, VOCAB_FILE

SUFFIX = ".argosmodel"
METADATA = "metadata.json"
PACKAGE_VERSION, ARGOS_VERSION = "1.0", "1.9.0"  # the first Argos that reads such a package
MODEL_FILES = ("model.bin", "config.json", "shared_vocabulary.json")
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # no clock's time


def export_argos(
    checkpoint: Checkpoint,
    out: Path,
    quantization: str,
    lines: Sequence[str],
    is_forced: bool,
) -> Agreement:
    """Write the file `out`, or raise and change nothing."""
    check_packable(checkpoint, out, is_forced)
    src, tgt = checkpoint.config.data.src, checkpoint.config.data.tgt
    metadata = {
        "package_version": PACKAGE_VERSION,
        "argos_version": ARGOS_VERSION,
        "from_code": src,
        "from_name": name_language(src),
        "to_code": tgt,
        "to_name": name_language(tgt),
    }
    with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".argos-") as name:
        folder = Path(name) / "model"
        agreement = export(checkpoint, "argos", folder, quantization, lines)
        members = {METADATA: json.dumps(metadata, indent=2).encode()}
        members |= {f"model/{file}": (folder / file).read_bytes() for file in MODEL_FILES}
        members["sentencepiece.model"] = (folder / VOCAB_FILE).read_bytes()
        members["README.md"] = (folder / CARD_FILE).read_bytes()
    with replace_file(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as package:
        for member, content in members.items():
            entry = zipfile.ZipInfo(f"translate-{src}_{tgt}-nmt/{member}", LONG_AGO)
            package.writestr(entry, content)
    return agreement


def check_packable(checkpoint: Checkpoint, out: Path, is_forced: bool) -> None:
    config = checkpoint.config
    reason = None
    if not config.vocab.joint:
        reason = "source and target have vocabularies of their own, and a package has room for one"
    elif config.data.train_tags or config.decoding.tag is not None:
        reason = "its sources begin with tags, which Argos does not put there"
    if reason is not None:
        raise UserError(f"--to argos: {checkpoint.path}: {reason}; use --to ctranslate2")
    if out.suffix != SUFFIX:
        raise UserError(f"{out}: Argos reads files called NAME{SUFFIX}; give such an -o")
    if not is_forced:
        check_replaceable_file(out, "an Argos package", [METADATA])
