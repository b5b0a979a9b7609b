"""A checkpoint in the format of another library, proven before it appears.

The folder is written beside its place, loaded by the library that it is for, compared with ours on real lines,
described by a card, and only then renamed into place: an export that disagrees with its checkpoint never exists.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import asdict
from pathlib import Path

import torch

from nmt.checkpoint import Checkpoint
from nmt.config import ModelConfig, format_config
from nmt.data.vocab import CONTROL_IDS, UNK, Vocab
from nmt.evaluate.card import render_export_card
from nmt.export.ctranslate2 import CTRANSLATE2
from nmt.export.huggingface import HUGGING_FACE, HuggingFaceEngine, check_tokenizer
from nmt.export.parity import Agreement, OwnEngine, compare_engines, describe_bound
from nmt.export.safetensors import SAFETENSORS
from nmt.system.errors import Failure, UserError
from nmt.system.files import write_folder, write_json, write_text
from nmt.system.output_folder import check_replaceable
from nmt.system.run_folder import CARD_FILE, CONFIG_FILE, EXPORT_FILE, MODEL_FILE
from nmt.translate.translator import make_translator

FORMATS = {
    "ctranslate2": CTRANSLATE2,
    "huggingface": HUGGING_FACE,
    "safetensors": SAFETENSORS,
}
MAX_COMPARED = 100  # pieces of an output


def export(
    checkpoint: Checkpoint,
    to: str,
    out: Path,
    quantization: str,
    lines: Sequence[str],
    is_forced: bool = False,
) -> Agreement:
    """Write the folder `out`, or raise and leave everything as it was. Empty lines are not compared."""
    form = FORMATS[to]
    if quantization not in form.quantizations:
        raise UserError(
            f"--quantization {quantization}: --to {to} has {', '.join(form.quantizations)}"
        )
    out = out.resolve()
    check_replaceable(out, "an export", _is_export, is_forced, [checkpoint.path])
    config, vocab = checkpoint.config, checkpoint.vocab
    translator = make_translator(checkpoint, torch.device("cpu"), config.decoding)
    src = []
    for n, ids in enumerate(vocab.encode(lines), 1):
        if ids:
            src.append(translator.shorten(ids, n))
    if not src:
        raise UserError(
            "there is nothing to compare: all lines are empty; give --check-lines a file with text"
        )
    found: list[Agreement] = []

    def fill(folder: Path) -> None:
        # write it, load it, compare
        form.write(folder, translator.model, vocab, config, quantization)
        theirs = form.load(folder, config)
        limit = _compared_pieces(config.model)
        agreement = compare_engines(OwnEngine(translator.model), theirs, src, limit)
        if isinstance(theirs, HuggingFaceEngine):
            check_tokenizer(theirs.tokenizer, vocab, lines)
        if not agreement.is_within(quantization):
            raise Failure(
                f"the exported model disagrees with the checkpoint: {agreement}; bound: "
                f"{describe_bound(quantization)}; nothing was written"
            )

        # describe it
        record = {
            "format": to,
            "quantization": quantization,
            "checkpoint": checkpoint.path.name,
            "step": checkpoint.step,
            "averaged": checkpoint.averaged,
            "weights_sha256": checkpoint.sha256[MODEL_FILE],
            "vocab_sha256": vocab.digest,
            "check": asdict(agreement),
        }
        write_json(folder / EXPORT_FILE, record)
        write_text(folder / CONFIG_FILE, format_config(config))
        card = render_export_card(
            checkpoint, to, quantization, form.library, str(agreement), form.explain(config)
        )
        write_text(folder / CARD_FILE, card)
        check_replaceable(out, "an export", _is_export, is_forced, [checkpoint.path])
        found.append(agreement)

    write_folder(out, fill)
    return found[0]


def _is_export(names: Set[str]) -> bool:
    return EXPORT_FILE in names


def _compared_pieces(config: ModelConfig) -> int:
    """How long an output to compare may be: a table of learned positions has an end."""
    if config.positions == "learned":
        return min(MAX_COMPARED, config.max_positions - 1)
    return MAX_COMPARED


def make_lines(vocab: Vocab, n: int = 32, seed: int = 1) -> list[str]:
    """Make lines of random pieces, to compare when no text is given: senseless, but from all of the vocabulary."""
    rng = random.Random(seed)
    pieces = [i for i in range(vocab.size) if i not in (*CONTROL_IDS, UNK)]
    return vocab.decode([rng.choices(pieces, k=rng.randint(2, 32)) for _ in range(n)])
