"""Exports and averages on a disk that fills up at any byte: one line, exit code 1, nothing left over,
and what was there before is untouched. nmt-prepare and nmt-train have tests of their own beside
their code.
"""

from pathlib import Path

import pytest
from support.needs import needs_package
from support.small_disk import SmallDisk
from support.soaking import IS_SOAK
from support.untrained import make_checkpoint, make_vocab

from nmt.commands.average import main as nmt_average
from nmt.commands.export import FORMAT_NAMES
from nmt.commands.export import main as nmt_export
from nmt.system.files import verify

NEEDS = {"ctranslate2": needs_package("ctranslate2"), "huggingface": needs_package("transformers")}
CASES = [pytest.param(to, marks=NEEDS.get(to, ())) for to in (*FORMAT_NAMES, "average")]
LEFT = range(0, 200_000, 4096) if IS_SOAK else (0, 4096, 20_000, 60_000)


@pytest.mark.parametrize("to", CASES)
def test_a_full_disk(
    to: str, small_disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path / "model", make_vocab(tmp_path))
    out = small_disk.path / "out"

    def run() -> int:
        if to == "average":
            return nmt_average([str(model), "-o", str(out)])
        return nmt_export([str(model), "--to", to, "-o", str(out)])

    codes = []
    for n_left in LEFT:
        ballast = small_disk.fill(n_left)
        capsys.readouterr()
        codes.append(run())
        last = capsys.readouterr().err.splitlines()[-1]
        ballast.unlink()
        if codes[-1]:
            assert codes[-1] == 1 and last.endswith("No space left on device"), last
            assert f"{out}" in last or f"{small_disk.path}/.out.tmp" in last, last
            assert not list(small_disk.path.iterdir())
        else:
            verify(out)
            break
    assert codes[0] == 1

    # what was there stays
    if not out.exists():
        assert run() == 0
    manifest = (out / "manifest.json").read_bytes()
    ballast = small_disk.fill(8192)
    assert run() == 1
    ballast.unlink()
    verify(out)
    assert (out / "manifest.json").read_bytes() == manifest
    assert [path.name for path in small_disk.path.iterdir()] == ["out"]
