"""The door to nmt/engines/, which makes the core faster and may be missing."""

from types import ModuleType


def find_engines() -> ModuleType | None:
    """Return nmt/engines/choice.py, which chooses engines; None if nmt/engines/ is missing."""
    try:
        from nmt.engines import choice
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("nmt.engines"):
            raise
        return None
    return choice
