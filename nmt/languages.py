"""English names of languages, for the people who choose one; a language that is not in the list is called
by its code.
"""

import functools
import json
import re
from pathlib import Path


@functools.cache
def read_names() -> dict[str, str]:
    names: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return names


def name_language(code: str) -> str:
    return read_names().get(code, code)


def find_code(language: str) -> str:
    """Return the code of a language that may be given by its name or with a country: French and fr_CA are fr."""
    code = re.split("[-_]", language.lower())[0]
    codes = {name.lower(): known for known, name in read_names().items()}
    return codes.get(code, code)
