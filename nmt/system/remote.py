"""Sealed folders at a URL that fsspec understands: s3://bucket/prefix, gs://, file:// and others.

The manifest of a folder is written after all its files and removed before them, so a folder that has
one is complete; each file that is fetched is verified by its digest. Services raise errors of many
kinds: all of them become a `RemoteError`.
"""

import contextlib
import glob
import json
from collections.abc import Iterator
from pathlib import Path

from nmt.system.errors import Failure, UserError
from nmt.system.extras import name_remedy
from nmt.system.files import (
    check_plain_file,
    has_plain_file,
    read_bytes,
    read_manifest,
    verify,
    write_folder,
)
from nmt.system.run_folder import MANIFEST_FILE

MAX_SMALL_BYTES = 1 << 20


class RemoteError(Failure):
    """A URL could not be read or written."""


class Remote:
    """A folder at a URL. Names are relative to it, with "/" between their parts."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            # Others may write there too, so a list of files is never taken from a cache.
            self._system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except Exception as error:  # each service has its own kinds, and some connect already
            if isinstance(error, OSError):
                raise RemoteError(f"{url}: {error}") from None
            remedy = f"; for s3:// that is {name_remedy('s3fs')}"
            hint = remedy if isinstance(error, ImportError) else ""
            raise UserError(f"training.mirror={url}: {error}{hint}") from None
        self._root = root.rstrip("/")

    def list_sealed(self, name: str) -> set[str]:
        """Return the names of the complete folders in the folder `name`."""
        with self._explain(name) as path:
            found = self._system.glob(f"{glob.escape(path)}/*/{MANIFEST_FILE}")
            return {manifest.split("/")[-2] for manifest in found}

    def list_names(self) -> set[str]:
        """Return the names of the entries of the folder itself."""
        with self._explain("") as path, contextlib.suppress(FileNotFoundError):
            entries = self._system.ls(path, detail=False)
            # An object store may have an empty object that is the folder itself.
            inside = [entry for entry in entries if entry.strip("/") != path.strip("/")]
            return {entry.rstrip("/").rpartition("/")[2] for entry in inside}
        return set()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist. A large one is cut."""
        with self._explain(name) as path, contextlib.suppress(FileNotFoundError):
            return bytes(self._system.cat_file(path, end=MAX_SMALL_BYTES))
        return None

    def put_file(self, path: Path, name: str) -> None:
        with self._replacing(name) as place:
            self._system.put_file(str(path), place)

    def get_file(self, name: str, path: Path) -> None:
        """Fetch a file if there is one."""
        check_plain_file(path)  # it would be written through a link
        with self._explain(name) as place, contextlib.suppress(FileNotFoundError):
            self._system.get_file(place, str(path))

    def put_folder(self, folder: Path, name: str) -> None:
        """Copy a sealed folder unless it is there already, its manifest last. One that is removed or
        replaced meanwhile stays incomplete there.
        """
        manifest = _read_manifest_bytes(folder)
        if manifest is None or self.read(f"{name}/{MANIFEST_FILE}") == manifest:
            return
        self.unseal(name)
        try:
            for file in json.loads(manifest):
                self.put_file(folder / file, f"{name}/{file}")
        except RemoteError:  # also where the file to copy was removed
            if _read_manifest_bytes(folder) == manifest:
                raise
            return
        if _read_manifest_bytes(folder) == manifest:
            with self._replacing(f"{name}/{MANIFEST_FILE}") as place:
                self._system.pipe_file(place, manifest)

    def get_folder(self, name: str, path: Path) -> None:
        """Fetch a complete folder and verify it; `UserError` if it is damaged."""

        def fill(folder: Path) -> None:
            self.get_file(f"{name}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
            for file in read_manifest(folder):
                self.get_file(f"{name}/{file}", folder / file)
            verify(folder)

        try:
            write_folder(path, fill)
        except UserError as error:
            raise UserError(f"{self.url}/{name}: {error}") from None

    def remove_folder(self, name: str) -> None:
        self.unseal(name)
        self._remove(name)

    def unseal(self, name: str) -> None:
        """Remove the manifest of a folder, which then counts as absent."""
        self._remove(f"{name}/{MANIFEST_FILE}")

    def _remove(self, name: str) -> None:
        with self._explain(name) as path:
            if self._system.exists(path):
                self._system.rm(path, recursive=True)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[str]:
        """Yield where to write a file so that it appears at once, complete."""
        with self._explain(name) as path:
            if self._system.async_impl:  # object stores show no half-written files
                yield path
                return
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield f"{path}.part"
            self._system.mv(f"{path}.part", path)

    @contextlib.contextmanager
    def _explain(self, name: str) -> Iterator[str]:
        """Yield the path of a name; what fails there becomes one line."""
        try:
            yield f"{self._root}/{name}"
        except Exception as error:  # each service has its own kinds
            reason = str(error).partition("\n")[0][:300].rstrip(". ") or type(error).__name__
            raise RemoteError(f"{self.url}/{name}: {reason}") from None


def _read_manifest_bytes(folder: Path) -> bytes | None:
    path = folder / MANIFEST_FILE
    return read_bytes(path) if has_plain_file(path) else None
