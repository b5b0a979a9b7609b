"""What becomes of a file: the kinds of damage that a crash, a disk or a careless program does to its
bytes, and the contents that a stranger writes instead. All tests of damage draw from these tables.
"""

from collections.abc import Callable
from random import Random

Damage = Callable[[bytes, Random], bytes]

BLOCK = 4096  # of a disk
END = 64  # bytes

# What has a meaning in one of the formats, or is a trap in it.
TOKENS = [
    token.encode() for token in "\0 \n \r\n \r \t , : { } [ ] \" ' \\ # @ ` ... ~ null".split(" ")
]
TOKENS += [
    token.encode() for token in "NaN -Infinity 1e999 -0 0x10 1_000 .inf \\u \\ud800".split(" ")
]
TOKENS += [b": ", b"- ", b"? ", b"> \n", b"<<: *a", b"&a ", b"*a", b"!!map ", b"!x ", b"---\n"]
TOKENS += ["\ufeff\u2028\u0085"[i].encode() for i in range(3)]
TOKENS += [b"\xff", b"\xed\xa0\x80", b"\x80"]
LONG_TOKENS = [b"9" * 5_000, b"[" * 100_000, b'{"a":' * 20_000, b"x" * 70_000, b"a: " * 2_000]
LONG_SHARE = 0.01  # of the mutations, because they take long


# ---- damage in one place ------------------------------------------------------------------------------------------


def _draw_run(data: bytes, rng: Random) -> tuple[int, int]:
    """Where a run of bytes begins and ends."""
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice([1, 2, 4, 8, 40, 400]))


def _draw_token(rng: Random) -> bytes:
    return rng.choice(LONG_TOKENS if rng.random() < LONG_SHARE else TOKENS)


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(max(1, len(data)))]


def flip(data: bytes, rng: Random) -> bytes:
    """Turn one bit over."""
    i = rng.randrange(max(1, len(data)))
    flipped = [byte ^ 1 << rng.randrange(8) for byte in data[i : i + 1]]
    return data[:i] + bytes(flipped) + data[i + 1 :]


def overwrite(data: bytes, rng: Random) -> bytes:
    start, end = _draw_run(data, rng)
    return data[:start] + rng.randbytes(end - start) + data[end:]


def take_out(data: bytes, rng: Random) -> bytes:
    start, end = _draw_run(data, rng)
    return data[:start] + data[end:]


def double(data: bytes, rng: Random) -> bytes:
    start, end = _draw_run(data, rng)
    return data[:end] + data[start:]


def write_number(data: bytes, rng: Random) -> bytes:
    """Write an extreme number over one of a binary format."""
    start, _ = _draw_run(data, rng)
    size = rng.choice([1, 2, 4, 8])
    largest = (1 << 8 * size) - 1
    number = rng.choice([0, 1, 2, largest, largest // 2, largest // 2 + 1])
    return data[:start] + number.to_bytes(size, "little") + data[start + size :]


def put_in_token(data: bytes, rng: Random) -> bytes:
    start, _ = _draw_run(data, rng)
    return data[:start] + _draw_token(rng) + data[start:]


def write_token(data: bytes, rng: Random) -> bytes:
    start, end = _draw_run(data, rng)
    return data[:start] + _draw_token(rng) + data[end:]


# ---- damage to more of it -----------------------------------------------------------------------------------------


def zero(data: bytes, rng: Random) -> bytes:
    """As a lost block of the disk reads; of a file of less than two blocks, a quarter."""
    size = BLOCK if len(data) >= 2 * BLOCK else max(1, len(data) // 4)
    start = rng.randrange(max(1, len(data) // size)) * size
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def zero_end(data: bytes, rng: Random) -> bytes:
    return data[:-END] + bytes(len(data[-END:]))


def empty(data: bytes, rng: Random) -> bytes:
    return b""


def garble(data: bytes, rng: Random) -> bytes:
    """Leave no byte as it was."""
    return bytes(255 - byte for byte in data)


IN_ONE_PLACE: dict[str, Damage] = {
    "cut": cut,
    "flipped": flip,
    "overwritten": overwrite,
    "taken out": take_out,
    "doubled": double,
    "another number": write_number,
    "a token put in": put_in_token,
    "a token written over": write_token,
}
DAMAGES = IN_ONE_PLACE | {
    "zeroed": zero,
    "its end zeroed": zero_end,
    "emptied": empty,
    "garbled": garble,
}


def damage(data: bytes, rng: Random) -> bytes:
    """Damage one place."""
    return rng.choice(list(IN_ONE_PLACE.values()))(data, rng)


def damage_often(data: bytes, rng: Random) -> bytes:
    """Damage one place, or a few."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        data = damage(data, rng)
    return data


# ---- what is written instead --------------------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "no text": bytes(range(256)),
    "a pickle": b"\x80\x04N.",
    "cut off": b'{"kind": "train", "step": 1, "nl',
    "nested": b"[" * 1_500 + b"]" * 1_500,
    "nested past Python": b'{"step":' * 100_000,
    "400 digits": b'{"kind": "train", "step": 1, "nll": 1' + b"0" * 400 + b"}",
    "a step of 400 digits": b'{"kind": "train", "nll": 1, "step": 1' + b"0" * 400 + b"}",
    "1e308": b'{"kind": "train", "step": 1, "nll": 1e308}',
    "-1e308": b'{"kind": "train", "step": 1, "nll": -1e308}',
    "NaN": b'{"kind": "train", "step": 1, "nll": NaN}',
    "a list": b"[]",
    "a number": b"7",
    "no keys": b"{}",
    "other types": b'{"kind": [], "step": "1", "averaged": 1, "corpora": {}, "settings": 1}',
    "surrogates": b'{"kind": "\\ud800", "step": {}, "\\udfff": "\\ud800"}',
}
