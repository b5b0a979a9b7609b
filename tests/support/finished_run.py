"""Trains a toy in this process, and reads what is in its run folder."""

from pathlib import Path

import torch
from safetensors.torch import load_file

import nmt.api
from nmt.config import RunConfig
from nmt.system.run_folder import RunFolder
from nmt.system.strict_json import Fields
from support.text_lines import read_json_lines


def train_toy(toy: Path, *settings: str) -> RunConfig:
    config = nmt.api.load_config(str(toy), list(settings))
    assert nmt.api.train(config) == 0
    return config


def read_lines(run: Path, *kinds: str) -> list[Fields]:
    """The lines of metrics.jsonl that are of these kinds; all if none is named."""
    lines = read_json_lines(RunFolder(run).metrics)
    return [line for line in lines if not kinds or line["kind"] in kinds]


def read_losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run, "train")}


def read_tensors(run: Path, step: int, *names: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: those of these files, or all."""
    folder, found = RunFolder(run).checkpoint(step), {}
    for name in names or ("model", "optimizer"):
        # copies, because the files are mapped and a test may overwrite them
        for key, value in load_file(folder / f"{name}.safetensors").items():
            found[key] = value.clone()
    return found


def list_differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
