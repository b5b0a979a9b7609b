"""The description of an export format. Each format is defined in a file of this folder and listed
in export.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.config import RunConfig
from nmt.data.vocab import Vocabulary
from nmt.export.parity import Engine
from nmt.model.transformer import Transformer

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Format:
    """How a model is written for another library, and loaded by that library to be compared."""

    library: str  # what loads it, by its name on the hub
    quantizations: Sequence[str]
    write: Callable[[Path, Transformer, Vocabulary, RunConfig, str], None]  # fills the folder
    load: Callable[[Path, RunConfig], Engine]
    explain: Callable[[RunConfig], str]  # how to use the export, for its card
    # For a format with a tokenizer of its own: raises if that disagrees with our vocabulary on any
    # of the lines of the source or of the target.
    check_tokenizer: Callable[[Path, Vocabulary, Sequence[str], Sequence[str]], None] | None = None
