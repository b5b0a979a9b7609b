"""Writes a checkpoint in the format of another library, and checks the result before it appears.

The folder is written under a temporary name, loaded by the library that it is for, compared with
our model on real lines, described by a card, and only then renamed: an export that disagrees with
its checkpoint never appears.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from nmt.checkpoint.checkpoint import Checkpoint
from nmt.config import DataConfig, DecodingConfig
from nmt.config_files import format_config
from nmt.data.vocab import CONTROL_IDS, UNK, EncodedLines, Vocabulary
from nmt.extras.cards.card import render_export_card
from nmt.extras.export.bergamot import load_bergamot, write_bergamot
from nmt.extras.export.ctranslate2 import CTranslate2Engine, write_ctranslate2
from nmt.extras.export.huggingface import HuggingFaceEngine, write_huggingface
from nmt.extras.export.marian_files import EPSILON, MarianEngine, load_marian, write_marian
from nmt.extras.export.parity import Agreement, Engine, OwnEngine, compare_engines, describe_bound
from nmt.extras.export.safetensors import load_safetensors, write_safetensors
from nmt.model.transformer import Transformer
from nmt.system.errors import Failure, UserError
from nmt.system.files import write_folder, write_json, write_text
from nmt.system.output_folder import check_replaceable
from nmt.system.run_folder import CARD_FILE, CONFIG_FILE, EXPORT_FILE, MODEL_FILE
from nmt.translate.translator import Translator, make_translator

FLOATS = ("float32", "float16", "bfloat16")
WITH_INT8 = (*FLOATS, "int8", "int8_float32", "int8_float16", "int8_bfloat16")


@dataclass(frozen=True)
class Format:
    """How a model is written for another library, and loaded by that library to be compared."""

    library: str  # what loads it, by its name on the hub
    quantizations: Sequence[str]
    # fills a folder that has the config, and returns how to use the export, for its card
    write: Callable[[Path, Transformer, Vocabulary, DataConfig, DecodingConfig, str], str]
    # An export that is just being made has no manifest yet, so nothing is verified.
    load: Callable[[Path], Engine]


FORMATS = {
    "ctranslate2": Format("ctranslate2", WITH_INT8, write_ctranslate2, CTranslate2Engine),
    "huggingface": Format("transformers", FLOATS, write_huggingface, HuggingFaceEngine),
    "marian": Format("marian", ("float32",), write_marian, load_marian),
    "bergamot": Format("bergamot", ("int8", "float32"), write_bergamot, load_bergamot),
    "safetensors": Format("safetensors", FLOATS, write_safetensors, load_safetensors),
    "argos": Format("ctranslate2", WITH_INT8, write_ctranslate2, CTranslate2Engine),
}
N_LINES = 32  # that are compared when no text is given
MAX_COMPARED = 100  # the first pieces of an output


def export(
    checkpoint: Checkpoint,
    to: str,
    out: Path,
    quantization: str,
    lines: Sequence[str],
    is_forced: bool = False,
) -> Agreement:
    """Write the folder `out`, or raise and change nothing. Empty lines are not compared."""
    format = FORMATS[to]
    if quantization not in format.quantizations:
        raise UserError(
            f"--quantization {quantization}: --to {to} does not support it; use one of "
            f"{', '.join(format.quantizations)}"
        )
    out = out.resolve()
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{out}: is a path that is not UTF-8, which engines cannot open; choose another -o DIR"
        ) from None

    inputs = [checkpoint.path]
    check_replaceable(out, "an export", lambda names: EXPORT_FILE in names, is_forced, inputs)
    config, vocab = checkpoint.config, checkpoint.vocab
    translator = make_translator(checkpoint, torch.device("cpu"), config.decoding)
    src = _encode_lines(translator, vocab, lines, config.data.train_tags)
    limit = MAX_COMPARED
    if config.model.positions == "learned":  # their table may end earlier
        limit = min(limit, config.model.max_positions - 1)
    write = partial(write_bergamot, src=src) if to == "bergamot" else format.write
    agreements: list[Agreement] = []  # of the one comparison, once it has been made

    def fill(folder: Path) -> None:
        # write, load, compare
        write_text(folder / CONFIG_FILE, format_config(config))
        usage = write(folder, translator.model, vocab, config.data, config.decoding, quantization)
        ours, theirs = OwnEngine(translator.model), format.load(folder)
        in_use = ""
        if isinstance(theirs, MarianEngine) and quantization == "float32":
            found = compare_engines(ours, theirs, src, limit)
            _check(found, config.model.positions)
            in_use = f"; as Marian runs it: {found}"
            theirs.take_constants(config.model.positions, EPSILON)
        agreement = compare_engines(ours, theirs, src, limit)
        if to == "argos":  # which chooses the type, whatever that of the weights
            auto = CTranslate2Engine(folder, compute_type="auto")
            found = compare_engines(ours, auto, src, limit)
            in_use = f"; as Argos runs it here, in {auto.translator.compute_type}: {found}"
        agreement = replace(agreement, in_use=in_use)
        if isinstance(theirs, HuggingFaceEngine):  # it has a tokenizer of its own
            tgt_lines = lines if config.vocab.joint else make_lines(vocab.tgt)
            theirs.check_tokenizer(vocab, lines, tgt_lines)
        _check(agreement, quantization)
        agreements.append(agreement)

        # describe
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
        card = render_export_card(
            checkpoint, to, quantization, format.library, str(agreement), usage
        )
        write_text(folder / CARD_FILE, card)

    write_folder(out, fill)
    return agreements[0]


def _check(agreement: Agreement, quantization: str) -> None:
    if not agreement.is_within(quantization):
        raise Failure(
            f"the exported model disagrees with the checkpoint: {agreement}, but the limit is "
            f"{describe_bound(quantization)}; nothing was written"
        )


def _encode_lines(
    translator: Translator, vocab: Vocabulary, lines: Sequence[str], tags: Sequence[str]
) -> EncodedLines:
    """Encode the lines that are to be compared, each after one of `tags`; refuse if none has text."""
    src: EncodedLines = []
    if tags:
        translator.set_tag(tags[0])  # which leaves less room for a line
    for n, ids in enumerate(vocab.src.encode(lines), 1):
        if ids:
            tag = [vocab.src.find_symbol(tags[n % len(tags)])] if tags else []
            src.append([*tag, *translator.shorten(ids, n)])
    if not src:
        raise UserError(
            "--check-lines: all lines are empty, so there is nothing to compare; give a file with text"
        )
    return src


def make_lines(vocab: Vocabulary) -> list[str]:
    """Make lines to compare when no text is given: they make no sense, but use all of the source's
    vocabulary.
    """
    rng = random.Random(1)
    pieces = [i for i in range(vocab.src.size) if i not in (*CONTROL_IDS, UNK)]
    lines = [rng.choices(pieces, k=rng.randint(2, 32)) for _ in range(N_LINES)]
    return vocab.src.decode(lines)
