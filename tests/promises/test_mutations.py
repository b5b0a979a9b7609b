"""Damaged corpora, always the same ones: what comes out is a `UserError` or pairs that belong
together.

400 of them in `make test`, 2,000 in `make soak`. Line i of each side contains the number i with a
checksum, so that it survives whole or is seen to be broken. Text damaged before it is packed is
compared with brute force on its bytes. Damage to packed bytes must be found or change nothing. Only
what is read to the end counts: a file is refused as a whole.
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
N_CHUNKS = counted(1, 5)
FORMS = ["", ".gz", ".xz", ".zst", ".tgz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.zst", ".parquet"]
N_OF_FORM = 40
STRANGE = [
    "\0",
    "\ufeff",
    "\u2028",
    "\u2029",
    "\u0085",
    "\v",
    "\f",
    "\x1c",
    "\r",
    "\t",
    "\U0001f469\u200d\U0001f467",
    "\u202e",
    "\u2066",
    "e\u0301",
    "x" * 100_000,
]
NUMBER = re.compile(r"<(\d+)\.([0-9a-f]{8})>")
HALF, NULL = "\ud83d", None
Cells = list[str | None]


def cell(i: int, draw: Random) -> str:
    words = " ".join(
        draw.choice(["a", "häuser", "noch", "größer", "is", "it"]) for _ in range(draw.randrange(9))
    )
    return f"<{i}.{crc32(str(i).encode()):08x}> {words}"


def number(text: str) -> str | None:
    """The number of a line, if it has exactly one and that is intact."""
    found = [n for n, checksum in NUMBER.findall(text) if f"{crc32(n.encode()):08x}" == checksum]
    return found[0] if len(found) == 1 else None


# ---- damage -----------------------------------------------------------------------------------------------------


def damaged(content: bytes, draw: Random) -> bytes:
    """One place cut off, flipped, overwritten, filled, taken out or doubled."""
    i = draw.randrange(len(content))
    j = min(len(content), i + draw.randrange(1, 40))
    return draw.choice(
        [
            content[:i],
            content[:i] + bytes([content[i] ^ 1 << draw.randrange(8)]) + content[i + 1 :],
            content[:i] + draw.randbytes(j - i) + content[j:],
            content[:i] + draw.randbytes(9) + content[i:],
            content[:i] + content[j:],
            content[:j] + content[i:],
            content + draw.randbytes(20),
        ]
    )


def strange(cells: list[str], draw: Random) -> list[str]:
    """Characters that are not line ends, anywhere."""
    cells = list(cells)
    for _ in range(draw.randrange(1, 9)):
        i = draw.randrange(len(cells))
        at = draw.randrange(len(cells[i]) + 1)
        cells[i] = cells[i][:at] + draw.choice(STRANGE) + cells[i][at:]
    return cells


def text(cells: list[str], draw: Random) -> bytes:
    """Lines with LF, and with CR LF here and there."""
    ends = draw.choice([["\n"], ["\n", "\r\n"], ["\r\n"]])
    return "".join(line + draw.choice(ends) for line in cells).encode()


def with_bad(cells: list[str], draw: Random, bad: list[str | None]) -> Cells:
    return [draw.choice(bad) if draw.random() < 0.1 else line for line in cells]


# ---- mutants ----------------------------------------------------------------------------------------------------


def write(
    root: Path, form: str, sides: list[list[str]], draw: Random
) -> tuple[CorpusConfig, list[bytes] | None]:
    """A damaged corpus in that form; and the bytes of the lines, where brute force can tell what is
    in them.
    """
    damages_text, path = draw.random() < 0.5 or form in ("", ".tsv", ".jsonl"), root / f"x{form}"
    if form == ".parquet":
        columns = [with_bad(side, draw, [NULL]) if damages_text else side for side in sides]
        arrays = [
            pa.array([None if x is None else x.encode() for x in column], pa.binary())
            for column in columns
        ]
        if damages_text:
            arrays[0] = pa.array(
                [x and damaged(x, draw) for x in arrays[0].to_pylist()], pa.binary()
            )
        table = pa.table([array.view(pa.string()) for array in arrays], ["en", "de"])
        parquet.write_table(
            table,
            path,
            row_group_size=8,
            write_page_checksum=True,
            compression=draw.choice(["none", "snappy", "zstd"]),
            use_dictionary=draw.random() < 0.5,
        )
        if not damages_text:
            path.write_bytes(damaged(path.read_bytes(), draw))
        return CorpusConfig(file=path.name), None
    if form.startswith((".tsv", ".jsonl")):
        if form.startswith(".tsv"):
            content = text([f"{s}\t{t}" for s, t in zip(*sides, strict=True)], draw)
        else:
            bad = [with_bad(side, draw, [NULL, HALF]) if damages_text else side for side in sides]
            content = text(
                [
                    json.dumps({"en": s, "de": t}, ensure_ascii=None in (s, t) or HALF in (s, t))
                    for s, t in zip(*bad, strict=True)
                ],
                draw,
            )
        # Within a line: a hole from one line to the next can make a true row of two halves
        if damages_text:
            lines = content.split(b"\n")[:-1]
            k = draw.randrange(len(lines))
            rest = draw.choice([lines[k + 1 :], []])
            content = b"\n".join([*lines[:k], damaged(lines[k], draw), *rest])
        packed = pack(content, path.name)
        path.write_bytes(packed if damages_text else damaged(packed, draw))
        return CorpusConfig(file=path.name), None
    contents = [text(side, draw) for side in sides]
    whole, side = list(contents), draw.randrange(2)
    if damages_text:
        contents[side] = whole[side] = damaged(contents[side], draw)
    if form == ".tgz":
        packed = pack(tar({"x.en": contents[0], "x.de": contents[1]}), form)
        path.write_bytes(packed if damages_text else damaged(packed, draw))
        return CorpusConfig(archive=path.name, src="x.en", tgt="x.de"), whole
    names = [f"x.en{form}", f"x.de{form}"]
    files = [pack(content, form) for content in contents]
    if not damages_text:
        files[side] = damaged(files[side], draw)
    for name, file in zip(names, files, strict=True):
        (root / name).write_bytes(file)
    return CorpusConfig(src=names[0], tgt=names[1]), whole


def brute(contents: list[bytes]) -> tuple[list[Pair], int] | None:
    """The pairs that can be decoded and how many cannot; nothing where the sides are of unequal
    length.
    """
    sides = [
        content.split(b"\n")[: -1 if content.endswith(b"\n") else None]
        for content in contents
        if content
    ]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        return None
    for side in sides:
        side[0] = side[0].removeprefix(b"\xef\xbb\xbf")
    pairs, n_bad = [], 0
    for src, tgt in zip(*sides, strict=True):
        try:
            pairs.append(Pair(src.removesuffix(b"\r").decode(), tgt.removesuffix(b"\r").decode()))
        except UnicodeDecodeError:
            n_bad += 1
    return pairs, n_bad


def outcome(corpus: CorpusConfig, root: Path, on_bad_line: str) -> tuple[list[Pair], int] | None:
    data = DataConfig(root=str(root), on_bad_line=on_bad_line)  # type: ignore[arg-type]
    pairs: list[Pair] = []
    n_bad = n = 0
    try:
        for block in read_blocks(corpus, data, SIZE):
            assert block.first == n + 1 and n % SIZE == 0
            n += len(block.src) + len(block.bad)
            n_bad += len(block.bad)
            pairs += map(Pair, block.src, block.tgt)
            assert len(block.src) == len(block.tgt) and not any(
                "\n" in complaint for complaint in block.bad
            )
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return None
    return pairs, n_bad


@pytest.mark.parametrize("chunk", range(N_CHUNKS))
@pytest.mark.parametrize("form", FORMS)
def test_damage_is_told_or_harmless(tmp_path: Path, form: str, chunk: int) -> None:
    n_told = n_read = n_kept = 0
    for seed in range(chunk * N_OF_FORM, (chunk + 1) * N_OF_FORM):
        draw = Random(f"{form} {seed}")
        sides = [[cell(i, draw) for i in range(N_LINES)] for _ in range(2)]
        if draw.random() < 0.5:
            sides = [strange(side, draw) for side in sides]
        corpus, contents = write(tmp_path, form, sides, draw)
        stopped, skipped = outcome(corpus, tmp_path, "stop"), outcome(corpus, tmp_path, "skip")
        truth = contents and brute(contents)
        where = f"mutant {seed} of {form or 'plain text'}"
        if contents and skipped is not None:
            assert skipped == truth, where
        if stopped is None:
            n_told += 1
            assert skipped is None or skipped[1] > 0, where
        else:
            assert stopped == skipped and stopped[1] == 0, where
        for src, tgt in skipped[0] if skipped else ():
            assert (a := number(src)) is None or (b := number(tgt)) is None or a == b, where
            n_kept += a is not None
        n_read += skipped is not None
    assert n_told and n_read and n_kept > 100  # the damage is neither harmless nor fatal as a rule
