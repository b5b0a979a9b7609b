"""What a test may need and a machine may lack: an optional package, a browser, or real text.

Without it the test is skipped, and the reason says what is missing and how to get it.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from pytest import mark

from support.checkout import ROOT

_BESIDE_CHECKOUT = ROOT.parent / "shared" / "data"
REAL_TEXT = Path(os.environ.get("NMT_TEST_DATA", _BESIDE_CHECKOUT))


def needs_text(folder: str) -> pytest.MarkDecorator:
    """Skip a test without this folder of real text, which is not ours to hand on."""
    path = REAL_TEXT / folder
    return mark.skipif(
        not path.is_dir(), reason=f"no real text in {path}; NMT_TEST_DATA names its parent folder"
    )


def needs_package(name: str, extra: str = "export") -> pytest.MarkDecorator:
    """Skip a test without this package of an extra."""
    return mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed; pip install '.[{extra}]'",
    )


def needs_chromium() -> pytest.MarkDecorator:
    """Skip a test without Chromium, which `browser.py` drives through playwright."""
    has_both = shutil.which("chromium") and importlib.util.find_spec("playwright")
    return mark.skipif(
        not has_both, reason="no chromium, or no playwright; install both, pip install '.[dev]'"
    )
