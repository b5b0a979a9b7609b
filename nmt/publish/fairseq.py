"""A Transformer of fairseq as an `Origin`: its .pt file, its dict.txt, and the SentencePiece model of its text.

The file has the settings as a namespace or, newer, as a dict. dict.txt lists pieces from id 4 on; those before are
<s> <pad> </s> <unk>. A decoder begins with </s>. Its sinusoids are not the paper's: rates fall to 1/10000 over
d_model/2 - 1 steps and the first place is number 2, so they come in as a table of just those rows.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import ModelConfig
from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.errors import UserError
from nmt.publish.origin import Matrices, Origin, Rows, Settings, Tensors, plain, said, size_at, unpickled
from nmt.publish.pieces import PieceModel

SPECIAL = {BOS: 0, PAD: 1, EOS: 2, UNK: 3}  # ids there
MARKS = ("<s>", "<pad>", "</s>", "<unk>")
FIRST_PLACE = SPECIAL[PAD] + 1
FILLER = re.compile(r"madeupword\d{4}")  # fairseq-preprocess fills up to a multiple of 8 with them
SIDES = ("encoder", "decoder")
MAX_BYTES = 16 << 20
LEAST_PLACES, MOST_PLACES = 1024, 8192

ONLY = (  # settings that can have one value here, and why
    ("activation_fn", "relu", "this model has no other"),
    ("no_scale_embedding", False, "embeddings are always multiplied by sqrt(d_model)"),
    ("layernorm_embedding", False, "there is no norm on embeddings"),
    ("adaptive_softmax_cutoff", None, "the softmax is over all pieces"),
    ("adaptive_input", False, "all embeddings are of one width"),
    ("no_token_positional_embeddings", False, "positions are always added"),
    ("no_cross_attention", False, "each decoder layer attends to the source"),
    ("cross_self_attention", False, "the decoder attends to source and target apart"),
    ("no_decoder_final_norm", False, "pre-norm ends with a norm"),
    ("encoder_layers_to_keep", None, "all layers of the file are used"),
    ("decoder_layers_to_keep", None, "all layers of the file are used"),
    ("encoder_recurrent_stacking", None, "each layer is used once"),
    ("decoder_recurrent_stacking", None, "each layer is used once"))


def read(path: Path, sentencepiece: Path, dictionaries: Sequence[Path]) -> Origin:
    """`dictionaries` are that of the source and that of the target, or one for both."""
    state = unpickled(path)
    config = settings(path, state)
    if not str(arch := config.values.get("arch")).startswith("transformer"):
        raise UserError(f"{path}: arch is {said(arch)}; only transformer and its variants are this model")
    config.check("task", ("translation",), "other tasks add marks to sentences", "translation")
    for key, value, why in ONLY:
        config.check(key, (value,), why, value)
    for key in ("embed_dim", "ffn_embed_dim", "layers", "attention_heads"):
        config.check(f"decoder_{key}", (config.number(f"encoder_{key}"),), f"encoder_{key} and it are one setting")
    d_model, is_pre = config.number("encoder_embed_dim"), config.is_on("encoder_normalize_before")
    config.check("decoder_normalize_before", (is_pre,), "encoder_normalize_before and it are one setting", False)
    for key in ("decoder_input_dim", "decoder_output_dim"):
        config.check(key, (d_model,), "there is no product that changes the width", d_model)
    weights = state.get("model")
    if not isinstance(weights, dict):
        raise UserError(f"{path}: has no 'model' with weights; it is no checkpoint of fairseq")
    tensors = Tensors(path, weights)
    tensors.forget(*(f"{side}.{name}" for side in SIDES for name in ("version", "embed_positions._float_tensor")))
    ids = [entries(place) for place in (dictionaries[0], dictionaries[-1])]
    vocab, rows = pieces(sentencepiece, ids, dictionaries)
    tables = positions(tensors, config, d_model)
    shape = ModelConfig(
        d_model=d_model, d_ff=config.number("encoder_ffn_embed_dim"), n_heads=config.number("encoder_attention_heads"),
        n_layers=config.number("encoder_layers"), dropout=config.dropout(), norm="pre" if is_pre else "post",
        positions="learned", max_positions=len(tables[0]))
    embeddings = matrices(tensors, config, [len(SPECIAL) + len(one) for one in ids], d_model)
    languages = config.text("source_lang"), config.text("target_lang")
    return Origin("fairseq", path, shape, tensors, embeddings, None, tables, rows, vocab, languages, updates(state))


def updates(state: dict[str, Any]) -> int:
    history = state.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history else None
    n = last.get("num_updates") if isinstance(last, dict) else None
    return n if type(n) is int and 0 <= n < 2**63 else 0


def settings(path: Path, state: dict[str, Any]) -> Settings:
    """Flat, as the command line has them: encoder_layers, whether it was written so or as encoder: {layers: ...}."""
    values = plain(state.get("args"))
    if not isinstance(values, dict):
        whole = plain(state.get("cfg"))
        values = whole.get("model") if isinstance(whole, dict) else None
        task = whole.get("task") if isinstance(whole, dict) else None
        if not isinstance(values, dict):
            raise UserError(f"{path}: has neither 'args' nor 'cfg' with a model; it is no checkpoint of fairseq")
        values = {"arch": values.get("_name"), **(task if isinstance(task, dict) else {}), **values}
        values["task"] = task.get("_name") if isinstance(task, dict) else values.get("task", "translation")
    for side in SIDES:
        if isinstance(inner := values.get(side), dict):
            values |= {f"{side}_{key}": value for key, value in inner.items() if not str(value).startswith("${")}
    return Settings(str(path), values)


def entries(path: Path) -> list[str]:
    """The pieces of a dict.txt, in order."""
    try:
        if size_at(path) > MAX_BYTES:
            raise UserError(f"{path}: is too large for a dictionary")
        lines = path.read_bytes().decode().rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; give the dict.txt that belongs to the model") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text, space, count = line.rstrip().rpartition(" ")
        if not space or not text or not count.isdecimal():
            raise UserError(f"{path}:{number}: {said(line)} is not 'piece count'")
        if text in found or text in MARKS:
            raise UserError(f"{path}:{number}: {said(text)} has an id already; give the dict.txt of fairseq-preprocess")
        found[text] = number
    return list(found)


def pieces(sentencepiece: Path, ids: list[list[str]], dictionaries: Sequence[Path]) -> tuple[Vocab, Rows]:
    if size_at(sentencepiece) > MAX_BYTES // 2:
        raise UserError(f"{sentencepiece}: is too large for a SentencePiece model")
    model = PieceModel(sentencepiece.read_bytes(), str(sentencepiece))
    known = {text.decode(errors="replace") for text in model.texts}
    for path, texts in zip((dictionaries[0], dictionaries[-1]), ids, strict=True):
        for text in texts:
            if text not in known and not FILLER.fullmatch(text):
                raise UserError(f"{path}: {said(text)} is no piece of {sentencepiece}; give the model that cut the "
                                "training text")
    fillers = dict.fromkeys(text for texts in ids for text in texts if text not in known)
    vocab = model.with_our_ids(silent=list(fillers))
    numbers = [{text: len(SPECIAL) + i for i, text in enumerate(texts)} for texts in ids]
    src, tgt = ([one.get(text) for text in vocab.pieces(range(vocab.size))] for one in numbers)
    for special, theirs in SPECIAL.items():
        src[special] = tgt[special] = theirs
    return vocab, Rows(src, tgt, SPECIAL[UNK], start=SPECIAL[EOS])


def matrices(tensors: Tensors, config: Settings, sizes: list[int], d_model: int) -> Matrices:
    src, tgt = (tensors.take(f"{side}.embed_tokens.weight", size, d_model)
                for side, size in zip(SIDES, sizes, strict=True))
    is_one = config.is_on("share_all_embeddings")
    is_tied = is_one or config.is_on("share_decoder_input_output_embed")
    projection = tensors.maybe("decoder.output_projection.weight", sizes[1], d_model)
    projection = tgt if projection is None and is_tied else projection
    if projection is None:
        projection = tensors.take("decoder.embed_out", sizes[1], d_model)  # its older name
    if (is_tied and not torch.equal(tgt, projection)) or (is_one and not torch.equal(src, tgt)):
        raise UserError(f"{tensors.path}: embeddings that its settings tie (share_all_embeddings, "
                        "share_decoder_input_output_embed) differ")
    return src, tgt, projection


def positions(tensors: Tensors, config: Settings, d_model: int) -> tuple[Tensor, Tensor]:
    """A row for each place, the same number on both sides: the shorter table decides."""
    limits = [config.number(f"max_{name}_positions", 1024) for name in ("source", "target")]
    found = []
    for side, limit in zip(SIDES, limits, strict=True):
        if config.is_on(f"{side}_learned_pos"):
            table = tensors.take(f"{side}.embed_positions.weight", limit + FIRST_PLACE, d_model)
            found.append(table[FIRST_PLACE:])
        else:
            found.append(sinusoids(min(max(LEAST_PLACES, *limits), MOST_PLACES), d_model))
    n = min(map(len, found))
    return found[0][:n].clone(), found[1][:n].clone()


def sinusoids(n: int, d_model: int) -> Tensor:
    """Theirs, computed as they do, in fp32."""  # (n, d_model)
    half = d_model // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10_000) / max(half - 1, 1)))
    angles = torch.arange(FIRST_PLACE, FIRST_PLACE + n, dtype=torch.float)[:, None] * rates
    return torch.nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, d_model % 2))
