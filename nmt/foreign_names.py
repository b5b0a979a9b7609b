"""What other toolkits call our settings and options. The one table of these names is foreign_names.json.

Errors about unknown settings use it, and docs/coming-from.md shows it. Where toolkits use one name for
different settings, the first row of the table counts.
"""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

# By the key in the table: whose names they are. `others` there are names of no toolkit in particular.
TOOLKITS = {
    "fairseq": "fairseq",
    "opennmt": "OpenNMT-py and eole",
    "marian": "Marian",
    "huggingface": "Hugging Face",
    "joeynmt": "JoeyNMT",
}


@dataclass(frozen=True)
class Counterpart:
    """Settings of ours, or an option of a command, and what each toolkit calls it."""

    ours: tuple[str, ...]
    note: str
    names: dict[str, tuple[str, ...]]  # by key of TOOLKITS, or `others`


def read_counterparts() -> list[Counterpart]:
    table = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    counterparts = []
    for row in json.loads(table):
        ours = tuple(row.pop("ours").split(", "))
        note = row.pop("note", "")
        names = {toolkit: tuple(listed.split(", ")) for toolkit, listed in row.items()}
        counterparts.append(Counterpart(ours, note, names))
    return counterparts


def explain_foreign_name(name: str, ending: str = "", section: str = "") -> str | None:
    """Say what another toolkit's setting or option is called here; None if no toolkit has this
    name. `ending` follows each setting, to show how it is written. Settings of `section` come first.
    """
    wanted = _normalize(name)
    found = [
        counterpart
        for counterpart in read_counterparts()
        if wanted in map(_normalize, chain(*counterpart.names.values()))
    ]
    found.sort(key=lambda counterpart: not counterpart.ours[0].startswith(section))
    return _describe(found[0], ending) if found else None


def _describe(counterpart: Counterpart, ending: str) -> str:
    # an option is written with the name of its command
    shown = [ours if " " in ours else ours + ending for ours in counterpart.ours]
    text = f"it is {' and '.join(shown)} here"
    if counterpart.note:
        text += f" ({counterpart.note})"
    return text


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
