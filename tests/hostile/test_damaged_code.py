"""Bits do not depend on the cache of compiled code: a training ends with the same weights whatever has
become of it. Each case is a process with a cache folder of its own.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from pytest import fixture, importorskip, mark
from support.damages import DAMAGES, GARBAGE
from support.prepared_toy import prepare_toy

from nmt.config_files import format_config
from nmt.system.run_folder import MODEL_FILE, RunFolder

importorskip("numba", reason="numba is not installed; pip install '.[cpu]'")

TRAIN_AND_GO_ON = """
import shutil, sys
import nmt.api
config, out, *removed = sys.argv[1:]
for steps in (2, 4):
    settings = [f"out={out}", f"training.steps={steps}", "evaluation.bleu=false"]
    assert nmt.api.train(nmt.api.load_config(config, settings)) == 0
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
"""
WITHOUT_RIGHTS = [
    "setpriv",
    "--bounding-set",
    "-all",
    "--inh-caps",
    "-all",
]  # root may write anywhere
# Not such as leaves a file whole but for some bits of its machine code: that would be run.
KINDS = ("cut", "emptied", "garbled", "its end zeroed", "a pickle")


def train(folder: Path, caches: Path, *removed: Path, command: Sequence[str] = ()) -> str:
    """Train in a process with these caches, in two parts; returns the digest of the weights."""
    out = folder / f"run-{caches.name}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(caches), "OMP_NUM_THREADS": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    words = [sys.executable, "-c", TRAIN_AND_GO_ON, str(folder / "toy.yaml"), str(out)]
    done = subprocess.run(
        [*command, *words, *map(str, removed)], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    checkpoint = RunFolder(out).checkpoint(4)
    return hashlib.sha256((checkpoint / MODEL_FILE).read_bytes()).hexdigest()


@fixture(scope="module")
def folder(module_path: Path) -> Path:
    folder = module_path
    (folder / "toy.yaml").write_text(format_config(prepare_toy(folder)))
    return folder


@fixture(scope="module")
def expected(folder: Path) -> str:
    """The digest of an undisturbed training, which leaves all compiled code that one needs in `warm`."""
    numba = folder / "warm" / "nmt" / "numba"
    kept = os.environ.get("NUMBA_CACHE_DIR")
    if kept is not None and Path(kept).is_dir():
        shutil.copytree(kept, numba)  # so that most is compiled already
    for path in [folder / "warm", *(folder / "warm").rglob("*")]:
        path.chmod(0o700)
    return train(folder, folder / "warm")


def copy_caches(folder: Path, name: str) -> tuple[Path, Path]:
    shutil.copytree(folder / "warm", folder / name)
    return folder / name, folder / name / "nmt" / "numba"


@mark.soak  # three processes that load and compile; test_dropout.py damages code within one
def test_a_cache_that_is_removed_in_the_middle_changes_no_bit(folder: Path, expected: str) -> None:
    caches, numba = copy_caches(folder, "removed")
    assert train(folder, caches, numba) == expected
    assert not numba.exists()


@mark.soak  # compiles for half a minute
def test_a_cache_that_cannot_be_written_changes_no_bit(folder: Path, expected: str) -> None:
    caches, numba = copy_caches(folder, "read-only")
    command = WITHOUT_RIGHTS if os.geteuid() == 0 else []
    if command and not shutil.which(command[0]):
        pytest.skip("root can write everywhere, and there is no setpriv")
    for path in (numba, *numba.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert train(folder, caches, command=command) == expected


@mark.soak  # compiles for half a minute
@mark.parametrize("pattern", ["*.nbi", "*.nbc", "*fill_by_loop*"])
@mark.parametrize("kind", KINDS)
def test_damaged_code_changes_no_bit(kind: str, pattern: str, folder: Path, expected: str) -> None:
    caches, numba = copy_caches(folder, f"{kind} {pattern.strip('*.')}")
    damaged = [path for path in numba.rglob(pattern) if path.is_file()]
    assert damaged
    rng = Random(kind)
    for path in damaged:
        data = GARBAGE[kind] if kind in GARBAGE else DAMAGES[kind](path.read_bytes(), rng)
        path.write_bytes(data)
    assert train(folder, caches) == expected
    shutil.rmtree(caches)
