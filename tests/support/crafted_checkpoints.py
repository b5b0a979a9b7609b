"""Checkpoints of a stranger: a run whose newest checkpoint of two has one thing wrong, sealed anew
where a malicious author would, so that digests agree.
"""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import STATE, write

from nmt.checkpoint.tensors import MAX_HEADER_BYTES
from nmt.system.files import read_json, seal
from nmt.system.run_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VOCAB_FILE,
    RunFolder,
)
from nmt.system.strict_json import Fields
from support.crafted_bpe import craft_model
from support.hunting import READ, REFUSED, Case, Change

OLDER, NEWEST = 7, 9  # steps


def write_run(folder: Path) -> None:
    for step in (OLDER, NEWEST):
        write(RunFolder(folder).checkpoint(step), step, replace(STATE, step=step))


def find_canary(checkpoint: Path) -> Path:
    """The file that a payload would make, beside the checkpoints of a run."""
    return checkpoint.parent.parent / "executed"


# ---- each changes a folder and leaves it sealed as its author would -----------------------------------------------


@dataclass
class Payload:
    """Makes a file when unpickled."""

    path: Path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def content(name: str, data: bytes | Callable[[Path], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data(folder))
        if name != MANIFEST_FILE:
            seal(folder)

    return change


def text(name: str, old: str, new: str) -> Change:
    def edit(folder: Path) -> bytes:
        before = (folder / name).read_text()
        assert before.count(old) == 1, before
        return before.replace(old, new).encode()

    return content(name, edit)


def edit_json(name: str, edit: Callable[[Fields], Any]) -> Change:
    def change(folder: Path) -> None:
        values = read_json(folder / name)
        edit(values)
        (folder / name).write_text(json.dumps(values))
        if name != MANIFEST_FILE:
            seal(folder)

    return change


def state(**values: Any) -> Change:
    return edit_json(STATE_FILE, lambda before: before.update(values))


def manifest(edit: Callable[[Fields], Any]) -> Change:
    return edit_json(MANIFEST_FILE, edit)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any], name: str = MODEL_FILE) -> Change:
    def change(folder: Path) -> None:
        values = {key: value.clone() for key, value in load_file(folder / name).items()}
        edit(values)
        save_file(values, folder / name)
        seal(folder)

    return change


def header(values: Fields) -> Change:
    """Another header before the same data: other values for one tensor."""

    def edit(folder: Path) -> bytes:
        text, data = split_model(folder)
        entries = json.loads(text)
        entries[BIAS] |= values
        return framed(json.dumps(entries).encode()) + data

    return content(MODEL_FILE, edit)


def spaced_header(folder: Path) -> bytes:
    """A header that ends with more spaces than any model needs; the format allows them."""
    text, data = split_model(folder)
    return framed(text.ljust(MAX_HEADER_BYTES + 8)) + data


def split_model(folder: Path) -> tuple[bytes, bytes]:
    """The header, which is JSON, and the data."""
    data = (folder / MODEL_FILE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def sparse(name: str, start: bytes, size: int) -> Change:
    """A file of any size that takes no room on the disk; the manifest knows the size."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)
        if name != MANIFEST_FILE:
            manifest(lambda entries: entries[name].update(size=size))(folder)

    return change


def zip_bomb(_: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", bytes(10**8))
    return packed.getvalue()


def pickled(folder: Path) -> bytes:
    return pickle.dumps({"model": Payload(find_canary(folder))})


def saved_by_torch(folder: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"model": Payload(find_canary(folder))}, file)
    return file.getvalue()


def yaml_of_objects(folder: Path) -> bytes:
    arguments = f"[{find_canary(folder)}, w]"
    return f"name: !!python/object/apply:builtins.open {arguments}\n".encode()


def yaml_of_aliases(_: Path) -> bytes:
    lines = ["a: &a [x,x,x]"]
    for before, letter in pairwise("abcdefghijklmnopqrstu"):
        lines.append(f"{letter}: &{letter} [*{before},*{before},*{before}]")
    return "\n".join(lines).encode()


def layer_names(n: int) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return framed(json.dumps({f"encoder.{i}.x": entry for i in range(n)}).encode())


BIAS = "decoder.0.feed_forward.inner.bias"
N_BYTES = 4 * 10**10
ENTRY = {"dtype": "F32", "shape": [10**10], "data_offsets": [0, N_BYTES]}
HUGE = framed(json.dumps({"tgt_embedding.weight": ENTRY}).encode())
LONG_HEADER = (10**8).to_bytes(8, "little") + b"{}"
MANY_DIGITS = b'{"x": {"sha256": "", "size": ' + b"9" * 5000 + b"}}"

# The file that the one line must name -> the cases: name -> what is done
OF_CONFIG: dict[str, Change] = {
    "d_model": text(CONFIG_FILE, "d_model: 8", "d_model: 1000000"),
    "n_layers 2^62": text(CONFIG_FILE, "n_layers: 1", f"n_layers: {2**62}"),
    "d_k": text(CONFIG_FILE, "d_k: null", f"d_k: {2**62}"),
    "sinusoids, which no file bounds": text(
        CONFIG_FILE, "max_positions: 1024", "max_positions: 1000000000000"
    ),
    "NaN": text(CONFIG_FILE, "dropout: 0.1", "dropout: .nan"),
    "what is almost a number": text(CONFIG_FILE, "d_model: 8", f"d_model: {'8' * 60_000}x"),
    "another file": text(CONFIG_FILE, "name: run", "name: run\nextends: /etc/passwd"),
    "objects": content(CONFIG_FILE, yaml_of_objects),
    "aliases": content(CONFIG_FILE, yaml_of_aliases),
    "brackets": content(CONFIG_FILE, b"name: " + b"[" * 5000 + b"]" * 5000),
    "1 TB": sparse(CONFIG_FILE, b"name: x\n", 10**12),
}
OF_MODEL: dict[str, Change] = {
    "100,000 layers in the config": text(CONFIG_FILE, "n_layers: 1", "n_layers: 100000"),
    "one layer less": text(CONFIG_FILE, "n_layers: 1", "n_layers: 2"),
    "10^10 elements": sparse(MODEL_FILE, HUGE, len(HUGE) + N_BYTES),
    "10^10 elements, no data": content(MODEL_FILE, HUGE),
    "fp64": tensors(lambda t: t.update({BIAS: t[BIAS].double()})),
    "one more": tensors(lambda t: t.update(extra=torch.ones(1))),
    "one more, to mock the terminal": tensors(lambda t: t.update({"\x1b[2J\n": torch.ones(1)})),
    "one less": tensors(lambda t: t.pop(BIAS)),
    "another shape": tensors(lambda t: t.update({BIAS: t[BIAS][None]})),
    "a header of 100 MB": sparse(MODEL_FILE, LONG_HEADER, 10**8 + 8),
    "a header of many spaces": content(MODEL_FILE, spaced_header),
    "a header of 2^63 bytes": content(MODEL_FILE, (2**63).to_bytes(8, "little") + b"{}"),
    "a header of 100,000 layers": content(MODEL_FILE, lambda _: layer_names(100_000)),
    "overlap": header({"data_offsets": [0, 48]}),
    "beyond the end": header({"data_offsets": [2**40, 2**40 + 48]}),
    "a nested header": content(MODEL_FILE, framed(b"[" * 5000)),
    "pickle": content(MODEL_FILE, pickled),
    "torch.save": content(MODEL_FILE, saved_by_torch),
    "zip bomb": content(MODEL_FILE, zip_bomb),
    "more pieces": content(VOCAB_FILE, craft_model()),
}
OF_OPTIMIZER: dict[str, Change] = {
    "averages": text(CONFIG_FILE, "ema: null", "ema: 0.9"),
    "many steps": tensors(lambda t: t.update({f"step.{BIAS}": torch.ones(3)}), OPTIMIZER_FILE),
    "pickle": content(OPTIMIZER_FILE, pickled),
    "not in the manifest": manifest(lambda m: m.pop(OPTIMIZER_FILE)),
}
OF_VOCAB: dict[str, Change] = {
    "pickle": content(VOCAB_FILE, pickled),
    "empty": content(VOCAB_FILE, b""),
    "1 TB": sparse(VOCAB_FILE, b"", 10**12),
    "not in the manifest": manifest(lambda m: m.pop(VOCAB_FILE)),
}
OF_STATE: dict[str, Change] = {
    "negative step": state(step=-1),
    "step of another folder": state(step=8),
    "true for a number": state(step=True),
    "NaN": state(elapsed_s=float("nan")),
    "huge": state(tokens_seen=10**4000),
    "no cursor": edit_json(STATE_FILE, lambda values: values.pop("cursor")),
    "key to mock the terminal": state(**{"\x1b[2J\n": 1}),
    "a list": content(STATE_FILE, b"[1]"),
    "nested": content(STATE_FILE, b"[" * 100_000),
    "1 TB": sparse(STATE_FILE, b"{}", 10**12),
    "half an average": state(averaged=["x"]),
}
OF_MANIFEST: dict[str, Change] = {
    "a pickle": content("extra.pt", pickled),
    "../": manifest(lambda m: m.update({"../../outside": m.pop(VOCAB_FILE)})),
    "absolute": manifest(lambda m: m.update({"/etc/passwd": m[VOCAB_FILE]})),
    "NUL in a name": manifest(lambda m: m.update({"a\0b": m[VOCAB_FILE]})),
    "nested": manifest(lambda m: m.update({VOCAB_FILE: {"sha256": {}, "size": [{}]}})),
    "negative size": manifest(lambda m: m[VOCAB_FILE].update(size=-1)),
    "5,000 digits": content(MANIFEST_FILE, MANY_DIGITS),
    "no digest": manifest(lambda m: m[VOCAB_FILE].update(sha256="0")),
    "deep": content(MANIFEST_FILE, b"[" * 500_000),
    "1 GB": sparse(MANIFEST_FILE, b"{}", 10**9),
    "none": lambda folder: (folder / MANIFEST_FILE).unlink(),
}
TABLES = {
    CONFIG_FILE: OF_CONFIG,
    MODEL_FILE: OF_MODEL,
    OPTIMIZER_FILE: OF_OPTIMIZER,
    VOCAB_FILE: OF_VOCAB,
    STATE_FILE: OF_STATE,
    MANIFEST_FILE: OF_MANIFEST,
}


def unnamed_files(folder: Path) -> None:
    for name in ("model.pt", "pytorch_model.bin", "optimizer.pkl"):
        (folder / name).write_bytes(pickled(folder))


def linked_folder(folder: Path) -> None:
    elsewhere = folder.parent.parent / folder.name
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)


HARMLESS: dict[str, Change] = {
    "nothing": lambda folder: None,
    "files that nothing names": unnamed_files,
    "a link to a whole folder": linked_folder,
}


def in_newest(change: Change) -> Change:
    def change_run(folder: Path) -> None:
        change(RunFolder(folder).checkpoint(NEWEST))

    return change_run


def list_cases() -> list[Case]:
    """Cases of a run's folder, the harmless ones first."""
    cases = [Case(name, in_newest(change), READ) for name, change in HARMLESS.items()]
    for file, table in TABLES.items():
        cases += [
            Case(f"{file}: {name}", in_newest(change), REFUSED, file)
            for name, change in table.items()
        ]
    return cases
