"""Token ids on disk: for each side of a split, one array of uint16 and the int64 offsets of its
sentences, as plain `.npy`.

They are memory-mapped, so that 36 million pairs open in milliseconds and all processes of a machine
share them. They are read through `Side`, because a stranger may have written them: every id is below
the vocabulary's size, and every sentence lies within the file, or a `UserError` names the file. A
store that is cut while a run trains is not guarded against. A store is a sealed folder that is
enough to train from: `vocab.model` or one for each side, `{train,valid}.{src,tgt}.{ids,offsets}.npy`,
the raw dev text `valid.{src,tgt}.txt`, `ledger.json`, and `manifest.json`, which ties the ids to the
BPE model that made them. On disk there are pieces only; tokens are what the model reads: pieces and
a sentence mark (bos or eos).
"""

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nmt.data.vocab import MAX_PIECES, MOSTLY_UNKNOWN, UNK, Vocabulary, combine_digests
from nmt.system.errors import UserError
from nmt.system.files import (
    check_sizes,
    explain_unreadable,
    has_plain_file,
    open_plain_file,
    read_manifest,
)
from nmt.system.progress import say_once
from nmt.system.run_folder import MANIFEST_FILE, find_vocab_files, ids_file, offsets_file

REMEDY = "remove the folder and run nmt-prepare again"
# How a `.npy` file of one dimension begins. numpy itself evaluates what a header says, and fails in
# many ways where a stranger wrote it.
HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>]\w\d)', 'fortran_order': False, "
    rb"'shape': \((?P<n>\d{1,18}),\), \} *\n",
    re.DOTALL,
)
ARRAY_HEADER_BYTES = 256
SEARCHED_PAIRS = 1 << 18  # at a time
PRIME = 1_000_003  # so that two sums become one number, which other sums hardly share
TokenRow = tuple[np.ndarray, np.ndarray]  # ids end to end, and how many each sentence has
StoredPair = tuple[bytes, bytes]  # the ids of a source and of its target
LOOKED_AT_IDS = 1 << 20  # from the beginning, to see whether they are known


@dataclass(frozen=True)
class Side:
    ids: np.ndarray  # (pieces,) uint16
    offsets: np.ndarray  # (n + 1,) int64; sentence i is ids[offsets[i]:offsets[i + 1]]
    n_pieces: int = MAX_PIECES  # of the vocabulary: all ids are below
    path: Path | None = None  # the file of ids, for messages

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sentence as the model reads it: its pieces, and bos or eos."""
        return self.count_pieces(0, len(self)).astype(np.int32) + 1  # (n,)

    def count_pieces(self, first: int, end: int) -> np.ndarray:
        """Return how many pieces each of some consecutive sentences has."""
        with self._explaining_damage():
            counts = np.diff(_copy_slice(self.offsets, first, end + 1))
            if len(counts) and not 0 <= counts.min() <= counts.max() < 2**31 - 1:
                raise IndexError("offsets that do not rise")
        return counts

    @property
    def n_tokens(self) -> int:
        """The sum of `lengths`."""
        return len(self.ids) + len(self)

    def read_sentences(self, numbers: np.ndarray) -> TokenRow:
        """Return the ids of these sentences, end to end, and how many each has."""
        with self._explaining_damage():
            firsts = numbers.astype(np.int64)
            starts, ends = _copy_runs(self.offsets, firsts, firsts + 2).reshape(-1, 2).T
            ids = _copy_runs(self.ids, starts, ends)
            self._check_ids(ids)
        return ids, ends - starts

    def read_rows(self, first: int, end: int) -> TokenRow:
        """Return the ids of consecutive sentences, and how many each has."""
        counts = self.count_pieces(first, end)
        return self.read_ids(int(self.offsets[first]), int(self.offsets[end])), counts

    def sum_ids(self, first: int, end: int) -> np.ndarray:
        """Return the sum of the ids of each of some consecutive sentences."""
        ids, counts = self.read_rows(first, end)
        sums = find_bounds(ids)
        return np.diff(sums[find_bounds(counts)])

    def read_ids(self, first: int, end: int) -> np.ndarray:
        """Return ids, whatever sentences they belong to."""
        with self._explaining_damage():
            ids = _copy_slice(self.ids, first, end)
            self._check_ids(ids)
        return ids

    def load(self) -> "Side":
        """Return the same side in memory, where no process can change it."""
        ids, counts = self.read_rows(0, len(self))
        return Side(ids, find_bounds(counts), self.n_pieces)

    def _check_ids(self, ids: np.ndarray) -> None:
        largest = int(ids.max(initial=0))
        if largest >= self.n_pieces:
            raise IndexError(f"id {largest}, where the BPE model has {self.n_pieces} pieces")

    @contextmanager
    def _explaining_damage(self) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            name = self.path or "the token store"
            raise UserError(f"{name}: is damaged ({error}); {REMEDY}") from None


def _copy_slice(array: np.ndarray, first: int, end: int) -> np.ndarray:
    """Copy array[first:end]; IndexError if it does not have all of it."""
    if not 0 <= first <= end <= len(array):
        raise IndexError("sentences outside the file")
    return np.array(array[first:end])


def _copy_runs(array: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Copy array[start:end] of each pair, end to end; IndexError if the array does not have all of it."""
    if len(starts) and not (
        starts.min() >= 0 and (starts <= ends).all() and ends.max() <= len(array)
    ):
        raise IndexError("sentences outside the file")
    return gather_runs(np.asarray(array), starts, ends - starts)


def find_bounds(lengths: np.ndarray) -> np.ndarray:
    """Return where each of some runs that lie end to end begins, and where the last one ends, int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def gather_runs(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the runs of `values` that begin at `starts`, end to end."""
    bounds = find_bounds(lengths)
    return values[np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)]


@dataclass(frozen=True)
class TokenStore:
    src: Side
    tgt: Side

    def __len__(self) -> int:
        return len(self.src)

    def read_pair(self, i: int) -> StoredPair:
        src, tgt = (side.read_rows(i, i + 1)[0] for side in (self.src, self.tgt))
        return src.tobytes(), tgt.tobytes()

    def count_shared(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
        """Count how many of these pairs of ids the store has; each counts once."""
        wanted: dict[StoredPair, int] = {}
        for src, tgt in pairs:
            key = np.array(src, np.uint16).tobytes(), np.array(tgt, np.uint16).tobytes()
            wanted[key] = sum(src) * PRIME + sum(tgt)
        candidates = set()
        for first in range(0, len(self), SEARCHED_PAIRS):
            end = min(first + SEARCHED_PAIRS, len(self))
            # Only pairs whose ids have the same sums are compared in full.
            sums = self.src.sum_ids(first, end) * PRIME + self.tgt.sum_ids(first, end)
            numbers = first + np.flatnonzero(np.isin(sums, list(wanted.values())))
            candidates |= {self.read_pair(i) for i in numbers.tolist()}
        return len(candidates & wanted.keys())


def open_store(folder: Path, split: str, vocab: Vocabulary | None = None) -> TokenStore:
    """Open a split of a sealed store; raise UserError if it was not made with `vocab`.

    Only sizes are checked against the manifest, because this must be quick;
    `nmt.system.files.verify` reads everything.
    """
    if not has_plain_file(folder / MANIFEST_FILE):
        raise UserError(f"{folder}: contains no prepared data; run nmt-prepare first")
    manifest = read_manifest(folder)
    if ids_file(split, "src") not in manifest:
        raise UserError(
            f"{folder}: has no {split} split; set data.{split} and prepare another data.store"
        )
    vocab_files = find_vocab_files(manifest)
    arrays = [name(split, side) for name in (ids_file, offsets_file) for side in ("src", "tgt")]
    check_sizes(folder, manifest, [*vocab_files, *arrays])
    digest = combine_digests([manifest[name]["sha256"] for name in vocab_files])
    if vocab is not None and vocab.digest != digest:
        raise UserError(
            f"{folder}: was made with another BPE model ({digest[:12]} instead of {vocab.digest[:12]}); "
            "give the data.store that belongs to this run"
        )
    n_src, n_tgt = vocab.sizes if vocab else (MAX_PIECES, MAX_PIECES)
    src = _open_side(folder, split, "src", n_src)
    tgt = _open_side(folder, split, "tgt", n_tgt)
    if len(src) != len(tgt):
        raise UserError(
            f"{folder}: is damaged ({split} has {len(src)} source and {len(tgt)} target sentences); {REMEDY}"
        )
    if not len(src):  # training would look for a first batch without end
        raise UserError(f"{folder}: its {split} split has no sentences; {REMEDY}")
    return TokenStore(src, tgt)


def warn_of_unknown(store: TokenStore) -> None:
    for side in (store.src, store.tgt):
        ids = side.read_ids(0, min(len(side.ids), LOOKED_AT_IDS))
        if np.count_nonzero(ids == UNK) > MOSTLY_UNKNOWN * len(ids):
            say_once(
                f"warning: {side.path}: is mostly <unk>, because the BPE model lacks the letters of this "
                "text; give the right vocab.model, or learn one with vocab.byte_fallback=true"
            )


def _open_side(folder: Path, split: str, side: str, n_pieces: int) -> Side:
    paths = folder / ids_file(split, side), folder / offsets_file(split, side)
    ids, offsets = _map_array(paths[0], "uint16"), _map_array(paths[1], "int64")
    if not len(offsets) or (offsets[0], offsets[-1]) != (0, len(ids)):
        raise UserError(f"{paths[1]}: is damaged (it does not match the file of ids); {REMEDY}")
    return Side(ids, offsets, n_pieces, paths[0])


def _map_array(path: Path, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    with explain_unreadable(path), open_plain_file(path) as file:
        header = HEADER.match(file.read(ARRAY_HEADER_BYTES))
        if header and header["dtype"].decode() == kind.str:
            n_bytes = os.fstat(file.fileno()).st_size - header.end()
            if n_bytes == int(header["n"]) * kind.itemsize:
                return np.memmap(file, kind, "r", offset=header.end())
    raise UserError(f"{path}: is damaged (not a one-dimensional array of {dtype}); {REMEDY}")


class ArrayWriter:
    """A one-dimensional `.npy` file that grows by appending; `close` puts the length into its
    header.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.n = 0
        self.file: BinaryIO = open_plain_file(path, "wb")
        self.file.write(self._header())

    def _header(self) -> bytes:
        # numpy leaves room for 21 digits, so the header has the same size whatever the length.
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": self.dtype.str, "fortran_order": False, "shape": (self.n,)}
        )
        return header.getvalue()

    def append(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.dtype, copy=False).tobytes())
        self.n += len(values)

    def close(self) -> None:
        self.file.seek(0)
        self.file.write(self._header())
        self.file.close()


class SideWriter:
    """Writes one side of one split, chunk by chunk, in memory that does not grow."""

    def __init__(self, folder: Path, split: str, side: str) -> None:
        self.ids = ArrayWriter(folder / ids_file(split, side), "uint16")
        self.offsets = ArrayWriter(folder / offsets_file(split, side), "int64")
        self.offsets.append(np.zeros(1, np.int64))

    @property
    def n_pieces(self) -> int:
        return self.ids.n

    def append(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Add sentences, laid end to end, with the number of pieces of each."""
        self.offsets.append(self.n_pieces + np.cumsum(counts))
        self.ids.append(ids)

    def close(self) -> None:
        self.ids.close()
        self.offsets.close()
