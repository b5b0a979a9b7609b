"""Sealed folders at a URL that fsspec understands: s3://bucket/prefix, gs://, file:// and others.

The manifest of a folder is written after all its files and removed before them, so a folder that has
one is complete; whoever fetches it verifies each file by its digest. What may go wrong on the way to
a server, and with what names, differs between services: all of it is a `RemoteError`.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmt.system.errors import Failure, UserError
from nmt.system.files import read_bytes, read_manifest, verify, write_folder
from nmt.system.run_folder import MANIFEST_FILE

MAX_SMALL_BYTES = 1 << 20


class RemoteError(Failure):
    """What is at a URL could not be read or written."""


class Remote:
    """A folder at a URL. Names are relative to it, with "/" between their parts."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            # Others may write there too, so a list of files is never taken from a cache.
            self._system, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise UserError(
                f"training.mirror={url}: {error}; for s3:// that is pip install '.[mirror]'"
            ) from None
        except ValueError as error:
            raise UserError(f"training.mirror={url}: {error}") from None

    def list_sealed(self, name: str) -> set[str]:
        """The complete folders in the folder `name`."""
        with self._explain(name):
            found = self._system.find(self._path(name))
        ending = f"/([^/]+)/{re.escape(MANIFEST_FILE)}$"
        return {match[1] for path in found if (match := re.search(ending, path))}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        with self._explain(name):
            try:
                if self._system.info(self._path(name))["size"] > MAX_SMALL_BYTES:
                    raise RemoteError(f"{self.url}/{name}: is too large")
                return bytes(self._system.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        with self._replacing(name) as place:
            self._system.pipe_file(place, content)

    def put_file(self, path: Path, name: str) -> None:
        with self._replacing(name) as place:
            self._system.put_file(str(path), place)

    def get_file(self, name: str, path: Path) -> bool:
        """Fetch a file; False if there is none."""
        with self._explain(name):
            try:
                self._system.get_file(self._path(name), str(path))
            except FileNotFoundError:
                return False
        return True

    def put_files(self, folder: Path, name: str) -> bytes:
        """Copy a sealed folder without its manifest, and return that. Until it is written, the
        folder counts as absent.
        """
        manifest = read_bytes(folder / MANIFEST_FILE)
        self.unseal(name)
        for file in json.loads(manifest):
            self.put_file(folder / file, f"{name}/{file}")
        return manifest

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
        with self._explain(name), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)

    def unseal(self, name: str) -> None:
        """Remove the manifest of a folder, which then counts as absent."""
        manifest = self._path(f"{name}/{MANIFEST_FILE}")
        with self._explain(name), contextlib.suppress(FileNotFoundError):
            if self._system.exists(manifest):
                self._system.rm_file(manifest)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[str]:
        """Where to write a file so that it appears at once, complete."""
        path = self._path(name)
        with self._explain(name):
            if self._system.async_impl:  # a service of objects, which has no half-written ones
                yield path
                return
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield f"{path}.part"
            self._system.mv(f"{path}.part", path)

    @contextlib.contextmanager
    def _explain(self, name: str) -> Iterator[None]:
        try:
            yield
        except (RemoteError, UserError):
            raise
        except Exception as error:  # each service has its own kinds
            reason: Any = str(error).partition("\n")[0][:300].rstrip(". ") or type(error).__name__
            raise RemoteError(f"{self.url}/{name}: {reason}") from None
