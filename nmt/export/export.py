"""A checkpoint in the format of another engine, proven before it appears.

The folder is written beside its place, loaded by the engine it is for, compared with ours on real lines, described by a
card, and only then renamed into place: an export that says something else never exists. Nothing but an earlier export
is ever replaced.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nmt.checkpoint import Checkpoint
from nmt.config import RunConfig, format_config
from nmt.data.vocab import CONTROL_IDS, UNK, Vocab
from nmt.evaluate.card import render_export_card
from nmt.export import ctranslate2, huggingface
from nmt.export.parity import Agreement, Ours, Side, bound, compare
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.files import read_json, read_manifest, verify, write_folder, write_json, write_text
from nmt.system.run_folder import (
    CARD_FILE,
    CONFIG_FILE,
    EXPORT_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    VOCAB_FILE,
)
from nmt.translate.translator import Translator, make_translator

FLOATS = ("float32", "float16", "bfloat16")
QUANTIZATIONS = {
    "ctranslate2": (*FLOATS, "int8", "int8_float32", "int8_float16", "int8_bfloat16"),
    "huggingface": FLOATS,
    "safetensors": FLOATS,
}
LIBRARIES = {
    "ctranslate2": "ctranslate2",
    "huggingface": "transformers",
    "safetensors": "safetensors",
}
SAFETENSORS_USAGE = """\
    from safetensors import safe_open

    with safe_open("model.safetensors", "pt") as file:
        config = file.metadata()["config"]          # YAML, as in config.yaml
        weights = {name: file.get_tensor(name) for name in file.keys()}
"""
LIMIT = 100  # pieces of an output that is compared


def export(
    checkpoint: Checkpoint, to: str, out: Path, quantization: str, lines: Sequence[str]
) -> Agreement:
    """Write the folder `out`, or raise and leave everything as it was. Empty lines are not compared."""
    if quantization not in QUANTIZATIONS[to]:
        raise UserError(
            f"--quantization {quantization}: --to {to} has {', '.join(QUANTIZATIONS[to])}"
        )
    out = out.resolve()
    if os.path.lexists(out) and not is_export(out):
        raise UserError(
            f"{out}: exists and is not just an export; choose another -o DIR, nothing was changed"
        )
    translator = make_translator(checkpoint, torch.device("cpu"), checkpoint.config.decoding)
    src = [
        translator.shortened(ids, n)
        for n, ids in enumerate(translator.vocab.encode(lines), 1)
        if ids
    ]
    if not src:
        raise UserError(
            "there is nothing to compare: all lines are empty; give --check-lines a file with text"
        )
    found: list[Agreement] = []

    def fill(folder: Path) -> None:
        theirs = _written(folder, to, translator, checkpoint.config, quantization)
        agreement = compare(Ours(translator.model), theirs, src, _limit(checkpoint.config))
        if isinstance(theirs, huggingface.HuggingFace):
            _compare_tokenizer(theirs.tokenizer, translator.vocab, lines)
        if not agreement.is_within(quantization):
            raise Failure(
                f"the export does not say the same: {agreement}; bound: {bound(quantization)}; "
                "nothing was written"
            )
        record = {
            "format": to,
            "quantization": quantization,
            "checkpoint": checkpoint.path.name,
            "step": checkpoint.step,
            "averaged": checkpoint.averaged,
            "weights_sha256": read_manifest(checkpoint.path)[MODEL_FILE]["sha256"],
            "vocab_sha256": translator.vocab.digest,
            "check": asdict(agreement),
        }
        write_json(folder / EXPORT_FILE, record)
        write_text(folder / CONFIG_FILE, format_config(checkpoint.config))
        card = render_export_card(
            checkpoint,
            to,
            quantization,
            LIBRARIES[to],
            str(agreement),
            _explain(to, checkpoint.config),
        )
        write_text(folder / CARD_FILE, card)
        found.append(agreement)

    write_folder(out, fill)
    return found[0]


def _written(
    folder: Path, to: str, translator: Translator, config: RunConfig, quantization: str
) -> Side:
    """Fill `folder` and open it with the engine that it is for."""
    model, vocab = translator.model, translator.vocab
    if to == "ctranslate2":
        ctranslate2.write(folder, model, vocab, config, quantization)
        return ctranslate2.CTranslate2(folder, torch.get_num_threads())
    if to == "huggingface":
        huggingface.write(folder, model, vocab, config, quantization)
        return huggingface.HuggingFace(folder)
    weights = {
        name: p.detach().to(getattr(torch, quantization)) for name, p in model.named_parameters()
    }
    known = {"format": "pt", "config": format_config(config), "vocab_sha256": vocab.digest}
    save_file(weights, folder / MODEL_FILE, metadata=known)
    (folder / VOCAB_FILE).write_bytes(vocab.model)
    other, stored = Transformer(model.config, vocab.size), load_file(folder / MODEL_FILE)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(stored[name])
    return Ours(other)


def _explain(to: str, config: RunConfig) -> str:
    """Return how to use the export, for its card."""
    if to == "ctranslate2":
        return ctranslate2.explain_ctranslate2(config)
    if to == "huggingface":
        return huggingface.explain_huggingface(config)
    return SAFETENSORS_USAGE


def _limit(config: RunConfig) -> int:
    return (
        min(LIMIT, config.model.max_positions - 1) if config.model.positions == "learned" else LIMIT
    )


def _compare_tokenizer(tokenizer: Any, vocab: Vocab, lines: Sequence[str]) -> None:
    """Text to ids and back is the same there and here, but that `skip_special_tokens` drops what is unknown."""
    for line, ours in zip(lines, vocab.encode(lines), strict=True):
        theirs = tokenizer(line)["input_ids"][:-1]
        known = [i for i in ours if i != UNK]
        if (
            theirs != ours
            or tokenizer.decode(known, skip_special_tokens=True) != vocab.decode([known])[0].strip()
        ):
            raise Failure(
                f"the tokenizer does not say the same of {line!r}: {theirs} instead of {ours}; "
                "nothing was written"
            )


def is_export(folder: Path) -> bool:
    """Whether `folder` is what `export` wrote and nothing else, or empty: then it may be replaced."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or (
        names >= {EXPORT_FILE, MANIFEST_FILE} and names == {MANIFEST_FILE, *read_manifest(folder)}
    )


def load_ctranslate2(
    folder: Path, n_threads: int = 0, device: str = "cpu"
) -> tuple[ctranslate2.CTranslate2, str]:
    """The engine with an export's model, held against its manifest, and the quantization it is to be labelled with."""
    verify(folder, (EXPORT_FILE, VOCAB_FILE))
    record = read_json(folder / EXPORT_FILE)
    if record.get("format") != "ctranslate2":
        raise UserError(
            f"{folder}: is an export to {record.get('format')}; make one with nmt-export --to ctranslate2"
        )
    return ctranslate2.CTranslate2(folder, n_threads, device), record["quantization"]


def made_lines(vocab: Vocab, n: int = 32, seed: int = 1) -> list[str]:
    """Lines of random pieces: what is compared when no text is given. No sense in them, but all of the vocabulary."""
    rng = random.Random(seed)
    pieces = [i for i in range(vocab.size) if i not in (*CONTROL_IDS, UNK)]
    return vocab.decode([rng.choices(pieces, k=rng.randint(2, 32)) for _ in range(n)])
