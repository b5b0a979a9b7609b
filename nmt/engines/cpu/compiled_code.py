"""Where numba keeps compiled code: one folder for each processor, version of numba, and version of
the files that it was compiled from.

numba itself notices a change only in the file of the function that is called, not in the files of the
functions that this one calls.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Sums may be reordered, but NaN stays NaN: a search must notice it.
FAST_SUMS = frozenset({"reassoc", "contract", "nsz", "arcp"})


def find_code_folder(*files: str) -> Path | None:
    """Return the folder for what is compiled from `files`; None where numba keeps it beside them."""
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


@contextlib.contextmanager
def hold_code_folder(*files: str) -> Iterator[None]:
    """Let one process at a time compile `files`; the others wait and then use its result."""
    folder = find_code_folder(*files)
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_compiler(
    *files: str, fast_math: frozenset[str] = FAST_SUMS
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for functions that numba compiles, and whose code depends on `files`.

    Other Python threads run while a compiled function does.
    """
    import numba

    config: Any = numba.config
    njit: Any = numba.njit  # its types do not know `no_cfunc_wrapper`
    folder = find_code_folder(*files)

    def compile_function(function: Callable[..., Any]) -> Any:
        usual_folder = config.CACHE_DIR
        if folder is not None:
            config.CACHE_DIR = str(folder)
        try:
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
        finally:
            config.CACHE_DIR = usual_folder

    return compile_function
