"""The export to plain safetensors: each weight once, under our own name, with the config and the
BPE model's digest.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from nmt.config import DataConfig, DecodingConfig
from nmt.config_files import load_recorded_config
from nmt.data.vocab import Vocabulary, load_vocab, write_vocab
from nmt.extras.export.parity import OwnEngine
from nmt.model.transformer import Transformer
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE
from nmt.system.tensor_files import write_tensors

SAFETENSORS_USAGE = """\
    from safetensors import safe_open

    with safe_open("model.safetensors", "pt") as file:
        config = file.metadata()["config"]          # YAML, as in config.yaml
        weights = {name: file.get_tensor(name) for name in file.keys()}
"""


def write_safetensors(
    folder: Path,
    model: Transformer,
    vocab: Vocabulary,
    _data: DataConfig,
    _decoding: DecodingConfig,
    quantization: str,
) -> str:
    """Fill `folder`, which has config.yaml, with the weights and the BPE model; return how to use it."""
    dtype = getattr(torch, quantization)
    weights = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    metadata = {
        "format": "pt",
        "config": (folder / CONFIG_FILE).read_text(encoding="utf-8"),
        "vocab_sha256": vocab.digest,
    }
    write_tensors(folder / MODEL_FILE, weights, metadata)
    write_vocab(folder, vocab)
    return SAFETENSORS_USAGE


@torch.no_grad()
def load_safetensors(folder: Path) -> OwnEngine:
    """Load the weights into our own model."""
    config = load_recorded_config(folder / CONFIG_FILE)
    model = Transformer(config.model, *load_vocab(folder).sizes)
    weights = load_file(folder / MODEL_FILE)
    for name, p in model.named_parameters():
        p.copy_(weights[name])
    return OwnEngine(model)
