"""Marian's own files: the export to Marian, and an engine that reads what was written.

Marian's Transformer is ours but for the constants of `take_constants`, which no file holds, and for its decoder's
first input, which is zeros where ours is the embedding of the begin mark. So that embedding is subtracted from
all, and what the first layers lose by that is in their biases. If the matrix is the projection's too, all logits
of a step change by the same number, which a softmax does not see.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.data.vocab import BOS, EOS, PAD, SymbolKind, Vocabulary, append_symbols
from nmt.extras.export.parity import OwnEngine
from nmt.extras.export.tensors import (
    check_expressible,
    explain_penalty_and_tags,
    find_alpha,
    list_layer_parts,
    read_part,
    scale_projection,
)
from nmt.model.positions import Positions
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import replace_file, write_bytes, write_text
from nmt.system.strict_yaml import Values, format_yaml, parse_yaml

NPZ_FILE, DECODER_FILE = "model.npz", "decoder.yml"
SETTINGS_ENTRY = "special:model.yml"
# What Marian calls the parameters of one of our layers, or the matrices that lie in one, one below the other
LAYER_NAMES = {
    "attention.qkv.weight": "self_Wq self_Wk self_Wv",
    "attention.qkv.bias": "self_bq self_bk self_bv",
    "attention.output.weight": "self_Wo",
    "attention.output.bias": "self_bo",
    "attention_residual.norm.weight": "self_Wo_ln_scale",
    "attention_residual.norm.bias": "self_Wo_ln_bias",
    "memory_attention.q.weight": "context_Wq",
    "memory_attention.q.bias": "context_bq",
    "memory_attention.kv.weight": "context_Wk context_Wv",
    "memory_attention.kv.bias": "context_bk context_bv",
    "memory_attention.output.weight": "context_Wo",
    "memory_attention.output.bias": "context_bo",
    "memory_residual.norm.weight": "context_Wo_ln_scale",
    "memory_residual.norm.bias": "context_Wo_ln_bias",
    "feed_forward.inner.weight": "ffn_W1",
    "feed_forward.inner.bias": "ffn_b1",
    "feed_forward.outer.weight": "ffn_W2",
    "feed_forward.outer.bias": "ffn_b2",
    "feed_forward_residual.norm.weight": "ffn_ffn_ln_scale",
    "feed_forward_residual.norm.bias": "ffn_ffn_ln_bias",
}
# Which of Marian's settings says what `model.tied` says
TYING: dict[str, Any] = {
    "tied-embeddings-all": True,
    "tied-embeddings-src": "embeddings",
    "tied-embeddings": "decoder",
}
EPSILON, MARIANS_EPSILON = 1e-5, 1e-6  # of LayerNorm
UNUSED_BIAS = -1e4  # of the logit of a row without a piece
MARIAN_USAGE = """\
    marian-decoder -c decoder.yml < lines.{src}        # or, with `pip install pymarian`:
    pymarian decode -c decoder.yml < lines.{src}
"""


def check_marian(
    shape: ModelConfig, vocab: Vocabulary, data: DataConfig, decoding: DecodingConfig
) -> None:
    """Refuse a model that Marian cannot compute."""
    check_expressible(shape)
    reason = None
    if shape.norm == "pre":  # 1.12 scores such a model as we do, and translates with it otherwise
        reason = (
            "model.norm is pre: a translating Marian does not normalize what its decoder attends to"
        )
    elif shape.positions in ("rotary", "learned"):
        reason = f"model.positions is {shape.positions}: Marian has sinusoids only"
    elif shape.activation == "gelu":
        reason = "model.activation is gelu: Marian's gelu is another function"
    elif shape.embedding_norm is not None:
        reason = (
            f"model.embedding_norm is {shape.embedding_norm}: Marian has no LayerNorm on embeddings"
        )
    elif (
        data.train_tags
        or decoding.tag
        or any(re.fullmatch(">>.+<<", piece) for piece in vocab.src.list_pieces())  # of OPUS-MT
    ):
        reason = "its sources begin with tags, which Marian does not put there"
    if reason is not None:
        raise UserError(f"{reason}; use --to ctranslate2 or --to safetensors")


def write_marian(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    data: DataConfig,
    decoding: DecodingConfig,
    _quantization: str,
) -> str:
    """Fill `folder` with what marian-decoder loads: the model, its vocabularies and the settings of decoding;
    return how to use it.
    """
    check_marian(model.config, vocab, data, decoding)
    settings = describe_for_marian(model)
    tensors: dict[str, Any] = copy_to_arrays(make_marian_form(model, settings))
    tensors[SETTINGS_ENTRY] = np.frombuffer(encode_settings(settings), np.int8)
    with replace_file(folder / NPZ_FILE) as file:
        np.savez(file, **tensors)  # not compressed, which not every Marian can read
    decoder = make_decoder_settings(folder, model.config, vocab, decoding)
    write_text(folder / DECODER_FILE, format_yaml(decoder))
    return MARIAN_USAGE.format(src=data.src) + explain_penalty_and_tags(decoding, [], "")


def make_decoder_settings(
    folder: Path, shape: ModelConfig, vocab: Vocabulary, decoding: DecodingConfig
) -> Values:
    """Write the vocabularies, with a piece for each row and the suffix that tells Marian what they are; return
    what decodes with them as nearly as Marian can to our search.
    """
    names = []
    for name, side in vocab.files.items():
        names.append(Path(name).with_suffix(".spm").name)
        unused = [f"<unused-{i}>" for i in range(side.size, shape.count_rows(side.size))]
        rows = append_symbols(side.model, unused, SymbolKind.CONTROL)
        write_bytes(folder / names[-1], rows)
    settings: Values = {
        "relative-paths": True,
        "models": [NPZ_FILE],
        "vocabs": [names[0], names[-1]],
        "beam-size": decoding.beam,
        "normalize": find_alpha(decoding),
        "allow-unk": not vocab.tgt.has_bytes,
    }
    if decoding.max_extra == 0:  # otherwise Marian's own factor, 3
        settings["max-length-factor"] = decoding.max_ratio  # of the longest source of a batch
    return settings


# ---- the model --------------------------------------------------------------------------------------------------


def describe_for_marian(model: Transformer, multiple: int = 1) -> Values:
    """Return the settings that a file has in the entry special:model.yml; the numbers of rows are of this multiple."""
    shape = model.config
    n_rows = model.src_embedding.num_embeddings, model.n_vocab
    return {
        "type": "transformer",
        "version": "v1.12.0 nmt",
        "dim-vocabs": [n + -n % multiple for n in n_rows],
        "dim-emb": shape.d_model,
        "enc-depth": shape.encoder_depth,
        "dec-depth": shape.decoder_depth,
        **{key: shape.tied == tied for key, tied in TYING.items()},
        "transformer-heads": shape.n_heads,
        "transformer-dim-ffn": shape.d_ff,
        "transformer-ffn-activation": shape.activation,  # the default is swish
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
    }


def encode_settings(settings: Values) -> bytes:
    return format_yaml(settings).encode() + b"\0"


def make_described(settings: Values) -> Transformer:
    """Make the model that Marian would make by these settings: with biases everywhere."""
    shape = ModelConfig(
        d_model=settings["dim-emb"],
        d_ff=settings["transformer-dim-ffn"],
        n_heads=settings["transformer-heads"],
        encoder_layers=settings["enc-depth"],
        decoder_layers=settings["dec-depth"],
        activation=settings["transformer-ffn-activation"],
        tied=next((tied for key, tied in TYING.items() if settings[key]), False),
        attention_bias=True,
        projection_bias=True,
    )
    return Transformer(shape, *settings["dim-vocabs"])


@torch.no_grad()
def make_marian_form(model: Transformer, settings: Values) -> Transformer:
    """Make a model of these settings that computes what ours does, from zeros at the start."""
    form, shape = make_described(settings), model.config
    form.writes_unknown = model.writes_unknown
    for name, _ in list_layer_parts(shape):
        layer: Any = form.get_submodule(name)
        weight, bias = read_part(model, name)
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)

    # embeddings, and what the layers that read them get instead of `start`
    root = math.sqrt(shape.d_model)
    factor = model.embedding_scale / root
    start = factor * model.tgt_embedding.weight[BOS]
    _set_rows(form.src_embedding.weight, factor * model.src_embedding.weight - start, 0.0)
    _set_rows(form.tgt_embedding.weight, factor * model.tgt_embedding.weight - start, 0.0)
    for layers in (form.encoder, form.decoder):
        attention = layers[0].attention
        attention.qkv.bias.add_(attention.qkv.weight @ (root * start))
        attention.output.bias.add_(root * start)

    # logits
    bias = model.projection.bias if shape.projection_bias else torch.zeros(model.n_vocab)
    _set_rows(form.projection.bias, bias, UNUSED_BIAS)
    if not shape.has_shared_projection:
        _set_rows(form.projection.weight, scale_projection(model), 0.0)
    elif shape.scale_embeddings == "none":  # the matrix was divided, so its inputs are multiplied
        norm = form.decoder[-1].feed_forward_residual.norm
        norm.weight.mul_(root)
        norm.bias.mul_(root)
    return form


def _set_rows(tensor: Tensor, rows: Tensor, otherwise: float) -> None:
    tensor.fill_(otherwise)
    tensor[: len(rows)] = rows


def list_tensors(form: Transformer) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield the name of each tensor in Marian's files, whose it is, and it as a view: a matrix is inputs x outputs,
    a vector one row.
    """
    for side, layers in (("encoder", form.encoder), ("decoder", form.decoder)):
        for n, layer in enumerate(layers, 1):
            for path, parameter in layer.named_parameters():
                names = LAYER_NAMES[path].split()
                module = layer.get_submodule(path.rpartition(".")[0])
                for name, rows in zip(names, parameter.chunk(len(names)), strict=True):
                    yield f"{side}_l{n}_{name}", module, torch.atleast_2d(rows.t())
    shape, projection = form.config, form.projection
    src_name, tgt_name = "encoder_Wemb", "decoder_Wemb"
    if shape.has_shared_embeddings:
        src_name = tgt_name = "Wemb"
    yield src_name, form.src_embedding, form.src_embedding.weight
    yield tgt_name, form.tgt_embedding, form.tgt_embedding.weight
    if shape.has_shared_projection:
        yield tgt_name, projection, projection.weight
    else:
        yield "decoder_ff_logit_out_W", projection, projection.weight.t()
    yield "decoder_ff_logit_out_b", projection, projection.bias[None]


@torch.no_grad()
def copy_to_arrays(form: Transformer) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(tensor) for name, _, tensor in list_tensors(form)}


# ---- the engine -------------------------------------------------------------------------------------------------


class MarianEngine(OwnEngine):
    """Our network with Marian's constants."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.take_constants("marian", MARIANS_EPSILON)
        model.projection.register_forward_hook(end_at_marks)

    def take_constants(self, positions: Any, epsilon: float) -> None:
        """Compute with these positions and this epsilon of LayerNorm."""
        table = Positions(replace(self.model.config, positions=positions))
        self.model.src_positions = self.model.tgt_positions = table
        for module in self.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = epsilon


def end_at_marks(_: nn.Module, __: Any, logits: Tensor) -> None:
    """End an output where Marian would choose a mark that our search never does, so that the check sees it."""
    best = logits.argmax(-1)
    logits[(best == PAD) | (best == BOS), EOS] = -UNUSED_BIAS


@torch.no_grad()
def read_model(arrays: Mapping[str, np.ndarray], entry: bytes, decoder: Path) -> Transformer:
    """Make a model of what a file holds and of what the settings of decoding say."""
    model = make_described(parse_yaml(entry.rstrip(b"\0").decode(), SETTINGS_ENTRY).values)
    for name, _, tensor in list_tensors(model):
        tensor.copy_(torch.tensor(arrays[name]))
    model.tgt_embedding.weight[BOS] = 0.0  # whatever the file has: Marian's decoder reads no BOS
    model.writes_unknown = parse_yaml(decoder.read_text(), str(decoder)).values["allow-unk"]
    return model


def load_marian(folder: Path) -> MarianEngine:
    with np.load(folder / NPZ_FILE) as archive:
        entry = archive[SETTINGS_ENTRY].tobytes()
        return MarianEngine(read_model(archive, entry, folder / DECODER_FILE))
