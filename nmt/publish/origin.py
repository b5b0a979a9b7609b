"""A model of other hands before it becomes one of ours: its settings, its tensors and what its ids stand for.

Files are a stranger's. Settings are refused one by one, by key and value, where this model cannot do what they ask for.
Tensors are taken by name, each once, and must have the shape that the settings imply, be numbers, and be as large in
the file as they claim; one that is left over is refused. A pickle is opened by torch's own reader of weights alone, and
whatever else it names becomes an inert object: nothing in it is executed.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nmt.checkpoint import MAX_HEADER_BYTES
from nmt.config import ModelConfig
from nmt.data.vocab import Vocab
from nmt.errors import UserError
from nmt.files import size_of

LARGEST = 2**31
SIMPLE = str | int | float | None
INERT = ("argparse.", "omegaconf.", "fairseq.", "numpy.", "typing.", "collections.", "enum.", "builtins.")


Matrices = tuple[Tensor, Tensor, Tensor]  # source, target, projection


class Inert:
    """Stands for any object of a pickle: it remembers what it was given and does nothing."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __setstate__(self, state: object) -> None:
        self.state = state


def size_at(path: Path) -> int:
    """The size of a plain file; links are followed, for the cache of the Hugging Face hub is made of them."""
    return size_of(path.resolve())


def unpickled(path: Path) -> dict[str, Any]:
    """The dict in a file of torch.save, its tensors still on the disk."""
    size = size_at(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise UserError(f"{path}: is compressed, which torch.save never does; use another copy")
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if foreign := sorted(name for name in named if not name.startswith(INERT)):
            raise UserError(f"{path}: names {ascii(foreign[0][:99])}, which no checkpoint needs; nothing was executed")
        stand_ins: list[Any] = [(type("Inert", (Inert,), {}), name) for name in named]
        with torch.serialization.safe_globals(stand_ins):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UserError:
        raise
    except zipfile.BadZipFile:
        raise UserError(f"{path}: no file of torch.save of 1.6 or newer; save it again with a newer one") from None
    except Exception as error:  # a stranger's pickle may fail in any way
        raise UserError(f"{path}: cannot be read: {ascii(str(error).partition(chr(10))[0][:199])[1:-1]}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no dict of tensors")
    return found


def plain(value: Any, depth: int = 6) -> Any:
    """A mapping for what was a namespace or one of omegaconf, and so within; what lies deeper than settings do is left
    out, for a stranger's objects may contain themselves."""
    if isinstance(value, Inert):
        value = value.__dict__.get("state")
        if isinstance(value, dict) and not {"_content", "_val"}.isdisjoint(value):  # omegaconf wraps each value
            return plain(value.get("_content", value.get("_val")), depth)
    if not isinstance(value, dict):
        return value
    return {str(key): plain(item, depth - 1) for key, item in value.items()} if depth and len(value) < 2000 else None


@dataclass(frozen=True)
class Settings:
    """What a model's own config says."""

    place: str
    values: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not 0 < value < LARGEST:
            raise UserError(f"{self.place}: {key} is {said(value)}; it must be a whole number, 1 or more")
        return value

    def check(self, key: str, allowed: tuple[Any, ...], why: str, default: Any = None) -> None:
        """Refuse any value but these; `default` is what holds where the key is missing."""
        value = self.values.get(key, default)
        if not isinstance(value, SIMPLE) or value not in allowed:
            raise UserError(f"{self.place}: {key} is {said(value)}, here it can only be "
                            f"{' or '.join(map(repr, allowed))}: {why}")

    def is_on(self, key: str, default: bool = False) -> bool:
        self.check(key, (True, False), "it is a switch", default)
        return bool(self.values.get(key, default))

    def dropout(self) -> float:
        """For the record: an import does not train."""
        value = self.values.get("dropout", 0.1)
        return float(value) if type(value) in (int, float) and 0 <= value < 1 else 0.1

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) and value.isalnum() and len(value) < 20 else None


def said(value: object) -> str:
    return ascii(value)[:99] if isinstance(value, SIMPLE) else f"a {type(value).__name__}"


class Tensors:
    """The tensors of a file, by name."""

    def __init__(self, path: Path, found: Mapping[Any, Any], prefix: str = "") -> None:
        self.path, self.size = path, size_at(path)
        self.found = {str(name).removeprefix(prefix): value for name, value in found.items()}
        if len(self.found) < len(found):
            raise UserError(f"{path}: two tensors bear one name")

    @classmethod
    def of_safetensors(cls, path: Path, prefix: str = "") -> "Tensors":
        size_at(path)
        try:
            with open(path, "rb") as file:
                if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
                    raise UserError(f"{path}: no safetensors file, or its header is damaged; use another copy")
            return cls(path, load_file(path), prefix)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read: {said(str(error))[1:-1]}") from None

    def take(self, name: str, *shape: int) -> Tensor:
        found = self.maybe(name, *shape)
        if found is None:
            raise UserError(f"{self.path}: lacks tensor {name}; it is no such model, or of a version too old or new")
        return found

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """A copy of the tensor in fp32, or None where there is none of that name."""
        tensor = self.found.pop(name, None)
        if tensor is None:
            return None
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided \
                or tensor.device.type != "cpu" or not tensor.is_floating_point():
            raise UserError(f"{self.path}: {name} is no plain tensor of numbers; use another copy")
        if list(tensor.shape) != list(shape):
            raise UserError(f"{self.path}: tensor {name} has shape {str(list(tensor.shape))[:99]}, its settings and "
                            f"pieces ask for {list(shape)}")
        self.size -= tensor.numel() * tensor.element_size() // 4  # an embedding may be there by four names
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() or self.size < 0:
            raise UserError(f"{self.path}: tensor {name} claims more numbers than the file has; use another copy")
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{self.path}: tensor {name} holds what is no number (NaN or infinite); use another copy")
        return tensor.detach().to(torch.float32, copy=True).contiguous()

    def forget(self, *names: str) -> None:
        """Buffers that are computed anew."""
        for name in names:
            self.found.pop(name, None)

    def finish(self) -> None:
        if self.found:
            raise UserError(f"{self.path}: has a stray tensor {said(min(self.found))[1:-1]}, for which this model "
                            "has no place")


@dataclass(frozen=True)
class Rows:
    """Which id of theirs each of our pieces has; None where they know no such piece."""

    src: list[int | None]
    tgt: list[int | None]
    unk: int
    start: int  # what their decoder begins with


@dataclass(frozen=True)
class Origin:
    """All of a model but its layers, which are still in `tensors` by the names that both origins use."""

    kind: str
    path: Path
    shape: ModelConfig  # all but tied and attention_bias, which follow from the tensors
    tensors: Tensors
    embeddings: Matrices  # a row for each id of theirs
    bias: Tensor | None  # of the projection
    tables: tuple[Tensor, Tensor] | None  # of learned positions
    rows: Rows
    vocab: Vocab
    languages: tuple[str | None, str | None]
    step: int = 0
