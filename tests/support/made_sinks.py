"""Sinks of an installed package, such as a user may write, that behave well or as badly as they can."""

import sys
from pathlib import Path

SINKS = '''
import json
import time
from pathlib import Path


class Keeps:
    """Writes down what it gets."""

    def __init__(self, run):
        self.file = open(Path(run) / "kept.jsonl", "w")

    def write(self, line):
        self.file.write(json.dumps(line) + "\\n")

    def close(self):
        self.write({"closed": True})
        self.file.close()


class Raises:
    def __init__(self, run):
        self.tried = open(Path(run) / "tried", "w")

    def write(self, line):
        self.tried.write("x")
        raise RuntimeError("the dog ate line\\n" + str(line.get("step")))

    def close(self):
        self.tried.close()


class Stumbles(Raises):
    """Fails now and then."""

    def write(self, line):
        self.tried.write("x")
        if line["kind"] == "valid":
            raise ConnectionError("nobody answers")


class Hangs(Raises):
    def write(self, line):
        time.sleep(3600)


class Ends(Raises):
    def write(self, line):
        raise SystemExit("enough")


class CannotBeMade(Raises):
    def __init__(self, run):
        self.file = open("/dev/full", "w")
        self.file.write("figures")
        self.file.flush()
'''
ENTRY_POINTS = """[nmt.sinks]
keeps = made_sinks_of_user:Keeps
raises = made_sinks_of_user:Raises
stumbles = made_sinks_of_user:Stumbles
hangs = made_sinks_of_user:Hangs
ends = made_sinks_of_user:Ends
cannot-be-made = made_sinks_of_user:CannotBeMade
"""


def install_sinks(site: Path) -> None:
    """Install the package into a folder on sys.path."""
    (site / "made_sinks_of_user.py").write_text(SINKS)
    info = site / "made_sinks_of_user-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: made-sinks-of-user\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    assert str(site) in sys.path
