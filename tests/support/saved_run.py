"""A run folder with checkpoints and metrics that took no training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from pytest import TempPathFactory, fixture
from safetensors.torch import load_file
from test_checkpoint import STATE, write

from nmt.system.files import read_json
from nmt.system.run_folder import MODEL_FILE, STATE_FILE, RunFolder
from support.text_lines import join_lines


@fixture(scope="module", name="template")
def make_template(tmp_path_factory: TempPathFactory) -> Path:
    """Checkpoints after 3, 13, 14, 24 and 30 minutes."""
    folder = RunFolder(tmp_path_factory.mktemp("template") / "run")
    folder.checkpoints.mkdir(parents=True)
    write(folder.path.parent / "one")
    for step, minutes in ((10, 3.0), (20, 13.0), (30, 14.0), (40, 24.0), (50, 30.0)):
        write(folder.checkpoint(step), step, replace(STATE, step=step, elapsed_s=60 * minutes))
    return folder.path


@fixture(name="run")
def copy_template(template: Path, tmp_path: Path) -> RunFolder:
    """Those, of which four were validated."""
    shutil.copytree(template.parent, tmp_path, dirs_exist_ok=True)
    folder = RunFolder(tmp_path / "run")
    lines = [
        {"kind": "valid", "step": step, "bleu": bleu, "nll": nll}
        for step, bleu, nll in (
            (5, 99.0, 0.1),
            (10, 20.0, 3.0),
            (20, 22.0, 2.5),
            (40, 21.0, 2.0),
            (50, 22.0, 2.2),
        )
    ]
    folder.metrics.write_text(join_lines(map(json.dumps, lines)) + '{"kind": "valid", "st')
    return folder


def read_state(folder: Path) -> dict[str, object]:
    return read_json(folder / STATE_FILE)


def compute_mean(folders: list[Path]) -> dict[str, np.ndarray]:
    """Average by numpy, in float64."""
    files = [load_file(folder / MODEL_FILE) for folder in folders]
    return {
        name: np.average([file[name].double().numpy() for file in files], axis=0)
        for name in files[0]
    }
