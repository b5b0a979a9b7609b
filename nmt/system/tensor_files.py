"""Writes tensors in the format of safetensors: a JSON header, then the data.

The library of that name writes the keys of a header's metadata in any order, so that the same
tensors have another digest each time, and reports a full disk as an error without a number. Here
equal tensors and metadata are equal bytes, and errors are the operating system's.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nmt.system.files import open_plain_file

Tensors = dict[str, Tensor]  # by name, as a file has them
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
HEADER_ALIGNMENT = 8  # bytes; of the data in the file


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the file `path`, which must not exist. Widest types come first, then names decide."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    n_bytes = 0
    for name in names:
        tensor = tensors[name]
        offsets = [n_bytes, n_bytes + tensor.nbytes]
        n_bytes = offsets[1]
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with open_plain_file(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            data = tensors[name].detach().cpu().contiguous().flatten()
            file.write(data.view(torch.uint8).numpy().data)
