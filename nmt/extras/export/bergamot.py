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
from functools import partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from struct import iter_unpack, pack, unpack
from typing import Literal

import numpy as np
from torch import Tensor, nn

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.config_files import load_recorded_config
from nmt.data.batch import Sentences
from nmt.data.vocab import Vocabulary
from nmt.extras.export.marian_files import (
    SETTINGS_ENTRY,
    MarianEngine,
    check_marian,
    copy_to_arrays,
    describe_for_marian,
    encode_settings,
    list_tensors,
    make_decoder_settings,
    make_marian_form,
    read_model,
)
from nmt.languages import name_language
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import write_bytes, write_json, write_text
from nmt.system.run_folder import CONFIG_FILE
from nmt.system.strict_yaml import format_yaml

StoredArray = tuple[int, tuple[int, ...], bytes]  # type, shape, content

BERGAMOT_FILE = "model.bin"
CONFIGURATION_FILE = "config.intgemm8bitalpha.yml"  # translateLocally's name, whatever the types
VERSION = 1
CONTENT_ALIGNMENT = 256  # of the contents, in bytes
FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101
LARGEST = 127  # of a byte; -128 is not used
MATRICES = re.compile(".*(_W.|Wemb|_logit_out_W)")  # which are stored in 8 bits
ROWS_AT_A_TIME = 8  # of the rows of an embedding in 8 bits
WIDTH_AT_A_TIME = 64  # of what a product in 8 bits adds up, on processors with AVX-512
ALPHA_SUFFIX = "_QuantMultA"  # after the name of a matrix
N_SAMPLED_LINES, MAX_SAMPLED_PIECES = 50, 100
BERGAMOT_USAGE = """\
    cd DIR && npm install && python3 -m http.server --bind 127.0.0.1    # a page, at http://127.0.0.1:8000
    tar --exclude=node_modules -czf model.tar.gz DIR    # translateLocally: Translator Settings, Languages, Import

It translates greedily.
"""


def pack_items(items: Mapping[str, StoredArray]) -> bytes:
    heads, names, shapes, contents = b"", b"", b"", []
    for name, (kind, shape, content) in items.items():
        contents.append(content + bytes(-len(content) % CONTENT_ALIGNMENT))
        heads += pack("<4Q", len(name) + 1, kind, len(shape), len(contents[-1]))
        names += name.encode() + b"\0"
        shapes += pack(f"<{len(shape)}i", *shape)
    front = pack("<2Q", VERSION, len(items)) + heads + names + shapes
    n_padding = -(len(front) + 8) % CONTENT_ALIGNMENT
    return b"".join([front, pack("<Q", n_padding), bytes(n_padding), *contents])


def unpack_items(file: bytes) -> dict[str, StoredArray]:
    """Read what `pack_items` made; each content still has the bytes up to the next item."""
    stream = BytesIO(file)
    _, n_items = unpack("<2Q", stream.read(16))
    heads = list(iter_unpack("<4Q", stream.read(32 * n_items)))
    names = [stream.read(n_letters)[:-1].decode() for n_letters, *_ in heads]
    shapes = [unpack(f"<{n}i", stream.read(4 * n)) for _, _, n, _ in heads]
    stream.read(*unpack("<Q", stream.read(8)))  # the padding
    items = {}
    for name, shape, (_, kind, _, n_bytes) in zip(names, shapes, heads, strict=True):
        items[name] = kind, shape, stream.read(n_bytes)
    return items


def quantize(name: str, matrix: np.ndarray) -> StoredArray:
    """Round a matrix to 8 bits."""
    factor = LARGEST / np.abs(matrix).max()
    rounded = np.rint(matrix * factor).astype(np.int8)
    return INTGEMM8, matrix.shape, rounded.tobytes(find_order(name)) + factor.tobytes()


def restore(name: str, item: StoredArray) -> np.ndarray:
    """Return a stored matrix, or nearly what `quantize` was given."""
    kind, shape, content = item
    size = math.prod(shape)
    if kind == FLOAT32:
        return np.frombuffer(content, np.float32, size).reshape(shape)
    rows = np.frombuffer(content, np.int8, size)
    factor = np.frombuffer(content, np.float32, 1, size)
    return (rows / factor).reshape(shape, order=find_order(name))


def find_order(name: str) -> Literal["C", "F"]:
    """Tell whether a matrix in 8 bits lies row by row or, as all but embeddings do, column by column."""
    return "C" if name.endswith("Wemb") else "F"


class BergamotEngine(MarianEngine):
    """Multiplies as Bergamot does, in 8 bits by the matrices that have an alpha, and notes the largest input of
    each.
    """

    def __init__(self, model: Transformer, alphas: Mapping[str, np.ndarray]) -> None:
        super().__init__(model)
        self.alphas, self.largest = alphas, defaultdict[str, list[float]](list)
        for name, layer, _ in list_tensors(model):
            if isinstance(layer, nn.Linear) and MATRICES.fullmatch(name):
                layer.register_forward_pre_hook(partial(self.round_inputs, name))

    def round_inputs(self, name: str, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        (x,) = inputs
        self.largest[name].append(float(x.abs().max()))
        alpha = self.alphas.get(f"{name}{ALPHA_SUFFIX}")
        if alpha is None:
            return x
        return (x * alpha.item()).round().clamp(-LARGEST, LARGEST) / alpha.item()

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
    for name in ("d_model", "d_ff"):
        width = getattr(shape, name)
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
    src: Sentences = (),
) -> str:
    """Fill `folder` with what Bergamot and translateLocally load; return how to use it. The alphas come from
    `src`, of real text.
    """
    check_marian(model.config, vocab, data, decoding)
    is_quantized = quantization == "int8"
    configuration = make_decoder_settings(folder, model.config, vocab, decoding) | {
        "models": [BERGAMOT_FILE],
        "gemm-precision": "int8shiftAlphaAll" if is_quantized else "float32",
        "beam-size": 1,
        "skip-cost": True,
        "max-length-break": 128,
        "mini-batch-words": 1024,
        "max-length-factor": 2.0,
    }
    write_text(folder / CONFIGURATION_FILE, format_yaml(configuration))

    # the model
    if is_quantized:
        check_widths(model.config)
    settings = describe_for_marian(model, ROWS_AT_A_TIME if is_quantized else 1)
    form = make_marian_form(model, settings)
    tensors = copy_to_arrays(form)
    if is_quantized:
        tensors |= BergamotEngine(form, {}).find_alphas(src)
    items = {}
    for name, rows in sorted(tensors.items()):
        items[name] = FLOAT32, rows.shape, rows.tobytes()
        if is_quantized and MATRICES.fullmatch(name):
            items[name] = quantize(name, rows)
    entry = encode_settings(settings)
    items[SETTINGS_ENTRY] = INT8, (len(entry),), entry
    write_bytes(folder / BERGAMOT_FILE, pack_items(items))

    # what translateLocally shows
    kind = load_recorded_config(folder / CONFIG_FILE).name
    src_name, tgt_name = name_language(data.src), name_language(data.tgt)
    write_json(
        folder / "model_info.json",
        {
            "modelName": f"{src_name}-{tgt_name} {kind}",
            "shortName": f"{data.src}-{data.tgt}-{kind}",
            "type": kind,
            "src": src_name,
            "trg": tgt_name,
            "version": 1,
            "API": 1,
        },
    )
    for part in (files(__package__) / "page").iterdir():
        write_bytes(folder / part.name, part.read_bytes())
    return BERGAMOT_USAGE


def load_bergamot(folder: Path) -> BergamotEngine:
    items = unpack_items((folder / BERGAMOT_FILE).read_bytes())
    _, _, entry = items.pop(SETTINGS_ENTRY)
    arrays = {name: restore(name, item) for name, item in items.items()}
    return BergamotEngine(read_model(arrays, entry, folder / CONFIGURATION_FILE), arrays)
