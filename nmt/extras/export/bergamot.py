"""The export to Bergamot, the engine of translateLocally and of translation inside a browser.

Bergamot grew out of Marian: it has the same formulas and the same names of tensors, but files of its own.
A file is a list of items, all numbers little endian: how many there are, the head of each (length of its
name, type, number of dimensions, bytes), all names, all shapes, and then the contents, aligned for the
processor. Marian's newer 8-bit types are others, and neither engine reads those of the other.

In 8 bits a matrix W is round(127 W / max|W|), and the engine rounds what it multiplies W with in the same
way. That factor must be known in advance and is an item too, called alpha: 127 divided by the largest
number that goes into the product, which is the mean over sample sentences and 1.1 standard deviations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.config_files import load_recorded_config
from nmt.data.batch import Sentences
from nmt.data.vocab import Vocabulary
from nmt.extras.export.marian import check_marian, describe_for_marian, rename_for_marian
from nmt.extras.export.marian_engine import SETTINGS_ENTRY, MarianEngine, make_settings
from nmt.languages import name_language
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import write_bytes, write_json, write_text
from nmt.system.run_folder import CONFIG_FILE
from nmt.system.strict_yaml import format_yaml, parse_yaml

StoredArray = tuple[int, tuple[int, ...], bytes]  # type, shape, content

BERGAMOT_FILE = "model.bin"
CONFIGURATION_FILE = (
    "config.intgemm8bitalpha.yml"  # as translateLocally calls it, whatever its types
)
CONTENT_ALIGNMENT = 256  # of the contents, in bytes
FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101
LARGEST = 127  # of a byte; -128 is not used
MATRICES = re.compile(".*(_W.|Wemb|_logit_out_W)")  # which are stored in 8 bits
ROWS_AT_A_TIME = 8  # of the rows of an embedding in 8 bits
WIDTH_AT_A_TIME = 64  # of what a product in 8 bits adds up, on processors with AVX-512
UNUSED_BIAS = -1e4  # the bias of a row without a piece
ALPHA_SUFFIX = "_QuantMultA"  # after the name of a matrix
N_SAMPLED_LINES, MAX_SAMPLED_PIECES = 50, 100
BERGAMOT_USAGE = """\
    npm install @browsermt/bergamot-translator    # WebAssembly, in a browser and in node
    tar -czf model.tar.gz DIR                     # translateLocally: Settings, Languages, Import model

It translates greedily.
"""


def pack_items(items: Mapping[str, StoredArray]) -> bytes:
    heads, names, contents = [1, len(items)], b"", []  # 1: the version
    shapes: list[int] = []
    for name, (kind, shape, content) in items.items():
        contents.append(content + bytes(-len(content) % CONTENT_ALIGNMENT))
        heads += [len(name) + 1, kind, len(shape), len(contents[-1])]
        names += name.encode() + b"\0"
        shapes += shape
    front = np.array(heads, "<u8").tobytes() + names + np.array(shapes, "<i4").tobytes()
    n_padding = -(len(front) + 8) % CONTENT_ALIGNMENT
    return b"".join([front, n_padding.to_bytes(8, "little"), bytes(n_padding), *contents])


def unpack_items(file: bytes) -> dict[str, StoredArray]:
    """Read what `pack_items` made; each content still has the bytes up to the next item."""
    n_items = int(np.frombuffer(file, "<u8", 2)[1])
    heads = np.frombuffer(file, "<u8", 4 * n_items, 16).reshape(n_items, 4).astype(int)
    n_letters, _, n_dimensions, n_bytes = heads.sum(0)
    end = 16 + heads.nbytes + n_letters  # of the names
    names = file[end - n_letters : end].decode().split("\0")
    shapes = iter(np.frombuffer(file, "<i4", n_dimensions, end).tolist())
    start, items = len(file) - n_bytes, {}
    for name, (_, kind, n, size) in zip(
        names, heads, strict=False
    ):  # the last name ends with a zero too
        items[name] = kind, tuple(islice(shapes, n)), file[start : start + size]
        start += size
    return items


def store(_name: str, array: np.ndarray) -> StoredArray:
    return FLOAT32, array.shape, array.astype("<f4").tobytes()


def quantize(name: str, matrix: np.ndarray) -> StoredArray:
    """Round a matrix to 8 bits. All but embeddings are stored transposed, with the shape that they had."""
    factor = np.float32(LARGEST) / np.abs(matrix).max()
    rounded = np.rint(matrix * factor).astype(np.int8)
    rows = rounded if name.endswith("Wemb") else rounded.T
    return INTGEMM8, matrix.shape, rows.tobytes() + factor.tobytes()


def restore(name: str, item: StoredArray) -> np.ndarray:
    """Return what `store` was given, or nearly what `quantize` was."""
    kind, shape, content = item
    size = math.prod(shape)
    if kind == FLOAT32:
        return np.frombuffer(content, "<f4", size).reshape(shape).copy()
    rows = np.frombuffer(content, np.int8, size) / np.frombuffer(content, "<f4", 1, size)
    return rows.reshape(shape) if name.endswith("Wemb") else rows.reshape(shape[::-1]).T


def add_unused_rows(name: str, tensor: np.ndarray) -> np.ndarray:
    """Give each row of the vocabulary's tensors companions up to a multiple; all widths are multiples."""
    missing = [(0, -n % ROWS_AT_A_TIME if n > 1 else 0) for n in tensor.shape]
    value = UNUSED_BIAS if name.endswith("_out_b") else 0.0
    return np.pad(tensor, missing, constant_values=value)


class BergamotEngine(MarianEngine):
    """Multiplies as Bergamot does: in 8 bits by a matrix that has an alpha; of the inputs of the others it
    notes the largest number.
    """

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self.largest: dict[str, list[float]] = defaultdict(list)

    def multiply(self, x: Tensor, name: str) -> Tensor:
        alpha = self.tensors.get(f"{name}{ALPHA_SUFFIX}")
        if alpha is None:
            self.largest[name].append(float(x.abs().max()))
        else:
            x = (x * alpha).round().clamp(-LARGEST, LARGEST) / alpha
        return super().multiply(x, name)

    def find_alphas(self, src: Sentences) -> dict[str, np.ndarray]:
        """Translate some of these sentences; return the alpha of each matrix that this took."""
        for sentence in src[:N_SAMPLED_LINES]:
            self.translate_greedily([sentence], MAX_SAMPLED_PIECES)
        alphas = {}
        for name, values in self.largest.items():
            expected = np.mean(values) + 1.1 * np.std(values)
            alphas[f"{name}{ALPHA_SUFFIX}"] = np.full((1, 1), LARGEST / expected, np.float32)
        return alphas


def check_widths(shape: ModelConfig) -> None:
    """Refuse a model by whose matrices the engine cannot multiply in 8 bits: it would abort."""
    for name, width in (("d_model", shape.d_model), ("d_ff", shape.d_ff)):
        if width % WIDTH_AT_A_TIME:
            raise UserError(
                f"model.{name} is {width}: in 8 bits Bergamot computes with multiples of {WIDTH_AT_A_TIME} "
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
    tensors, settings = rename_for_marian(model), describe_for_marian(model)
    if is_quantized:
        engine = BergamotEngine(tensors, settings, not vocab.tgt.has_bytes)
        tensors = {name: add_unused_rows(name, rows) for name, rows in tensors.items()}
        tensors |= engine.find_alphas(src)
        settings["dim-vocabs"] = [n + -n % ROWS_AT_A_TIME for n in settings["dim-vocabs"]]
    items = {}
    for name in sorted(tensors):
        is_rounded = is_quantized and MATRICES.fullmatch(name)
        items[name] = (quantize if is_rounded else store)(name, tensors[name])
    entry = format_yaml(settings).encode() + b"\0"
    items[SETTINGS_ENTRY] = INT8, (len(entry),), entry
    write_bytes(folder / BERGAMOT_FILE, pack_items(items))

    # what translateLocally reads, and who calls the npm package
    configuration = make_settings(folder, model.config, vocab, decoding) | {
        "models": [BERGAMOT_FILE],
        "gemm-precision": "int8shiftAlphaAll" if is_quantized else "float32",
        "beam-size": 1,
        "skip-cost": True,
        "max-length-break": 128,
        "mini-batch-words": 1024,
        "max-length-factor": 2.0,
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
        "version": 1,
        "API": 1,
    }
    write_json(folder / "model_info.json", information)
    return BERGAMOT_USAGE


def load_bergamot(folder: Path) -> BergamotEngine:
    configuration = parse_yaml((folder / CONFIGURATION_FILE).read_text(), CONFIGURATION_FILE).values
    items = unpack_items((folder / BERGAMOT_FILE).read_bytes())
    entry = items.pop(SETTINGS_ENTRY)[2].rstrip(b"\0").decode()
    settings = parse_yaml(entry, SETTINGS_ENTRY).values
    tensors = {name: restore(name, item) for name, item in items.items()}
    return BergamotEngine(tensors, settings, configuration["allow-unk"])
