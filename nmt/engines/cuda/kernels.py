"""Triton, if it is installed, and whether it can make GPU kernels here.

It does so at run time, with a C compiler, Python's headers and NVIDIA's assembler. What is missing
shows at the first launch, in errors that share no type. So each kernel is tried before it is used,
and plain torch does the work of one that fails.
"""

from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say_once
from nmt.system.runtime import read_rank_variable

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the plain paths need none of it
    triton = tl = constexpr = None

# Read once, at import, as Triton itself does.
IS_INTERPRETED = triton is not None and triton.knobs.runtime.interpret
COMPILER_REMEDY = (
    "it needs a compiler and Python's headers (Debian, Ubuntu: apt install g++ python3-dev)"
)


def jit_function(function: Callable[..., Any]) -> Any:
    """Apply triton.jit, or nothing if Triton is not installed."""
    return function if triton is None else triton.jit(function)


def can_launch(launch: Callable[[], object]) -> bool:
    """Whether a kernel can be built and launched; if not, say once why, and what to install."""
    try:
        launch()
        return True
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if read_rank_variable("LOCAL_RANK", 0) == 0:
            say_once(
                "warning: Triton cannot build GPU kernels here, so plain torch computes, much more "
                f"slowly: {summarize_error(error)}; {COMPILER_REMEDY}"
            )
        return False


def summarize_error(error: Exception) -> str:
    """Return the type of an error and the first line of what it says."""
    if isinstance(error, CalledProcessError):
        return f"{error.cmd[0]} failed"  # the whole command adds nothing; the compiler has said why
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
