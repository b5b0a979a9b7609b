"""A SentencePiece model of other hands, with pad, unk, bos and eos as ids 0 to 3 as every vocabulary here has them.

A model is a protobuf: pieces in the order of their ids, then how it was trained and how it normalises. Only the order
of pieces changes, and special pieces that are missing come in; text is cut by the scores of ordinary pieces, which go
along, so segmentation stays the same. The wire format needs two functions and no library.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from nmt.data.vocab import BOS, EOS, PAD, UNK, Vocab
from nmt.errors import UserError

UNKNOWN, CONTROL, UNUSED = 2, 3, 5  # kinds of pieces; control ones are never found in text and write nothing
PIECE, TRAINER = 1, 2  # fields of the model
TEXT, SCORE, KIND = 1, 2, 3  # fields of a piece
ALGORITHM, UNIGRAM = 3, 1
ID_FIELDS = {UNK: 40, BOS: 41, EOS: 42, PAD: 43}  # of the trainer's part: ids, and the texts that go with them
TEXT_FIELDS = {UNK: 45, BOS: 46, EOS: 47, PAD: 48}
TEXTS = {UNK: b"<unk>", BOS: b"<s>", EOS: b"</s>", PAD: b"<pad>"}  # where it does not say
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    number: int
    wire: int
    value: bytes  # as it is written; of BYTES without the length


def parse(data: bytes) -> list[Field]:
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("no varint")

    while at < len(data):
        key = varint()
        start = at
        if key & 7 == VARINT:
            varint()
        elif key & 7 == BYTES:
            size = varint()
            start, at = at, at + size
        elif key & 7 in (FIXED32, FIXED64):
            at += 4 if key & 7 == FIXED32 else 8
        else:
            raise ValueError(f"wire type {key & 7}")
        if at > len(data):
            raise ValueError("cut off")
        found.append(Field(key >> 3, key & 7, data[start:at]))
    return found


def write(fields: Sequence[Field]) -> bytes:
    return b"".join(number(f.number << 3 | f.wire) + (number(len(f.value)) if f.wire == BYTES else b"") + f.value
                    for f in fields)


def number(value: int) -> bytes:
    """A varint."""
    more, last = [], value
    while last > 127:
        more.append(last & 127 | 128)
        last >>= 7
    return bytes([*more, last])


def value_of(fields: Sequence[Field], wanted: int, default: bytes) -> bytes:
    return next((f.value for f in reversed(fields) if f.number == wanted), default)


def piece(text: bytes, kind: int) -> Field:
    return Field(PIECE, BYTES, write([Field(TEXT, BYTES, text), Field(SCORE, FIXED32, struct.pack("<f", 0)),
                                      Field(KIND, VARINT, number(kind))]))


class PieceModel:
    """A model that SentencePiece reads, in parts."""

    def __init__(self, data: bytes, place: str) -> None:
        self.data, self.place = data, place
        try:
            fields = parse(data)
            self.pieces = [f for f in fields if f.number == PIECE]
            self.others = [f for f in fields if f.number not in (PIECE, TRAINER)]
            self.trainer = parse(b"".join(f.value for f in fields if f.number == TRAINER))  # its parts add up
            self.inner = [parse(f.value) for f in self.pieces]
        except (ValueError, IndexError):
            raise UserError(f"{place}: no SentencePiece model, or a damaged one") from None
        self.texts = [value_of(inner, TEXT, b"") for inner in self.inner]

    @property
    def is_unigram(self) -> bool:
        return value_of(self.trainer, ALGORITHM, number(UNIGRAM)) == number(UNIGRAM)

    def with_our_ids(self, unused: Sequence[str] = (), silent: Sequence[str] = ()) -> Vocab:
        """The vocabulary; after all others come pieces that text is never cut into, `silent` ones not even written."""
        marks = {special: value_of(self.trainer, TEXT_FIELDS[special], text) for special, text in TEXTS.items()}
        head = {special: piece(text, UNKNOWN if special == UNK else CONTROL) for special, text in marks.items()}
        named, rest = {marks[special]: special for special in (PAD, BOS, EOS)}, []
        for field, inner, text in zip(self.pieces, self.inner, self.texts, strict=True):
            kind = value_of(inner, KIND, b"\1")
            special = UNK if kind == number(UNKNOWN) else named.get(text)
            if special is None:
                rest.append(field)
            elif special != UNK and kind != number(CONTROL):
                raise UserError(f"{self.place}: {ascii(text)[2:-1]} is a piece of text there, here it is a mark")
            else:
                head[special] = field
        more = [piece(text.encode(), kind) for texts, kind in ((unused, UNUSED), (silent, CONTROL)) for text in texts]
        pieces = [*(head[special] for special in sorted(head)), *rest, *more]
        if pieces != self.pieces:
            ids = [Field(ID_FIELDS[special], VARINT, number(special)) for special in sorted(head)]
            trainer = [f for f in self.trainer if f.number not in ID_FIELDS.values()] + ids
            model = write([*pieces, Field(TRAINER, BYTES, write(trainer)), *self.others])
        else:
            model = self.data
        try:
            return Vocab(model)
        except UserError as error:
            raise UserError(f"{self.place}: {error}") from None
