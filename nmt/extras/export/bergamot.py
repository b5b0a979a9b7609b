"""The export to Bergamot, the engine of translateLocally and of translation inside a browser.

Bergamot grew out of Marian: it has the same formulas and the same names of tensors, but files of its own.
A file is a list of items, all numbers little endian: how many there are, the head of each (length of its
name, type, number of dimensions, bytes), all names, all shapes, and then the contents, aligned for the
processor. Marian's newer 8-bit types are others, and neither engine reads those of the other.

In 8 bits a matrix W is round(127 W / max|W|), and the engine rounds what it multiplies W with in the same
way. That factor must be known in advance and is an item too, called alpha: 127 divided by the largest
number that goes into the product, which is the mean over sample sentences and 1.1 standard deviations.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.config_files import load_recorded_config
from nmt.data.batch import Sentences
from nmt.data.vocab import Vocabulary
from nmt.extras.export.marian import check_marian, describe_for_marian, rename_for_marian
from nmt.extras.export.marian_engine import (
    SETTINGS_ENTRY,
    MarianEngine,
    make_settings,
)
from nmt.languages import name_language
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import write_bytes, write_json, write_text
from nmt.system.run_folder import CONFIG_FILE
from nmt.system.strict_yaml import Values, format_yaml, parse_yaml

Array = NDArray[np.float32]
Arrays = Mapping[str, Array]

BERGAMOT_FILE = "model.bin"
# what translateLocally calls these, in 8 bits and not
CONFIGURATION_FILE, INFO_FILE = "config.intgemm8bitalpha.yml", "model_info.json"
VERSION = 1
ALIGNMENT = 256  # of the contents, in bytes
FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101
LARGEST = 127  # of a byte; -128 is not used
MATRICES = re.compile(".*(_W[a-z0-9]|Wemb|_logit_out_W)")  # which are stored in 8 bits
ROW_MULTIPLE = 8  # of the rows of an embedding in 8 bits
WIDTH_MULTIPLE = 64  # of what a product in 8 bits adds up, on processors with AVX-512
NEVER_CHOSEN = -1e4  # the bias of a row without a piece
ALPHA = "_QuantMultA"  # after the name of a matrix
# What both take beside the model's own: one hypothesis, and lengths in pieces and parts of the source's
CONFIGURATION: Values = {
    "beam-size": 1,
    "skip-cost": True,
    "word-penalty": 0,
    "max-length-break": 128,
    "max-length-factor": 2.0,
    "mini-batch-words": 1024,
    "workspace": 128,
    "cpu-threads": 0,
    "alignment": "soft",
    "quiet": True,
    "quiet-translation": True,
}
N_SAMPLES, MAX_PIECES, N_DEVIATIONS = 50, 100, 1.1
BERGAMOT_USAGE = """\
    npm install @browsermt/bergamot-translator    # WebAssembly, in a browser and in node
    tar -czf {src}-{tgt}.tar.gz DIR                     # translateLocally: Settings, Languages, Import model

It translates greedily.
"""


@dataclass(frozen=True)
class Item:
    """An array as it lies in a file."""

    kind: int
    shape: tuple[int, ...]
    content: bytes

    @property
    def n_bytes(self) -> int:
        """How many bytes it takes, with those up to where the next item may begin."""
        return _align(len(self.content))


def _align(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def pack_items(items: Mapping[str, Item]) -> bytes:
    names = [name.encode() + b"\0" for name in items]
    heads, shapes = [struct.pack("<2Q", VERSION, len(items))], []
    for name, item in zip(names, items.values(), strict=True):
        heads.append(struct.pack("<4Q", len(name), item.kind, len(item.shape), item.n_bytes))
        shapes.append(struct.pack(f"<{len(item.shape)}i", *item.shape))
    front = b"".join([*heads, *names, *shapes])
    n_padding = _align(len(front) + 8) - len(front) - 8
    contents = [item.content.ljust(item.n_bytes, b"\0") for item in items.values()]
    return b"".join([front, struct.pack("<Q", n_padding), bytes(n_padding), *contents])


def unpack_items(file: bytes) -> dict[str, Item]:
    """Read what `pack_items` made; each content still has the bytes up to the next item."""
    offset = 0

    def read(n_bytes: int) -> bytes:
        nonlocal offset
        offset += n_bytes
        return file[offset - n_bytes : offset]

    def read_numbers(layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, read(struct.calcsize(layout)))

    _, n_items = read_numbers("<2Q")
    heads = [read_numbers("<4Q") for _ in range(n_items)]
    names = [read(length)[:-1].decode() for length, *_ in heads]
    shapes = [read_numbers(f"<{n_dimensions}i") for _, _, n_dimensions, _ in heads]
    (n_padding,) = read_numbers("<Q")
    read(n_padding)
    items = {}
    for name, shape, (_, kind, _, n_bytes) in zip(names, shapes, heads, strict=True):
        items[name] = Item(kind, shape, read(n_bytes))
    return items


def store(_name: str, array: Array) -> Item:
    return Item(FLOAT32, array.shape, array.astype("<f4").tobytes())


def quantize(name: str, matrix: Array) -> Item:
    """Round a matrix to 8 bits. All but embeddings are stored transposed, with the shape that they had."""
    factor = np.float32(LARGEST) / (np.abs(matrix).max() or np.float32(LARGEST))
    rounded = np.rint(matrix * factor).astype(np.int8)
    rows = rounded if name.endswith("Wemb") else rounded.T
    return Item(INTGEMM8, matrix.shape, rows.tobytes() + struct.pack("<f", factor))


def restore(name: str, item: Item) -> Array:
    """Return what `store` was given, or nearly what `quantize` was."""
    size = int(np.prod(item.shape))
    if item.kind == FLOAT32:
        return np.frombuffer(item.content, "<f4", size).reshape(item.shape).copy()
    rows = np.frombuffer(item.content, np.int8, size)
    if not name.endswith("Wemb"):
        rows = rows.reshape(item.shape[::-1]).T
    (factor,) = struct.unpack_from("<f", item.content, size)
    return rows.reshape(item.shape) / np.float32(factor)


def pad_rows(name: str, tensor: Array) -> Array:
    """Give embeddings and the projection as many rows as a product in 8 bits needs."""
    padding = [(0, 0), (0, 0)]
    if name.endswith("Wemb"):
        padding[0] = 0, -tensor.shape[0] % ROW_MULTIPLE
    elif "_logit_out_" in name:
        padding[1] = 0, -tensor.shape[1] % ROW_MULTIPLE
    value = NEVER_CHOSEN if name.endswith("_out_b") else 0.0
    return np.pad(tensor, padding, constant_values=value)


class BergamotEngine(MarianEngine):
    """As Bergamot multiplies: in 8 bits by each matrix that has an alpha."""

    def multiply(self, x: Tensor, name: str) -> Tensor:
        alpha = self.tensors.get(f"{name}{ALPHA}")
        if alpha is not None:
            x = (x * alpha).round().clamp(-LARGEST, LARGEST) / alpha
        return super().multiply(x, name)


class InputRecorder(MarianEngine):
    """Notes the largest number that goes into each product."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self.largest: dict[str, list[float]] = defaultdict(list)

    def multiply(self, x: Tensor, name: str) -> Tensor:
        self.largest[name].append(float(x.abs().max()))
        return super().multiply(x, name)


def find_alphas(recorder: InputRecorder, src: Sentences) -> dict[str, Array]:
    """Translate some of these sentences; return the alpha of each matrix that this took."""
    for sentence in src[:N_SAMPLES]:
        recorder.translate_greedily([sentence], MAX_PIECES)
    alphas = {}
    for name, values in recorder.largest.items():
        expected = np.mean(values) + N_DEVIATIONS * np.std(values)
        alphas[f"{name}{ALPHA}"] = np.full((1, 1), LARGEST / expected, np.float32)
    # the last product gives the logits; where a shortlist chooses among its columns it has another name
    return alphas | {f"none{ALPHA}": alphas[f"{name}{ALPHA}"]}


def check_widths(shape: ModelConfig) -> None:
    """Refuse a model by whose matrices the engine cannot multiply in 8 bits: it would abort."""
    for name, width in (("d_model", shape.d_model), ("d_ff", shape.d_ff)):
        if width % WIDTH_MULTIPLE:
            raise UserError(
                f"model.{name} is {width}: in 8 bits Bergamot computes with multiples of {WIDTH_MULTIPLE} "
                "only; use --quantization float32"
            )


def write_bergamot(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    data: DataConfig,
    decoding: DecodingConfig,
    quantization: str,
    src: Sentences,
) -> str:
    """Fill `folder` with what Bergamot and translateLocally load; return how to use it. The alphas come from
    `src`, of real text.
    """
    check_marian(model.config, data, decoding)
    is_quantized = quantization == "int8"
    if is_quantized:
        check_widths(model.config)
    tensors = {name: pad_rows(name, rows) for name, rows in rename_for_marian(model).items()}
    settings = describe_for_marian(model)
    settings["dim-vocabs"] = [n + -n % ROW_MULTIPLE for n in settings["dim-vocabs"]]
    if is_quantized:
        recorder = InputRecorder(tensors, settings, not vocab.tgt.has_bytes)
        tensors |= find_alphas(recorder, src)
    items = {}
    for name in sorted(tensors):
        is_rounded = is_quantized and MATRICES.fullmatch(name)
        items[name] = (quantize if is_rounded else store)(name, tensors[name])
    entry = format_yaml(settings).encode() + b"\0"
    items[SETTINGS_ENTRY] = Item(INT8, (len(entry),), entry)
    write_bytes(folder / BERGAMOT_FILE, pack_items(items))

    # what translateLocally reads, and the worker of the npm package
    configuration = make_settings(folder, model.config, vocab, decoding) | {
        "models": [BERGAMOT_FILE],
        "gemm-precision": "int8shiftAlphaAll" if is_quantized else "float32",
        **CONFIGURATION,
    }
    write_text(folder / CONFIGURATION_FILE, format_yaml(configuration))
    kind = load_recorded_config(folder / CONFIG_FILE).name
    src_name, tgt_name = name_language(data.src), name_language(data.tgt)
    information = {
        "modelName": f"{src_name}-{tgt_name} {kind}",
        "shortName": f"{data.src}-{data.tgt}-{kind}",
        "type": kind,
        "src": src_name,
        "trg": tgt_name,
        "srcTags": {data.src: src_name},
        "trgTag": data.tgt,
        "version": 1,
        "API": 1,
    }
    write_json(folder / INFO_FILE, information)
    return BERGAMOT_USAGE.format(src=data.src, tgt=data.tgt)


def load_bergamot(folder: Path) -> BergamotEngine:
    configuration = parse_yaml((folder / CONFIGURATION_FILE).read_text(), CONFIGURATION_FILE).values
    items = unpack_items((folder / BERGAMOT_FILE).read_bytes())
    entry = items.pop(SETTINGS_ENTRY).content.rstrip(b"\0").decode()
    settings = parse_yaml(entry, SETTINGS_ENTRY).values
    tensors = {name: restore(name, item) for name, item in items.items()}
    return BergamotEngine(tensors, settings, configuration["allow-unk"])
