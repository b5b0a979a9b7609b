"""scripts/diversify.py: what it trains on. Training is exchanged for the preparation of the text, averaging for
nothing, and a translation is its source after "so: "; the rest is real.
"""

import os
import subprocess
import sys
from pathlib import Path

from support.checkout import ROOT
from support.text_lines import join_lines
from support.toy_corpus import sentences, write_splits

from nmt.system.files import read_json

BIN = Path(sys.executable).parent
FAKES = {
    "nmt-launch": f'exec {BIN}/nmt-prepare "$@"',
    "nmt-average": "",
    "nmt-translate": 'echo "$1" >> translators; sed "s/^/so: /" "$3" > "$5"',
}
SMALL = ["vocab.size=80", "data.workers=1", "data.root=text"]


def diversify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    fakes = folder / "bin"
    fakes.mkdir()
    for name, script in FAKES.items():
        (fakes / name).write_text(f"#!/bin/bash\n{script}\n")
        (fakes / name).chmod(0o755)
    (folder / "text").mkdir()
    write_splits(folder / "text", train=300, valid=20, test=20)
    return subprocess.run(
        [sys.executable, ROOT / "scripts/diversify.py", "--config", "multi30k.yaml", *words],
        cwd=folder,
        env=os.environ | {"PATH": f"{fakes}:{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def test_the_last_model_learns_from_the_text_and_both_translations(tmp_path: Path) -> None:
    done = diversify(tmp_path, *SMALL, "out=runs/last")
    assert done.returncode == 0, done.stderr

    models = (tmp_path / "translators").read_text().split()
    assert models == ["runs/last-forward/average", "runs/last-backward/average"]
    english, german = zip(*sentences(300, 0), strict=True)
    text = tmp_path / "runs" / "last-text"
    assert (text / "0.de").read_text() == join_lines(f"so: {line}" for line in english)
    assert (text / "0.en").read_text() == join_lines(f"so: {line}" for line in german)

    ledger = read_json(tmp_path / "runs/last/store/ledger.json")
    written = [str(text / name) for name in ("0.de", "0.en")]
    learned = [corpus["files"] for corpus in ledger["corpora"] if corpus["split"] == "train"]
    assert [[file["name"] for file in files] for files in learned] == [
        ["train.en", "train.de"],
        ["train.en", written[0]],
        [written[1], "train.de"],
    ]


def test_the_second_helper_learns_the_other_direction(tmp_path: Path) -> None:
    assert diversify(tmp_path, *SMALL, "out=runs/last").returncode == 0
    asked = read_json(tmp_path / "runs/last-backward/store/ledger.json")["settings"]["data"]
    assert (asked["src"], asked["tgt"]) == ("de", "en")
    assert asked["train"] == [{"src": "train.de", "tgt": "train.en"}]
    assert asked["valid"] == {"src": "valid.de", "tgt": "valid.en"}


def test_text_that_is_not_in_files_of_lines_is_refused(tmp_path: Path) -> None:
    done = diversify(tmp_path, *SMALL, "data.train=[{file: pairs.tsv}]")
    assert done.returncode == 2
    assert "give files of lines" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_mistake_in_a_setting_ends_it_before_anything_is_trained(tmp_path: Path) -> None:
    done = diversify(tmp_path, *SMALL, "training.stepz=1")
    assert done.returncode == 2
    assert "stepz" in done.stderr
    assert not (tmp_path / "runs").exists()
