"""Where numba keeps compiled code: one folder for each processor, version of numba, and version of
the files that it was compiled from.

numba notices a change only in the file of the function that is called, not in the files of functions that
it calls in turn, and it tells code apart by the path of that file. So the files are copied to a folder
whose name is a digest of them all, and numba takes the copies for the source. A second checkout or
environment therefore finds what the first one compiled.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nmt.system.files import make_folder, remove_entry, write_text
from nmt.system.progress import say

# Sums may be reordered, but NaN stays NaN: a search must notice it.
FAST_SUMS = frozenset({"reassoc", "contract", "nsz", "arcp"})


def find_code_folder(*files: str) -> Path | None:
    """Return the folder for copies of `files`; None where numba keeps what it compiles beside them."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder is None:
        return None
    import numba
    from numba.core.registry import cpu_target

    processor = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((numba.__version__, processor)).encode())
    for file in files:
        digest.update(Path(file).read_bytes())
    return Path(folder) / digest.hexdigest()[:16]


def is_kept(name: str, *files: str) -> bool:
    """Whether this machine keeps the compiled code of the function `name` of `files`."""
    folder = find_code_folder(*files)
    return folder is not None and any(folder.parent.glob(f"{folder.name}_*/*.{name}-*.nbi"))


@contextlib.contextmanager
def hold_code_folder(*files: str) -> Iterator[None]:
    """Let one process at a time compile `files`, or load what another one compiled."""
    folder = find_code_folder(*files)
    if folder is None:
        yield
        return
    with open(make_folder(folder) / "lock", "ab") as file:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_once(what: str, name: str, files: Sequence[str], work: Callable[[], object]) -> None:
    """Do work that compiles the function `name` of `files`, or loads what an earlier process compiled."""
    with hold_code_folder(*files):
        if not is_kept(name, *files):
            say(f"compiling {what} for this processor, once; this takes about 20 seconds")
        retry_without_cache(work)


def retry_without_cache(work: Callable[[], object]) -> None:
    """Do work that loads compiled code. If it fails, remove what numba has kept, which may be damaged,
    and do it again: it then compiles, and computes the same bits.
    """
    try:
        work()
    except ImportError:
        raise
    except Exception:
        folder = os.environ.get("NUMBA_CACHE_DIR")
        for path in sorted(Path(folder).rglob("*.nb[ci]")) if folder else ():
            remove_entry(path)
        work()


def copy_sources(files: Sequence[str], folder: Path) -> None:
    for file in map(Path, files):
        if not (folder / file.name).exists():
            write_text(make_folder(folder) / file.name, file.read_text("utf-8"))


def make_compiler(
    *files: str, fast_math: frozenset[str] = FAST_SUMS
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for functions that numba compiles, and whose code depends on `files`.

    Other Python threads run while a compiled function does.
    """
    import numba

    njit: Any = numba.njit  # its types do not know `no_cfunc_wrapper`
    folder = find_code_folder(*files)
    if folder is not None:
        copy_sources(files, folder)

    def compile_function(function: Callable[..., Any]) -> Any:
        if folder is not None:
            code = function.__code__
            copy = folder / Path(code.co_filename).name
            function.__code__ = code.replace(co_filename=str(copy))
        compiler = njit(
            fastmath=set(fast_math),
            # a division by zero gives infinity or NaN, as it does in torch
            error_model="numpy",
            nogil=True,
            cache=True,
            # for callers in C, of which there are none; without it compiling takes a tenth less
            no_cfunc_wrapper=True,
        )
        return compiler(function)

    return compile_function
