"""What pytest's capsys and capfd are: texts that a test has written."""

import pytest

Capture = pytest.CaptureFixture[str]
