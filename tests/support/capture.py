"""What pytest's capsys and capfd are: texts that a test has written."""

import pytest

Capture = pytest.CaptureFixture[str]


def read_errors(capture: Capture) -> list[str]:
    """The lines written to stderr since the last look."""
    return capture.readouterr().err.splitlines()


def read_stderr(capture: Capture) -> str:
    """What was written to stderr since the last look."""
    return capture.readouterr().err
