"""The BPE (section 5.1), applied by SentencePiece inside this process.

A model reads the ids of `vocab.src` and writes those of `vocab.tgt`. One joint BPE is both by
itself; with `vocab.joint: false` a `VocabPair` has one for each side, in a file of its own.

Text goes in as it is (`identity`, not SentencePiece's default `nmt_nfkc`, which turns a half into
1/2 and U+2028 into a space): scores are computed against raw references, so whatever a reference
contains must be writable. Only runs of spaces shrink to one. The model's bytes are the vocabulary;
every store and checkpoint holds their sha256.

No piece spans a space, which is why a BPE is learned from words and their counts, and a corpus is
encoded word by word (nmt/corpus/learn_bpe.py, encoder.py).
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import sentencepiece

from nmt.system.errors import UserError
from nmt.system.files import (
    has_plain_file,
    read_bytes,
    read_manifest,
    remove_entry,
    write_bytes,
)
from nmt.system.run_folder import MANIFEST_FILE, SIDE_VOCAB_FILES, VOCAB_FILE, find_vocab_files

PAD, UNK, BOS, EOS = 0, 1, 2, 3  # of every vocabulary
# What no text contains. UNK is not among them: it decodes to SentencePiece's mark for an unknown
# character.
CONTROL_IDS = (PAD, BOS, EOS)
# This share of a text: of words whose letters a vocabulary lacks, every second piece is a space.
MOSTLY_UNKNOWN = 0.3
SPACE = "\u2581"  # how a piece writes the space before it
MAX_MODEL_BYTES = 8 << 20
MAX_PIECES = 1 << 16  # because stores hold ids in 16 bits
EncodedLines = list[list[int]]  # the ids of each
PROBE = "\ufb01 \u00bd\u2028\u3000A\u030a"  # what any normalisation would change

sentencepiece.set_min_log_level(2)  # otherwise its C++ code writes to standard error


class Vocab:
    """A BPE model, which alone is the vocabulary of both sides."""

    def __init__(self, model: bytes) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except (RuntimeError, UnicodeDecodeError):  # its complaint may quote bytes of the model
            raise UserError(
                "damaged BPE model (SentencePiece cannot read it); use another copy"
            ) from None
        special = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if special != (PAD, UNK, BOS, EOS):
            raise UserError(
                f"BPE model with pad, unk, bos, eos = {special} instead of {(PAD, UNK, BOS, EOS)}; "
                "use one that nmt-prepare made"
            )
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()
        self.size: int = processor.get_piece_size()
        if self.size > MAX_PIECES:
            raise UserError(
                f"BPE model of {self.size:,} pieces, but ids are stored in 16 bits; "
                f"use one of at most {MAX_PIECES:,} pieces"
            )
        try:
            pieces = [processor.id_to_piece(i) for i in range(self.size)]
            processor.decode([UNK])  # the mark of an unknown character is in the model too
        except UnicodeDecodeError:
            raise UserError("damaged BPE model (a piece is not UTF-8); use another copy") from None
        is_identity = processor.normalize(PROBE).replace(SPACE, " ").strip(" ") == PROBE
        spans_spaces = any(SPACE in piece[1:] for piece in pieces)
        # Whether the ids of a line are those of its words.
        self.is_wordwise = is_identity and not spans_spaces
        # Whether it spells characters without a piece in bytes, so that nothing is unknown.
        self.has_bytes: bool = processor.is_byte(processor.piece_to_id("<0x00>"))
        self.letters = {" ", *"".join(pieces)}  # that its pieces spell, not bytes
        self._processor = processor

    @property
    def src(self) -> "Vocab":
        return self

    @property
    def tgt(self) -> "Vocab":
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def files(self) -> dict[str, "Vocab"]:
        return {VOCAB_FILE: self}

    @classmethod
    def load(cls, path: Path) -> "Vocab":
        model = read_bytes(path, MAX_MODEL_BYTES, "; expected a BPE model")
        try:
            return cls(model)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def encode(self, lines: Sequence[str] | Sequence[bytes]) -> EncodedLines:
        """Return the ids of each line, without bos and eos."""
        batch: list[Any] = list(lines)  # encoded in one call, which is faster than one a line
        ids: EncodedLines = self._processor.encode(batch, num_threads=1)
        return ids

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the detokenised text of each list of ids, without pad, bos and eos wherever they
        occur.
        """
        rows = [[i for i in map(int, row) if i not in CONTROL_IDS] for row in ids]
        texts: list[str] = self._processor.decode(rows)
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def list_pieces(self) -> list[str]:
        return self.pieces(range(self.size))

    def find_symbol(self, symbol: str) -> int:
        """Return the id of a symbol, such as the tag of a corpus."""
        i: int = self._processor.piece_to_id(symbol)
        is_there = i not in (UNK, *CONTROL_IDS) and self._processor.id_to_piece(i) == symbol
        if is_there and (self._processor.is_control(i) or is_user_symbol(self._processor, i)):
            return i
        raise UserError(
            f"{symbol!r} is not a symbol of this BPE model; learn one that has it: give it as the tag "
            "of a training corpus, or in vocab.user_symbols"
        )

    def with_symbols(self, tags: Sequence[str], user_symbols: Sequence[str]) -> "Vocab":
        """Return the vocabulary with the symbols that it lacks as further pieces at its end."""
        lacking = [symbol for symbol in user_symbols if not self._has_piece(symbol)]
        for symbol in user_symbols:
            i = self._processor.piece_to_id(symbol)
            if symbol not in lacking and not is_user_symbol(self._processor, i):
                raise UserError(
                    f"{symbol!r} is already an ordinary piece of this BPE model, so it is not always kept whole; leave "
                    "it out of vocab.user_symbols, or choose another"
                )
        grown = append_symbols(self.model, lacking, SymbolKind.USER_DEFINED)
        new_tags = [tag for tag in tags if not self._has_piece(tag) and tag not in lacking]
        return Vocab(append_symbols(grown, new_tags, SymbolKind.CONTROL))

    def _has_piece(self, text: str) -> bool:
        return self._processor.piece_to_id(text) != UNK

    def extends(self, other: "Vocab") -> bool:
        """Whether this equals the other one, or has all its pieces, with the same ids, and more."""
        own = range(other.size)
        is_longer = self.size > other.size and self.pieces(own) == other.pieces(own)
        return is_longer or self.model == other.model


def is_user_symbol(processor: sentencepiece.SentencePieceProcessor, i: int) -> bool:
    """Whether a piece of several characters is one that SentencePiece never splits."""
    piece = processor.id_to_piece(i)
    if processor.get_score(i) != 0:  # the score of symbols; of a unigram's pieces it is never 0
        return False
    if len(piece) < 2:
        return False
    try:
        # alpha=1 leaves out every merge, so that an ordinary piece falls into its letters
        return i in processor.encode(piece, enable_sampling=True, alpha=1.0)
    except RuntimeError:  # a model of words or of letters, which has no merges
        return True


@dataclass(frozen=True)
class VocabPair:
    """A BPE model for each side."""

    src: Vocab
    tgt: Vocab

    @property
    def digest(self) -> str:
        return combine_digests([self.src.digest, self.tgt.digest])

    @property
    def sizes(self) -> tuple[int, int]:
        return self.src.size, self.tgt.size

    @property
    def files(self) -> dict[str, Vocab]:
        return dict(zip(SIDE_VOCAB_FILES, (self.src, self.tgt), strict=True))


Vocabulary = Vocab | VocabPair


def combine_digests(digests: Sequence[str]) -> str:
    """Return the digest of a vocabulary from those of its files."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def load_vocab(folder: Path) -> Vocabulary:
    """Load the vocabulary of a store, a checkpoint, an export or a run."""
    if has_plain_file(folder / MANIFEST_FILE):
        names = set(read_manifest(folder))
    else:
        names = {path.name for path in folder.glob("vocab.*")}
    return load_vocab_files(folder, find_vocab_files(names))


def load_vocab_files(folder: Path, names: Sequence[str]) -> Vocabulary:
    """Load the vocabulary from these files of a folder."""
    models = [Vocab.load(folder / name) for name in names]
    return VocabPair(*models) if len(models) > 1 else models[0]


def format_size(vocab: Vocabulary) -> str:
    """Format the number of pieces, or the numbers of the source's and the target's."""
    return " + ".join(f"{side.size:,}" for side in vocab.files.values())


def write_vocab(folder: Path, vocab: Vocabulary) -> None:
    """Write the vocabulary's files; one that was there is replaced, whichever files it had."""
    for name in {VOCAB_FILE, *SIDE_VOCAB_FILES} - vocab.files.keys():
        remove_entry(folder / name)
    for name, side in vocab.files.items():
        write_bytes(folder / name, side.model)


def is_extension(new: Vocabulary, old: Vocabulary) -> bool:
    """Whether each side has all pieces of the old one, with the same ids, and one has further ones."""
    if len(new.files) != len(old.files) or new.digest == old.digest:
        return False
    return new.src.extends(old.src) and new.tgt.extends(old.tgt)


# ---- further pieces ----------------------------------------------------------------------------------------------


class SymbolKind(IntEnum):
    """Kinds of pieces that SentencePiece never splits or joins, with its own numbers."""

    CONTROL = 3  # that no text contains, even if it contains the same characters
    USER_DEFINED = 4  # that are found in text


def append_symbols(model: bytes, symbols: Sequence[str], kind: SymbolKind) -> bytes:
    """Return the BPE model with these symbols as further pieces; the others keep their ids.

    A model is a protocol buffer, whose lists may go on at its end: its field 1 is the list of pieces.
    """
    pieces = [encode_field(1, encode_piece(symbol, kind, 0.0)) for symbol in symbols]
    return model + b"".join(pieces)


def encode_piece(text: str, kind: int, score: float | None = None) -> bytes:
    """Write a piece of a model: its text, its score and its kind."""
    written = b"" if score is None else struct.pack("<Bf", 0x15, score)
    return encode_field(1, text.encode()) + written + bytes([0x18, kind])


def encode_field(number: int, content: bytes) -> bytes:
    """Write a field of a protocol buffer that has a length: its number, the length, the content."""
    return _encode_number(number << 3 | 2) + _encode_number(len(content)) + content


def _encode_number(number: int) -> bytes:
    """Write a number in groups of seven bits, lowest first."""
    encoded = bytearray()
    while number >= 1 << 7:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
