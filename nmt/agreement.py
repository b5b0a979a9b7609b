"""Whether things that are opened together belong together: models, vocabularies, training data.

Every command that opens more than one thing checks it here, so that a mismatch is the same one-line message
everywhere. What does not record its properties matches anything, such as a model whose tags choose the
language.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nmt.config import CorpusConfig, DataConfig
from nmt.languages import find_code, read_names
from nmt.system.errors import UserError
from nmt.system.files import COMPRESSED

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
    return "-".join(map(find_code, languages))


def check_sides(
    sources: Sequence[str | None],
    targets: Sequence[str | None],
    outputs: Sequence[str | None],
    what: str,
    direction: str | None,
    remedy: str = "give the right file or model, or rename the file",
    prefix: str = "",
) -> None:
    """Refuse a file whose name ends in another language than that of its side, such as text.de as the source
    of en-de. The name of translations may also have the source's: text.en.out. `what` precedes the direction
    in the message. With a `prefix`, which with src or tgt precedes the file, only the end of a name counts.
    """
    if direction is None:
        return
    src, tgt = direction.split("-")
    languages = {src, tgt}
    if languages <= read_names().keys():  # otherwise en may be their eng
        languages.update(read_names())
    for side, paths, allowed in (
        ("src", sources, [src]),
        ("tgt", targets, [tgt]),
        ("", outputs, [tgt, src]),
    ):
        for path in paths:
            endings = [end[1:] for end in Path(path or "").suffixes if end not in COMPRESSED]
            if prefix:  # the end alone: mono.de.out may be sources that a machine wrote
                endings = endings[-1:]
            named = languages.intersection(endings)
            if named and named.isdisjoint(allowed):
                name = f"{prefix}{side}: {path}" if prefix else path
                raise UserError(
                    f"{name}: its name says {max(named)}, but {what} {direction}, and {allowed[0]} is "
                    f"needed here; {remedy}"
                )


def check_corpus(prefix: str, corpus: CorpusConfig | None, data: DataConfig) -> None:
    """Refuse a corpus with a file or a member whose name is that of another side. With a tag it may have
    other languages. `prefix` is what the user writes before src and tgt: data.test. or --test-.
    """
    if corpus is None or corpus.tag is not None:
        return
    remedy = (
        "swap src and tgt, correct data.src and data.tgt (--languages of nmt-init), rename the file, or "
        "give a corpus of another language a tag"
    )
    check_sides(
        [corpus.src], [corpus.tgt], [], "the languages are", find_direction(data), remedy, prefix
    )
