"""The export to Marian, and an engine that reads what was written.

Marian's Transformer is ours but for the constants below, which no file holds, and for its decoder's first input,
zeros. So our network computes with what is read: the tensors by their names, and the settings among them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nmt.config import DataConfig, DecodingConfig, ModelConfig
from nmt.data.vocab import BOS, SymbolKind, Vocabulary, append_symbols
from nmt.extras.export.marian import (
    SETTINGS_ENTRY,
    TYING,
    check_marian,
    describe_for_marian,
    name_bias,
    rename_for_marian,
)
from nmt.extras.export.parity import OwnEngine
from nmt.extras.export.tensors import explain_penalty_and_tags, find_alpha, list_layer_parts
from nmt.model.positions import Positions
from nmt.model.transformer import Transformer
from nmt.system.files import replace_file, write_bytes, write_text
from nmt.system.strict_yaml import Values, format_yaml, parse_yaml

NPZ_FILE, DECODER_FILE = "model.npz", "decoder.yml"
EPSILON, MARIANS_EPSILON = 1e-5, 1e-6  # of LayerNorm
MARIAN_USAGE = """\
    marian-decoder -c decoder.yml < lines.{src}        # or, with `pip install pymarian`:
    pymarian decode -c decoder.yml < lines.{src}
"""


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
    check_marian(model.config, data, decoding)
    tensors: dict[str, Any] = rename_for_marian(model)
    tensors[SETTINGS_ENTRY] = encode_settings(describe_for_marian(model))
    with replace_file(folder / NPZ_FILE) as file:
        np.savez(file, **tensors)  # not compressed, which not every Marian can read
    settings = make_settings(folder, model.config, vocab, decoding)
    write_text(folder / DECODER_FILE, format_yaml(settings))
    usage = MARIAN_USAGE.format(src=data.src)
    return usage + explain_penalty_and_tags(decoding, [], "")


def encode_settings(settings: Values) -> np.ndarray:
    return np.frombuffer(format_yaml(settings).encode() + b"\0", np.int8)


def make_settings(
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


class MarianEngine(OwnEngine):
    """Our network with the tensors of Marian's files, their settings, and Marian's constants."""

    @torch.no_grad()
    def __init__(self, arrays: Mapping[str, np.ndarray], writes_unknown: bool) -> None:
        self.tensors = {name: torch.from_numpy(rows) for name, rows in arrays.items()}
        entry = bytes(self.tensors.pop(SETTINGS_ENTRY)[:-1].tolist()).decode()
        settings = parse_yaml(entry, SETTINGS_ENTRY).values
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
        model = Transformer(shape, *settings["dim-vocabs"])
        model.writes_unknown = writes_unknown
        super().__init__(model)
        self.take_constants("marian", MARIANS_EPSILON)

        # layers, embeddings, projection
        self.names: dict[nn.Module, list[str]] = {}  # what Marian calls the matrices of each
        for ours, theirs in list_layer_parts(shape):
            layer: Any = model.get_submodule(ours)
            names = self.names[layer] = list(theirs.values())
            for parameter, parts in ((layer.weight, names), (layer.bias, map(name_bias, names))):
                rows = torch.cat([self.tensors[name].T for name in parts])
                parameter.copy_(rows.view_as(parameter))
        for side, embedding in (("encoder", model.src_embedding), ("decoder", model.tgt_embedding)):
            name = "Wemb" if shape.has_shared_embeddings else f"{side}_Wemb"
            embedding.weight.copy_(self.tensors[name])
        if not shape.has_shared_projection:
            name = "decoder_ff_logit_out_W"
            model.projection.weight.copy_(self.tensors[name].T)
        self.names[model.projection] = [name]
        model.projection.bias.copy_(self.tensors["decoder_ff_logit_out_b"][0])
        model.tgt_embedding.weight[BOS] = (
            0.0  # whatever the file has: Marian's decoder reads no BOS
        )

    def take_constants(self, positions: Any, epsilon: float) -> None:
        """Compute with these positions and this epsilon of LayerNorm."""
        table = Positions(replace(self.model.config, positions=positions))
        self.model.src_positions = self.model.tgt_positions = table
        for module in self.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = epsilon


def load_marian(folder: Path) -> MarianEngine:
    with np.load(folder / NPZ_FILE) as archive:
        return MarianEngine(archive, can_write_unknown(folder / DECODER_FILE))


def can_write_unknown(path: Path) -> bool:
    """Whether a configuration lets its engine write the unknown piece."""
    return bool(parse_yaml(path.read_text(), str(path)).values["allow-unk"])
