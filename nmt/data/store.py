"""Token ids on disk: for each side of a split a row of uint16 and the int64 offsets of its
sentences, plain `.npy`.

They are memory-mapped, so that 36 million pairs open in milliseconds and all processes of a machine
share them. A store is a sealed folder that is enough to train from: `vocab.model`,
`{train,valid}.{src,tgt}.{ids,offsets}.npy`, the raw dev text `valid.{src,tgt}.txt`, `ledger.json`,
and `manifest.json`, which ties the ids to the BPE model that made them. On disk there are pieces
only; tokens are what the model reads: pieces and a sentence mark (bos or eos).
"""

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nmt.system.errors import UserError
from nmt.system.files import has_plain_file, open_plain_file, read_manifest
from nmt.system.run_folder import MANIFEST_FILE, VOCAB_FILE, ids_file, offsets_file

REMEDY = "remove the folder and run nmt-prepare again"
# How a `.npy` file of one dimension begins. numpy itself evaluates what a header says, and fails in
# many ways where a stranger wrote it.
HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<dtype>[<>]\w\d)', 'fortran_order': False, "
    rb"'shape': \((?P<n>\d{1,18}),\), \} *\n",
    re.DOTALL,
)
ARRAY_HEADER_BYTES = 256
Manifest = dict[str, dict[str, Any]]  # file name -> size and sha256


@dataclass(frozen=True)
class Side:
    ids: np.ndarray  # (pieces,) uint16
    offsets: np.ndarray  # (n + 1,) int64; sentence i is ids[offsets[i]:offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sentence as the model reads it: its pieces, and bos or eos."""
        return np.diff(self.offsets).astype(np.int32) + 1  # (n,)

    @property
    def n_tokens(self) -> int:
        """The sum of `lengths`."""
        return len(self.ids) + len(self)


@dataclass(frozen=True)
class TokenStore:
    src: Side
    tgt: Side

    def __len__(self) -> int:
        return len(self.src)


def open_store(folder: Path, split: str, vocab_digest: str | None = None) -> TokenStore:
    """Open a split of a sealed store; raise UserError if its BPE model does not have
    `vocab_digest`.

    Only sizes are checked against the manifest, because this must be quick;
    `nmt.system.files.verify` reads everything.
    """
    if not has_plain_file(folder / MANIFEST_FILE):
        raise UserError(f"{folder}: contains no prepared data; run nmt-prepare first")
    manifest = read_manifest(folder)
    vocab = folder / VOCAB_FILE
    size = vocab.stat().st_size if has_plain_file(vocab) else None
    if VOCAB_FILE not in manifest or size != manifest[VOCAB_FILE]["size"]:
        raise UserError(
            f"{vocab}: is damaged, or is not the file listed in {MANIFEST_FILE}; {REMEDY}"
        )
    if ids_file(split, "src") not in manifest:
        raise UserError(
            f"{folder}: has no {split} split; set data.{split} and prepare another data.store"
        )
    digest = manifest[VOCAB_FILE]["sha256"]
    if vocab_digest is not None and vocab_digest != digest:
        raise UserError(
            f"{folder}: was made with another BPE model ({digest[:12]} instead of {vocab_digest[:12]}); "
            "give the data.store that belongs to this run"
        )
    src = _open_side(folder, split, "src", manifest)
    tgt = _open_side(folder, split, "tgt", manifest)
    if len(src) != len(tgt):
        raise UserError(
            f"{folder}: is damaged ({split} has {len(src)} source and {len(tgt)} target sentences); {REMEDY}"
        )
    return TokenStore(src, tgt)


def _open_side(folder: Path, split: str, side: str, manifest: Manifest) -> Side:
    ids = _map_array(folder / ids_file(split, side), "uint16", manifest)
    offsets = _map_array(folder / offsets_file(split, side), "int64", manifest)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids):
        raise UserError(
            f"{folder / offsets_file(split, side)}: is damaged (it does not match the file of ids); {REMEDY}"
        )
    return Side(ids, offsets)


def _map_array(path: Path, dtype: str, manifest: Manifest) -> np.ndarray:
    kind = np.dtype(dtype)
    try:
        with open_plain_file(path) as file:
            size, expected = os.fstat(file.fileno()).st_size, manifest[path.name]["size"]
            if size != expected:
                raise ValueError(f"{size} bytes instead of {expected}")
            header = HEADER.match(file.read(ARRAY_HEADER_BYTES))
            if not header or header["dtype"].decode() != kind.str:
                raise ValueError(f"its header is not that of a one-dimensional array of {dtype}")
            n = int(header["n"])
            if size != header.end() + n * kind.itemsize:
                raise ValueError(f"its header says {n} numbers, which {size} bytes do not hold")
            return np.memmap(file, kind, "r", offset=header.end(), shape=(n,))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(f"{path}: is damaged ({error}); {REMEDY}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


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
