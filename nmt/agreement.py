"""Whether things that are opened together belong together: models, vocabularies, training data.

Every command that opens more than one thing checks it here, so that a mismatch is the same one-line message
everywhere. What does not record its properties matches anything, such as a model whose tags choose the
language.
"""

from pathlib import Path
from typing import Literal

from nmt.config import DataConfig
from nmt.system.errors import UserError

Property = Literal["direction", "BPE model", "training data"]
# What a published model has for languages that it does not name.
UNNAMED = ("src", "tgt")
VALUE_SHOWN = 16  # characters of a digest


def check_agreement(
    what: Property,
    name: Path | str,
    value: str | None,
    other_name: Path | str,
    other_value: str | None,
    remedy: str,
) -> None:
    """Raise UserError if both values are known and differ."""
    if None not in (value, other_value) and value != other_value:
        raise UserError(
            f"{name}: its {what} is {value:.{VALUE_SHOWN}}, but that of {other_name} is "
            f"{other_value:.{VALUE_SHOWN}}; {remedy}"
        )


def find_direction(data: DataConfig) -> str | None:
    """Return what a model translates, such as en-de; None if tags choose the languages, or if it is
    not known.
    """
    languages = data.src, data.tgt
    if data.has_tags_only or languages == UNNAMED:
        return None
    # en_US and en-GB are en
    names = [language.lower().replace("_", "-").partition("-")[0] for language in languages]
    return "-".join(names)


def check_sides(src: str | None, tgt: str | None, name: str, direction: str | None) -> None:
    """Refuse a file for a side whose name ends in the other side's language, such as text.de for en-de."""
    if direction is None:
        return
    src_language, tgt_language = direction.split("-")
    sides = (src, src_language, tgt_language), (tgt, tgt_language, src_language)
    for path, language, other in sides:
        endings = Path(path or "").suffixes
        if f".{other}" in endings and f".{language}" not in endings:
            raise UserError(
                f"{path}: its name says {other}, but {name} translates {direction}, and {language} is "
                "needed here; give the right file or model, or rename the file"
            )
