"""Tensor files: those that the library safetensors would write, byte for byte where it is
deterministic itself.
"""

from pathlib import Path

import torch
from pytest import mark, raises
from safetensors import safe_open
from safetensors.torch import load_file, save
from support.small_disk import SmallDisk

from nmt.system.tensor_files import write_tensors

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3).T,
    "a é": torch.tensor(1.5),
    "c": torch.zeros(0, 4),
    "half": torch.randn(3).half(),
    "bf16": torch.randn(2, 2).bfloat16(),
}


@mark.parametrize("metadata", [None, {"format": "pt"}, {"config": 'x: "é"\n'}])
def test_the_bytes_are_those_of_the_library(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    write_tensors(tmp_path / "x", TENSORS, metadata)
    expected = save({name: t.contiguous() for name, t in TENSORS.items()}, metadata)
    assert (tmp_path / "x").read_bytes() == expected


def test_it_reads_back(tmp_path: Path) -> None:
    metadata = {"format": "pt", "config": "x", "more": "y"}
    write_tensors(tmp_path / "x", TENSORS, metadata)
    for name, tensor in load_file(tmp_path / "x").items():
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == metadata and set(file.keys()) == set(TENSORS)


def test_equal_tensors_are_equal_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", TENSORS, {"a": "1", "b": "2"})
    write_tensors(tmp_path / "y", dict(reversed(TENSORS.items())), {"a": "1", "b": "2"})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_full_disk_is_an_error_of_the_system(small_disk: SmallDisk) -> None:
    with raises(OSError, match="No space left"):
        write_tensors(small_disk.path / "x", {"a": torch.zeros(1 << 20)})
