"""Reads a Marian model in the format of the Hugging Face hub, such as OPUS-MT, and what nmt exported to Marian or
Bergamot.

A model of the hub has config.json, the weights, two SentencePiece models and a table of ids, mostly one table for
both languages. Here each side gets a SentencePiece model with our ids. The source's has the pieces of
its language; a piece that the table lacks has the weights of the unknown piece, as in Marian. The target's
has every id, because all take part in the softmax, and marks what its language lacks as unused, so
that no text is split into it. So source text is split exactly as in Marian, and so is target text, unless
the table lacks a piece, which is unknown in Marian and splits into smaller ones here.

Nothing is unpickled: weights are safetensors, or what torch reads with weights_only.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from nmt.checkpoint.checkpoint import Average, Snapshot, is_without_optimizer, save_checkpoint
from nmt.config import DataConfig, DecodingConfig, ModelConfig, RunConfig, VocabConfig
from nmt.config_files import find_model, load_recorded_config
from nmt.data.vocab import (
    MAX_MODEL_BYTES,
    MAX_PIECES,
    SymbolKind,
    Vocab,
    VocabPair,
    Vocabulary,
    combine_digests,
    encode_field,
    encode_piece,
)
from nmt.extras.export.bergamot import load_bergamot
from nmt.extras.export.marian_files import MarianEngine, load_marian
from nmt.extras.export.tensors import list_layer_parts
from nmt.system.caches import find_cache_folder, make_temporary_folder
from nmt.system.errors import UserError, describe_error
from nmt.system.extras import import_extra
from nmt.system.files import (
    digest_file,
    has_plain_file,
    make_folder,
    read_bytes,
    read_json,
    read_manifest,
    verify,
)
from nmt.system.output_folder import check_replaceable
from nmt.system.progress import say
from nmt.system.run_folder import CONFIG_FILE, EXPORT_FILE, MANIFEST_FILE, MODEL_FILE
from nmt.system.strict_json import Fields
from nmt.system.tensor_files import Tensors

HUB = "hf:"  # before the id of a model of the hub
SETTINGS_FILE = "config.json"
PICKLED_FILE = "pytorch_model.bin"
FILES = (
    SETTINGS_FILE,
    "generation_config.json",
    "tokenizer_config.json",
    "vocab.json",
    "target_vocab.json",
    "source.spm",
    "target.spm",
    MODEL_FILE,
    PICKLED_FILE,
)
# What reads back exports of ours
LOADERS: dict[str, Callable[[Path], MarianEngine]] = {
    "marian": load_marian,
    "bergamot": load_bergamot,
}
# What the libraries raise that read files which do not fit each other
MISFITS = RuntimeError, LookupError, TypeError, ValueError, OverflowError, BadZipFile, struct.error
ACTIVATION_NAMES = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
MAX_SIZE = 1 << 20
NEVER_CHOSEN = -100.0  # a logit that leaves no trace in a softmax
UNUSED, LOWEST_SCORE = 5, -1e6  # of pieces that text is never split into
# The marks of our vocabularies, by id, with the kinds that SentencePiece gives them
MARKS = {"<pad>": 3, "<unk>": 2, "<s>": 3, "</s>": 3}


@dataclass(frozen=True)
class PublishedSide:
    """A vocabulary with our ids, and the row of the published embeddings for each."""

    vocab: Vocab
    rows: list[int]


def convert_if_published(path: Path, out: Path | None, is_forced: bool) -> Path:
    """Convert a published model to a checkpoint, and return its path: `out`, or one in the cache, where
    it is kept for the next time. Any other path comes back as it is.
    """
    path = Path(find_model(str(path)))
    is_on_hub = str(path).startswith(HUB)
    is_exported = _find_loader(path) is not None
    if not (is_on_hub or is_exported or "model_type" in _read_if_there(path / SETTINGS_FILE)):
        return path
    cache = (find_cache_folder() or Path(make_temporary_folder())) / "published"
    if is_on_hub:
        path = _download(str(path).removeprefix(HUB), cache / "hub")
    if out is None:
        names = (EXPORT_FILE, MANIFEST_FILE) if is_exported else FILES
        files = [path / name for name in names if has_plain_file(path / name)]
        digest = combine_digests([digest_file(file) for file in files])
        out = cache / f"{path.resolve().name}-{digest[:16]}"
        if out.is_dir():
            return out
    else:
        check_replaceable(out, "a converted model", is_without_optimizer, is_forced, [path])
    say(f"converting {path} to {out}")
    config, vocab, tensors = read_published(path)
    make_folder(out.parent)
    save_checkpoint(out, Snapshot(tensors, {}), Average([path.resolve().name], 0), config, vocab)
    return out


def _read_if_there(path: Path) -> Fields:
    values = read_json(path) if has_plain_file(path) else {}
    return values if isinstance(values, dict) else {}


def _download(name: str, folder: Path) -> Path:
    """Fetch a model of the Hugging Face hub into a folder of its own below this one, unless it is there."""
    hub = import_extra("huggingface_hub")
    target = folder / name.replace("/", "--")
    try:
        hub.snapshot_download(name, allow_patterns=list(FILES), local_dir=target)
        return target
    except Exception as error:  # the library has a dozen kinds, and those of its HTTP client
        reason = describe_error(error)[:200]
        raise UserError(f"{HUB}{name}: cannot be fetched from the hub ({reason})") from None


def read_published(folder: Path) -> tuple[RunConfig, Vocabulary, Tensors]:
    """Read a published model's settings, its vocabulary, and its tensors by our names."""
    load = _find_loader(folder)
    try:
        return _read(folder) if load is None else _read_exported(folder, load)
    except MISFITS as error:
        reason = describe_error(error)
        raise UserError(
            f"{folder}: its weights, pieces and settings do not fit each other ({reason}); use another copy"
        ) from None


def _find_loader(folder: Path) -> Callable[[Path], MarianEngine] | None:
    """Return what reads this folder if it is an export to Marian or Bergamot."""
    return LOADERS.get(str(_read_if_there(folder / EXPORT_FILE).get("format")))


def _read_exported(
    folder: Path, load: Callable[[Path], MarianEngine]
) -> tuple[RunConfig, Vocabulary, Tensors]:
    """Read what nmt exported to Marian or Bergamot: the model that those compute."""
    manifest = read_manifest(folder)
    verify(folder)
    config = load_recorded_config(folder / CONFIG_FILE)
    form = load(folder).model
    names = sorted(file for file in manifest if file.endswith(".spm"))  # the source's comes first
    sides = [Vocab(read_bytes(folder / name, MAX_MODEL_BYTES)) for name in names]
    vocab: Vocabulary = sides[0] if len(sides) == 1 else VocabPair(sides[0], sides[1])
    weights = {name: parameter.detach() for name, parameter in form.named_parameters()}
    for name, rows in weights.items():  # 8 bits have rows without a piece
        if name.startswith(("src_", "tgt_", "projection")):
            side = vocab.src if name.startswith("src_") else vocab.tgt
            weights[name] = rows[: side.size].clone()
    model = replace(form.config, positions="marian")
    return replace(config, model=model), vocab, weights


def _read(folder: Path) -> tuple[RunConfig, Vocabulary, Tensors]:
    reader = _SettingsReader(folder)
    reader.check_kind()
    tensors = _read_tensors(folder)
    names = _read_names(folder / "vocab.json")
    pad, start = reader.read_size("pad_token_id", 0), reader.read_size("decoder_start_token_id", 0)
    marks = [pad, names.get("<unk>", pad), start, reader.read_size("eos_token_id", 0)]

    # vocabulary
    models = [
        read_bytes(folder / name, MAX_MODEL_BYTES, "; use another copy")
        for name in ("source.spm", "target.spm")
    ]
    shared, decoder = "model.shared.weight", "model.decoder.embed_tokens.weight"
    src_embedding = _find(tensors, folder, "model.encoder.embed_tokens.weight", shared)
    tgt_embedding = _find(tensors, folder, decoder, shared)
    projection = _find(tensors, folder, "lm_head.weight", decoder, shared)
    own_names = folder / "target_vocab.json"
    has_own = has_plain_file(own_names)
    tgt_names = _read_names(own_names) if has_own else names
    tgt = _make_target(models[1], tgt_names, len(tgt_embedding), marks)
    is_joint = models[0] == models[1] and not has_own
    src = tgt if is_joint else _make_source(models[0], names, marks)
    vocab: Vocabulary = tgt.vocab if is_joint else VocabPair(src.vocab, tgt.vocab)

    # weights
    bias = _find(tensors, folder, "final_logits_bias").reshape(-1)[tgt.rows]
    for mark, row in enumerate(marks):
        is_repeated = row in marks[mark + 1 :]
        if is_repeated:  # one entry of their softmax, which would be two of ours
            bias[mark] = NEVER_CHOSEN
    is_tied = torch.equal(projection, tgt_embedding)
    weights = {"tgt_embedding.weight": tgt_embedding[tgt.rows], "projection.bias": bias}
    if is_joint and torch.equal(src_embedding, tgt_embedding):
        tied: Any = True if is_tied else "embeddings"
    else:
        tied = "decoder" if is_tied else False
        weights["src_embedding.weight"] = src_embedding[src.rows]
    if not is_tied:
        weights["projection.weight"] = projection[tgt.rows]
    config = reader.make_config(vocab, tied)
    for ours, theirs in list_layer_parts(config.model):
        for kind in ("weight", "bias"):
            tensors_of_ours = [_find(tensors, folder, f"model.{name}.{kind}") for name in theirs]
            weights[f"{ours}.{kind}"] = torch.cat(tensors_of_ours)
    return config, vocab, weights


class _SettingsReader:
    """config.json and the two small files beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = _read_if_there(folder / SETTINGS_FILE)
        self.generation = _read_if_there(folder / "generation_config.json")
        self.tokenizer = _read_if_there(folder / "tokenizer_config.json")

    def fail(self, key: str, reason: str) -> UserError:
        value = ascii(self.settings.get(key))[:99]
        return UserError(f"{self.folder / SETTINGS_FILE}: {key} is {value}; {reason}")

    def read_size(self, key: str, least: int = 1) -> int:
        value = self.settings.get(key)
        if type(value) is not int or not least <= value < MAX_SIZE:
            raise self.fail(key, f"expected a number of at least {least}")
        return value

    def read_share(self, key: str) -> float:
        value = self.settings.get(key, 0.0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise self.fail(key, "expected a number in [0, 1)")
        return float(value)

    def check_kind(self) -> None:
        """Refuse a model that computes something else than ours, or more pieces than ids have room for."""
        if self.settings.get("model_type") != "marian":
            raise self.fail(
                "model_type",
                "only marian is supported, OPUS-MT among it (M2M and NLLB have more pieces than ids "
                f"have room for, which is {MAX_PIECES:,})",
            )
        for key in ("normalize_before", "normalize_embedding"):
            if self.settings.get(key, False) is not False:
                raise self.fail(key, "only False is supported")
        if self.settings.get("activation_function") not in ACTIVATION_NAMES:
            raise self.fail("activation_function", f"use one of {', '.join(ACTIVATION_NAMES)}")
        for part in ("attention_heads", "ffn_dim"):
            key = f"decoder_{part}"
            if self.read_size(key) != self.read_size(f"encoder_{part}"):
                raise self.fail(key, f"only encoder_{part} is supported, which is the encoder's")

    def make_config(self, vocab: Vocabulary, tied: Any) -> RunConfig:
        n_positions = self.read_size("max_position_embeddings")
        beam = self.generation.get("num_beams", self.settings.get("num_beams"))
        search = DecodingConfig.PRESETS["hf"] | {"max_extra": n_positions}
        if type(beam) is int and 1 <= beam <= 100:
            search["beam"] = beam
        return RunConfig(
            name=self.folder.resolve().name,
            data=DataConfig(
                src=self.read_language("source_lang", "src"),
                tgt=self.read_language("target_lang", "tgt"),
            ),
            vocab=VocabConfig(
                joint=isinstance(vocab, Vocab),
                size=vocab.src.size,
                tgt_size=None if isinstance(vocab, Vocab) else vocab.tgt.size,
                byte_fallback=vocab.tgt.has_bytes,
            ),
            model=ModelConfig(
                d_model=self.read_size("d_model"),
                d_ff=self.read_size("encoder_ffn_dim"),
                n_heads=self.read_size("encoder_attention_heads"),
                n_layers=self.read_size("encoder_layers"),
                decoder_layers=self.read_size("decoder_layers"),
                dropout=self.read_share("dropout"),
                attention_dropout=self.read_share("attention_dropout"),
                ffn_dropout=self.read_share("activation_dropout"),
                activation=ACTIVATION_NAMES[self.settings["activation_function"]],  # type: ignore[arg-type]
                tied=tied,
                scale_embeddings="embedding" if self.settings.get("scale_embedding") else "none",
                attention_bias=True,
                projection_bias=True,
            ),
            decoding=DecodingConfig(preset="hf", max_source=n_positions - 1, **search),
        )

    def read_language(self, key: str, otherwise: str) -> str:
        name = self.tokenizer.get(key)
        is_name = isinstance(name, str) and re.fullmatch("[A-Za-z_]{2,20}", name)
        return str(name) if is_name else otherwise


def _read_names(path: Path) -> dict[str, int]:
    names = read_json(path)
    ids = list(names.values()) if isinstance(names, dict) else []
    if not ids or not all(type(i) is int and 0 <= i < MAX_PIECES for i in ids):
        raise UserError(
            f"{path}: is not a table of at most {MAX_PIECES:,} pieces and their ids; use another copy"
        )
    return dict(names)


# ---- vocabulary -------------------------------------------------------------------------------------------------


def _make_source(model: bytes, names: Mapping[str, int], marks: list[int]) -> PublishedSide:
    pieces, others = _split_model(model)
    rows = [*marks, *(names.get(text, marks[1]) for text, _ in pieces)]
    tags = sorted(name for name in names if re.fullmatch(">>.+<<", name))  # of target languages
    added = [encode_piece(tag, SymbolKind.CONTROL) for tag in tags]
    rows += [names[tag] for tag in tags]
    return PublishedSide(_join_model([piece for _, piece in pieces] + added, others), rows)


def _make_target(
    model: bytes, names: Mapping[str, int], n_rows: int, marks: list[int]
) -> PublishedSide:
    if _has_our_ids(model, names, n_rows):
        return PublishedSide(Vocab(model), list(range(n_rows)))
    pieces, others = _split_model(model)
    known = dict(pieces)
    text_of = {i: text for text, i in names.items()}
    rows, ordered = list(marks), []
    for i in range(n_rows):
        if i in marks:
            continue
        text = text_of.get(i, "<pad>")
        if text in MARKS:  # a row without a piece, or with a second mark of that name
            text = f"<unused-{i}>"
        ordered.append(known.get(text) or encode_piece(text, UNUSED, LOWEST_SCORE))
        rows.append(i)
    return PublishedSide(_join_model(ordered, others), rows)


def _has_our_ids(model: bytes, names: Mapping[str, int], n_rows: int) -> bool:
    """Whether nmt-export wrote it: then the table has our ids."""
    try:
        vocab = Vocab(model)
    except UserError:
        return False
    ids = {piece: i for i, piece in enumerate(vocab.list_pieces())}
    return vocab.size == n_rows and names == ids


def _split_model(model: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """Return the text and the message of each piece but the marks, and all other fields."""
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError:
        raise UserError("damaged SentencePiece model; use another copy") from None
    messages, others = [], b""
    for number, content in _read_fields(model):
        if number == 1:
            messages.append(content)
        else:
            others += encode_field(number, content)
    pieces = []
    for i, message in enumerate(messages):
        if not (processor.is_unknown(i) or processor.is_control(i)):
            pieces.append((processor.id_to_piece(i), message))
    return pieces, others


def _join_model(pieces: list[bytes], others: bytes) -> Vocab:
    """Make a model of these pieces, after the four marks of ours."""
    marks = [encode_piece(mark, kind) for mark, kind in MARKS.items()]
    model = b"".join(encode_field(1, piece) for piece in [*marks, *pieces])
    # of the settings that it was trained with, the names of the marks; the last of two holds
    names = {45: "<unk>", 46: "<s>", 47: "</s>", 48: "<pad>"}
    settings = b"".join(encode_field(number, name.encode()) for number, name in names.items())
    return Vocab(model + others + encode_field(2, settings))


def _read_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a protocol buffer that have a length, as all of a SentencePiece model have."""
    offset = 0
    while offset < len(message):
        key, offset = _read_number(message, offset)
        length, offset = _read_number(message, offset)
        yield key >> 3, message[offset : offset + length]
        offset += length


def _read_number(message: bytes, offset: int) -> tuple[int, int]:
    """Read a number that is written in groups of seven bits, lowest first; also return where it ends."""
    number = shift = 0
    while message[offset] >= 128:
        number |= (message[offset] & 127) << shift
        shift += 7
        offset += 1
    return number | message[offset] << shift, offset + 1


# ---- weights ----------------------------------------------------------------------------------------------------


def _read_tensors(folder: Path) -> Tensors:
    try:
        if has_plain_file(folder / MODEL_FILE):
            tensors = load_file(folder / MODEL_FILE)
        elif has_plain_file(folder / PICKLED_FILE):
            tensors = torch.load(folder / PICKLED_FILE, map_location="cpu", weights_only=True)
        else:
            raise UserError(
                f"{folder}: has neither {MODEL_FILE} nor {PICKLED_FILE}; use another copy"
            )
        return {name: tensor.float() for name, tensor in tensors.items()}
    except UserError:
        raise
    except Exception as error:  # each of both readers has its own kinds for a damaged file
        reason = describe_error(error)
        raise UserError(
            f"{folder}: its weights cannot be read ({reason}); use another copy"
        ) from None


def _find(tensors: Mapping[str, Tensor], folder: Path, *names: str) -> Tensor:
    """Return the first of these tensors that exists."""
    for name in names:
        if name in tensors:
            return tensors[name]
    raise UserError(f"{folder}: has no tensor {names[0]}; use another copy")
