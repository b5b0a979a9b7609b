"""Damaged corpora in every form, and what of them must come out: pairs that belong together.

Line i of each side contains the number i with a checksum, so that it survives whole or is seen to be
broken. What is read must be such as Python's own modules can unpack. Two texts are compared with brute
force on the bytes that these find; of a file of rows, the numbers of both sides are compared.
"""

import io
import json
import re
from pathlib import Path
from random import Random
from zlib import crc32

import pyarrow as pa
from pyarrow import parquet

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import Pair, read_blocks
from nmt.system.errors import UserError
from support.damages import damage, damage_often
from support.packing import pack, pack_archive, unpack, unpack_member

TEXTS = ("", ".gz", ".xz", ".zst", ".bz2")
ARCHIVES = (".tgz", ".tar", ".zip")
ROWS = (".tsv", ".tsv.gz", ".jsonl", ".jsonl.bz2", ".parquet")
FORMS = TEXTS + ARCHIVES + ROWS
N_LINES, BLOCK_SIZE = 30, 7  # neither divides the other
STRANGE = ["\0", "\ufeff", "\u2028", "\u0085", "\v", "\x1c", "\r", "\t", "\u202e", "x" * 100_000]
NUMBER = re.compile(r"<(\d+)\.([0-9a-f]{8})>")


# ---- damaged corpora ----------------------------------------------------------------------------------------------


def make_side(rng: Random) -> list[str]:
    """Numbered lines, some of them with characters that are not line ends."""
    lines = []
    for i in range(N_LINES):
        strange = rng.choice(STRANGE) if rng.random() < 0.1 else ""
        words = " ".join(rng.choices(["a", "häuser", "größer"], k=rng.randrange(9)))
        lines.append(f"<{i}.{crc32(str(i).encode()):08x}> {words}{strange}")
    return lines


def join_lines(lines: list[str], rng: Random) -> bytes:
    """Lines with LF, and with CR LF here and there."""
    ends = rng.choice([["\n"], ["\n", "\r\n"], ["\r\n"]])
    return "".join(line + rng.choice(ends) for line in lines).encode()


def damage_line(content: bytes, rng: Random) -> bytes:
    """Within a line: a hole from one row to the next can make a true row of two halves."""
    lines = content.split(b"\n")
    k = rng.randrange(len(lines) - 1)
    return b"\n".join([*lines[:k], damage_often(lines[k], rng), *lines[k + 1 :]])


def describe(form: str) -> CorpusConfig:
    """The corpus in that form."""
    if form in ROWS:
        return CorpusConfig(file=f"x{form}")
    if form in ARCHIVES:
        return CorpusConfig(archive=f"x{form}", src="x.en", tgt="x.de")
    return CorpusConfig(src=f"x.en{form}", tgt=f"x.de{form}")


def draw_files(form: str, rng: Random) -> dict[str, bytes]:
    """The files of a corpus in that form, one of them damaged before it was packed or after."""
    sides = [make_side(rng), make_side(rng)]
    if form in ROWS:
        return {f"x{form}": _draw_rows(form, sides, rng)}
    texts = [join_lines(side, rng) for side in sides]
    is_text_damaged = form == "" or rng.random() < 0.5
    if is_text_damaged:
        texts[0] = damage_often(texts[0], rng)
    if form in ARCHIVES:
        name = "x.en" if form == ".zip" else "./x.en"
        members = {name: texts[0], "../x.en": b"a\n", "\x1b[31m": b"a\n", "x.de": texts[1]}
        files = {f"x{form}": pack_archive(members, form)}
    else:
        files = {
            f"x.en{form}": _pack_in_parts(texts[0], form, rng),
            f"x.de{form}": pack(texts[1], form),
        }
    if not is_text_damaged:
        name = next(iter(files))
        files[name] = damage_often(files[name], rng)
    return files


def _pack_in_parts(text: bytes, form: str, rng: Random) -> bytes:
    middle = rng.choice([0, len(text) // 2])
    first = pack(text[:middle], form) if middle else b""
    return first + pack(text[middle:], form)


def _draw_rows(form: str, sides: list[list[str]], rng: Random) -> bytes:
    if form == ".parquet":
        return damage(_make_parquet(sides, rng), rng)
    rows = list(zip(*sides, strict=True))
    if form.startswith(".tsv"):
        lines = [f"{src}\t{tgt}" for src, tgt in rows]
    else:
        lines = [json.dumps({"en": src, "de": tgt}) for src, tgt in rows]
    content = join_lines(lines, rng)
    if form in (".tsv", ".jsonl") or rng.random() < 0.5:
        return pack(damage_line(content, rng), form)
    return damage_often(pack(content, form), rng)


def _make_parquet(sides: list[list[str]], rng: Random) -> bytes:
    file = io.BytesIO()
    parquet.write_table(
        pa.table(dict(zip(("en", "de"), sides, strict=True))),
        file,
        row_group_size=8,
        write_page_checksum=True,
        compression=rng.choice(["none", "snappy", "zstd"]),
    )
    return file.getvalue()


# ---- what comes out -----------------------------------------------------------------------------------------------


def read_corpus(corpus: CorpusConfig, folder: Path, size: int) -> tuple[list[Pair], list[str]]:
    """The pairs that can be read, and complaints about the others. Whoever stops at the first of these
    gets this complaint, or else the same pairs.
    """
    pairs, bad = _read(corpus, DataConfig(root=str(folder), on_bad_line="skip"), size)
    assert all(str(folder) in text for text in bad)
    try:
        assert _read(corpus, DataConfig(root=str(folder)), size) == (pairs, bad)
    except UserError as error:
        assert bad and str(error) == str(UserError(bad[0]))
    return pairs, bad


def _read(corpus: CorpusConfig, data: DataConfig, size: int) -> tuple[list[Pair], list[str]]:
    pairs: list[Pair] = []
    bad = []
    for block in read_blocks(corpus, data, size):
        assert len(block.src) == len(block.tgt)
        assert not any("\n" in text for text in (*block.src, *block.tgt))
        pairs += map(Pair, block.src, block.tgt)
        bad += block.bad
    return pairs, bad


def check_pairs(form: str, folder: Path) -> None:
    """That the pairs of a damaged corpus belong together. A bad one is raised."""
    corpus = describe(form)
    pairs, bad = read_corpus(corpus, folder, BLOCK_SIZE)
    texts = unpack_texts(form, folder)
    if form in ROWS:
        numbers = [(find_number(src), find_number(tgt)) for src, tgt in pairs]
        assert all(None in both or both[0] == both[1] for both in numbers)
        assert sum(None not in both for both in numbers) > N_LINES // 2  # else nothing was compared
    else:
        assert (pairs, len(bad)) == read_by_brute_force(texts)
    if bad:
        raise UserError(bad[0])


def unpack_texts(form: str, folder: Path) -> list[bytes]:
    """What the files hold; it raises anything where that cannot be told."""
    sides = ("x.en", "x.de")
    if form in ARCHIVES:
        archive = (folder / f"x{form}").read_bytes()
        return [unpack_member(archive, form, side) for side in sides]
    names = ("x",) if form in ROWS else sides
    return [unpack((folder / f"{name}{form}").read_bytes(), form) for name in names]


def find_number(text: str) -> str | None:
    """The number of a line, if it has exactly one and that is intact."""
    found = [n for n, checksum in NUMBER.findall(text) if f"{crc32(n.encode()):08x}" == checksum]
    return found[0] if len(found) == 1 else None


def read_by_brute_force(texts: list[bytes]) -> tuple[list[Pair], int] | None:
    """The pairs that can be decoded and how many cannot; nothing where the sides are of unequal
    length.
    """
    sides = [
        text.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
        for text in texts
        if text
    ]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        return None
    pairs = []
    for src, tgt in zip(*sides, strict=True):
        try:
            pairs.append(Pair(src.removesuffix(b"\r").decode(), tgt.removesuffix(b"\r").decode()))
        except UnicodeDecodeError:
            continue
    return pairs, len(sides[0]) - len(pairs)
