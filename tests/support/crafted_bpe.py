"""SentencePiece models written byte by byte, as only a hostile author would: the library's trainer
makes none of them.

A model is a protocol buffer of a few fields, so no library for protocol buffers is needed.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # types of models
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Piece:
    text: str | bytes
    score: float = 0.0
    kind: int = NORMAL


SPECIAL = (
    Piece("<pad>", kind=CONTROL),
    Piece("<unk>", kind=UNKNOWN),
    Piece("<s>", kind=CONTROL),
    Piece("</s>", kind=CONTROL),
)
TEXTS = ("\u2581", "a", "b", "c", "ab", "\u2581a", "bc", "abc", "ba", "ca", "cb", "cab")
PLAIN = tuple(Piece(text, -float(i)) for i, text in enumerate(TEXTS))
BYTES = tuple(Piece(f"<0x{i:02X}>", kind=BYTE) for i in range(256))


# ---- the format of protocol buffers -----------------------------------------------------------------------------


def _encode_integer(value: int) -> bytes:
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def make_number(field: int, value: int) -> bytes:
    return _encode_integer(field << 3) + _encode_integer(value)


def make_float(field: int, value: float) -> bytes:
    return _encode_integer(field << 3 | 5) + struct.pack("<f", value)


def make_bytes(field: int, value: bytes) -> bytes:
    return _encode_integer(field << 3 | 2) + _encode_integer(len(value)) + value


# ---- models -----------------------------------------------------------------------------------------------------


def craft_model(
    pieces: Sequence[Piece] = PLAIN,
    *,
    special: Sequence[Piece] = SPECIAL,
    model_type: int = BPE,
    trainer: bytes = b"",
    normalizer: bytes | None = None,
    more: bytes = b"",
) -> bytes:
    """Write a model; `trainer`, `normalizer` and `more` are raw fields of its parts."""
    if normalizer is None:
        normalizer = make_bytes(1, b"identity")
    model = b""
    for piece in (*special, *pieces):
        text = piece.text if isinstance(piece.text, bytes) else piece.text.encode()
        fields = make_bytes(1, text) + make_float(2, piece.score) + make_number(3, piece.kind)
        model += make_bytes(1, fields)
    spec = make_number(3, model_type)
    for field, number in ((40, 1), (41, 2), (42, 3), (43, 0)):  # unk, bos, eos, pad
        spec += make_number(field, number)
    return model + make_bytes(2, spec + trainer) + make_bytes(3, normalizer) + more


def add(*texts: str | bytes, kind: int = NORMAL) -> tuple[Piece, ...]:
    return (*PLAIN, *(Piece(text, -9.0, kind) for text in texts))


def score_all(score: float) -> tuple[Piece, ...]:
    return tuple(Piece(text, score) for text in TEXTS)


def turn_all(kind: int) -> tuple[Piece, ...]:
    return tuple(Piece(piece.text, piece.score, kind) for piece in PLAIN)


def make_charsmap(trie: bytes, strings: bytes = b"abc\0", size: int | None = None) -> bytes:
    """A normaliser whose table of replacements, a double-array trie and its strings, is garbage."""
    length = len(trie) if size is None else size
    table = struct.pack("<I", length) + trie + strings
    return make_bytes(1, b"x") + make_bytes(2, table)


@cache
def craft_readable() -> dict[str, bytes]:
    return {
        "plain": craft_model(),
        "scores NaN": craft_model(score_all(NAN)),
        "escape sequences": craft_model(add("\x1b]0;x\x07", "\x9b31m", "a\nb", "\r", "\t", "\u202e")),
        "nested prefixes": craft_model(add(*("a" * n for n in range(2, 400)))),
        "all control": craft_model(turn_all(CONTROL)),
        "all user-defined": craft_model(turn_all(USER_DEFINED)),
        "every byte": craft_model((*PLAIN, *BYTES), trainer=make_number(35, 1)),
        "unigram": craft_model(model_type=UNIGRAM),
        "words": craft_model(model_type=WORD),
        "characters": craft_model(model_type=CHAR),
        "wrong self-test": craft_model(
            more=make_bytes(4, make_bytes(1, make_bytes(1, b"ab") + make_bytes(2, b"z")))
        ),
        "marks the unknown with an escape": craft_model(trainer=make_bytes(44, b"\x1b[31m\n")),
        "100,000 unknown fields": craft_model(more=make_number(200, 5) * 100_000),
        "65,535 pieces": craft_model(more=b"".join(
            make_bytes(1, make_bytes(1, b"z%x" % i)) for i in range(65_535 - len(SPECIAL + PLAIN))
        )),
    }  # fmt: skip


@cache
def craft_refused() -> dict[str, bytes]:
    return {
        "no pieces": craft_model((), special=()),
        "cut short": craft_model()[:-5],
        "NUL in a piece": craft_model(add("a\0b")),
        "empty piece": craft_model(add("")),
        "piece of 4 MB": craft_model(add("a" * 4_000_000)),
        "piece not UTF-8": craft_model(add(b"\xff\xfe")),
        "piece a surrogate": craft_model(add(b"\xed\xa0\x80")),
        "duplicate pieces": craft_model(PLAIN + PLAIN),
        "two unknown pieces": craft_model(add("<unknown>", kind=UNKNOWN)),
        "all unknown": craft_model(turn_all(UNKNOWN)),
        "all bytes": craft_model(turn_all(BYTE)),
        "some bytes": craft_model((*PLAIN, BYTES[65]), trainer=make_number(35, 1)),
        "bytes of no number": craft_model(add("<0xZZ>", kind=BYTE), trainer=make_number(35, 1)),
        "byte not UTF-8": craft_model(add(b"<0x\xc9>", kind=BYTE), trainer=make_number(35, 1)),
        "no unknown piece": craft_model(special=(SPECIAL[0], Piece("x"), *SPECIAL[2:])),
        "marks the unknown with bytes": craft_model(trainer=make_bytes(44, b"\xff\xfe")),
        "unigram, scores NaN": craft_model(score_all(NAN), model_type=UNIGRAM),
        "charsmap of one byte": craft_model(normalizer=make_bytes(1, b"x") + make_bytes(2, b"a")),
        "charsmap of zeros": craft_model(normalizer=make_charsmap(bytes(60), b"")),
        "charsmap longer than itself": craft_model(normalizer=make_charsmap(bytes(60), size=2**31 - 1)),
        "charsmap whose trie leads out": craft_model(
            normalizer=make_charsmap(b"\xff\xff\xff\x7f" * 256)
        ),
        "groups 100,000 deep": craft_model(more=b"\x4b" * 100_000),
        "65,537 pieces": craft_readable()["65,535 pieces"]
        + b"".join(make_bytes(1, make_bytes(1, text)) for text in (b"y", b"yy")),
        "2,000,000 empty pieces": craft_model(more=b"\x0a\x00" * 2_000_000),
        "9 MB": craft_model(more=make_bytes(200, bytes(9_000_000))),
    }  # fmt: skip


def draw_damaged_model(rng: Random) -> bytes:
    """A model with a few wrong bytes, or a charsmap of random ones: nobody knows which are readable."""
    if rng.random() < 0.5:
        trie = rng.randbytes(rng.choice((1024, 2048, 4096)))
        return craft_model(normalizer=make_charsmap(trie, rng.randbytes(9)))
    damaged = bytearray(craft_readable()[rng.choice(("plain", "every byte"))])
    for _ in range(rng.choice((1, 3, 10))):
        damaged[rng.randrange(len(damaged))] = rng.getrandbits(8)
    return bytes(damaged)
