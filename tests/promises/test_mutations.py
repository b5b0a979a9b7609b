"""Damaged corpora, always the same ones: what comes out is a `UserError` or pairs that belong
together.

Line i of each side contains the number i with a checksum, so that it survives whole or is seen to
be broken. Plain text that is damaged is compared with brute force on its bytes. Damage to packed
bytes must be found or change nothing. Only what is read to the end counts: a file is refused as a
whole.
"""

import json
import re
from pathlib import Path
from random import Random
from zlib import crc32

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.packing import pack, tar
from support.soaking import counted

from nmt.config import CorpusConfig, DataConfig
from nmt.corpus.reader import Pair, read_blocks
from nmt.system.errors import UserError

N_LINES, SIZE = 30, 7
FORMS = ["", ".gz", ".xz", ".tgz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.bz2", ".parquet"]
N_OF_FORM = counted(25, 200)
STRANGE = ["\0", "\ufeff", "\u2028", "\u0085", "\v", "\x1c", "\r", "\t", "\u202e", "x" * 100_000]
NUMBER = re.compile(r"<(\d+)\.([0-9a-f]{8})>")


def make_side(rng: Random) -> list[str]:
    """Numbered lines, some of them with characters that are not line ends."""
    lines = []
    for i in range(N_LINES):
        strange = rng.choice(STRANGE) if rng.random() < 0.1 else ""
        words = " ".join(rng.choices(["a", "häuser", "größer"], k=rng.randrange(9)))
        lines.append(f"<{i}.{crc32(str(i).encode()):08x}> {words}{strange}")
    return lines


def find_number(text: str) -> str | None:
    """The number of a line, if it has exactly one and that is intact."""
    found = [n for n, checksum in NUMBER.findall(text) if f"{crc32(n.encode()):08x}" == checksum]
    return found[0] if len(found) == 1 else None


def damage(content: bytes, rng: Random) -> bytes:
    """One place cut off, flipped, overwritten, filled, taken out or doubled."""
    i = rng.randrange(len(content))
    j = min(len(content), i + rng.randrange(1, 40))
    flipped = bytes([content[i] ^ 1 << rng.randrange(8)])
    middle = rng.choice([flipped + content[i + 1 : j], rng.randbytes(j - i), b"", content[i:j] * 2])
    return content[:i] + rng.choice([middle + content[j:]] * 4 + [b""])


def join_lines(lines: list[str], rng: Random) -> bytes:
    """Lines with LF, and with CR LF here and there."""
    ends = rng.choice([["\n"], ["\n", "\r\n"], ["\r\n"]])
    return "".join(line + rng.choice(ends) for line in lines).encode()


def damage_line(content: bytes, rng: Random) -> bytes:
    """Within a line: a hole from one line of a .tsv to the next can make a true row of two halves."""
    lines = content.split(b"\n")
    k = rng.randrange(len(lines) - 1)
    return b"\n".join([*lines[:k], damage(lines[k], rng), *lines[k + 1 :]])


def write_parquet(path: Path, sides: list[list[str]], rng: Random) -> None:
    parquet.write_table(
        pa.table(dict(zip(("en", "de"), sides, strict=True))),
        path,
        row_group_size=8,
        write_page_checksum=True,
        compression=rng.choice(["none", "snappy", "zstd"]),
    )
    path.write_bytes(damage(path.read_bytes(), rng))


def write(
    root: Path, form: str, sides: list[list[str]], rng: Random
) -> tuple[CorpusConfig, list[bytes] | None]:
    """A damaged corpus in that form; and the bytes of the lines, where brute force can tell what is
    in them.
    """
    path = root / f"x{form}"
    if form == ".parquet":
        write_parquet(path, sides, rng)
        return CorpusConfig(file=path.name), None
    damages_text = rng.random() < 0.5 or form in ("", ".tsv", ".jsonl")
    if form.startswith((".tsv", ".jsonl")):
        rows = list(zip(*sides, strict=True))
        if form.startswith(".tsv"):
            damage_text = damage_line
            lines = [f"{src}\t{tgt}" for src, tgt in rows]
        else:
            damage_text = damage
            lines = [json.dumps({"en": src, "de": tgt}) for src, tgt in rows]
        content = join_lines(lines, rng)
        packed = pack(damage_text(content, rng) if damages_text else content, path.name)
        path.write_bytes(packed if damages_text else damage(packed, rng))
        return CorpusConfig(file=path.name), None
    texts = [join_lines(side, rng) for side in sides]
    if damages_text:
        texts[0] = damage(texts[0], rng)
    if form == ".tgz":
        files = {path.name: pack(tar({"x.en": texts[0], "x.de": texts[1]}), form)}
        corpus = CorpusConfig(archive=path.name, src="x.en", tgt="x.de")
    else:
        files = {f"x.en{form}": pack(texts[0], form), f"x.de{form}": pack(texts[1], form)}
        corpus = CorpusConfig(src=f"x.en{form}", tgt=f"x.de{form}")
    for i, (name, file) in enumerate(files.items()):
        (root / name).write_bytes(file if damages_text or i else damage(file, rng))
    return corpus, texts


def read_by_brute_force(texts: list[bytes]) -> tuple[list[Pair], int] | None:
    """The pairs that can be decoded and how many cannot; nothing where the sides are of unequal
    length.
    """
    sides = [text.removesuffix(b"\n").split(b"\n") for text in texts if text]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        return None
    pairs = []
    for src, tgt in zip(*sides, strict=True):
        try:
            pairs.append(Pair(src.removesuffix(b"\r").decode(), tgt.removesuffix(b"\r").decode()))
        except UnicodeDecodeError:
            continue
    return pairs, len(sides[0]) - len(pairs)


def read(corpus: CorpusConfig, root: Path, on_bad_line: str) -> tuple[list[Pair], int] | None:
    data = DataConfig(root=str(root), on_bad_line=on_bad_line)  # type: ignore[arg-type]
    pairs: list[Pair] = []
    n_bad = 0
    try:
        for block in read_blocks(corpus, data, SIZE):
            n_bad += len(block.bad)
            pairs += map(Pair, block.src, block.tgt)
            assert len(block.src) == len(block.tgt)
    except UserError:
        return None
    return pairs, n_bad


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_told_or_harmless(tmp_path: Path, form: str) -> None:
    n_told = n_read = n_kept = 0
    for seed in range(N_OF_FORM):
        rng = Random(f"{form} {seed}")
        corpus, texts = write(tmp_path, form, [make_side(rng), make_side(rng)], rng)
        stopped, skipped = (read(corpus, tmp_path, choice) for choice in ("stop", "skip"))
        where = f"mutant {seed} of {form or 'plain text'}"
        if texts and skipped is not None:
            assert skipped == read_by_brute_force(texts), where
        if stopped is None:
            n_told += 1
            assert skipped is None or skipped[1] > 0, where
        else:
            assert stopped == skipped and stopped[1] == 0, where
        for src, tgt in skipped[0] if skipped else ():
            numbers = find_number(src), find_number(tgt)
            assert None in numbers or numbers[0] == numbers[1], where
            n_kept += numbers[0] is not None
        n_read += skipped is not None
    assert n_told and n_read and n_kept > 50  # the damage is neither harmless nor fatal as a rule
