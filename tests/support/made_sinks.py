"""Sinks of an installed package, such as a user may write, that behave well or as badly as they can."""

import sys
from pathlib import Path

SINKS = '''
import json
import os
import sys
import time
from pathlib import Path


class Keeps:
    """Writes down what it gets, and who it is."""

    def __init__(self, run):
        self.file = open(Path(run) / "kept.jsonl", "w")
        self.write({"pid": os.getpid(), "group": os.getpgrp(), "nice": os.nice(0)})

    def write(self, line):
        self.file.write(json.dumps(line) + "\\n")
        self.file.flush()

    def close(self):
        self.write({"closed": True, "policy": os.sched_getscheduler(0)})


class Raises(Keeps):
    def write(self, line):
        raise RuntimeError("the dog ate line\\n" + str(line.get("step")))

    def __init__(self, run):
        pass

    def close(self):
        pass


class Hangs(Raises):
    def __init__(self, run):
        (Path(run) / "hangs.pid").write_text(str(os.getpid()))

    def write(self, line):
        while True:  # and takes the processor
            pass


class Ends(Raises):
    def write(self, line):
        print("x" * 1_000_000, file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)


class FillsDisk(Raises):
    def __init__(self, run):
        self.file = open(Path(run) / "disk" / "figures", "wb")

    def write(self, line):
        while True:
            self.file.write(bytes(1 << 16))
'''
ENTRY_POINTS = """[nmt.sinks]
keeps = made_sinks_of_user:Keeps
raises = made_sinks_of_user:Raises
hangs = made_sinks_of_user:Hangs
ends = made_sinks_of_user:Ends
fills-disk = made_sinks_of_user:FillsDisk
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
