"""nmt-translate at a terminal: a line, its translation, the next; with a history where readline is at hand.

Ctrl-C drops the present line, Ctrl-D ends. Prompts go to standard error unless readline needs them itself, so that
standard output holds translations alone.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from nmt.system.errors import UserError

KEPT = 1_000  # lines of history
ASK = "> "


def converse(answer: Callable[[str], str]) -> None:
    """Print `answer` to each line until there are no more."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    with (
        _history()
        if sys.stdin.isatty() and sys.stdout.isatty()
        else contextlib.nullcontext() as is_editable
    ):
        while True:
            try:
                line = input(ASK) if is_editable else _asked()
                print(answer(line), end="", flush=True)
            except KeyboardInterrupt:
                print(file=sys.stderr, flush=True)
            except UserError as error:
                print(error, file=sys.stderr, flush=True)
            except EOFError:
                if sys.stdin.isatty():
                    print(file=sys.stderr)
                return


def _asked() -> str:
    print(ASK, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def _history() -> Iterator[bool]:
    """Lines of earlier sessions, kept for this user alone. Says whether lines can be edited."""
    try:
        import readline
    except ImportError:
        yield False
        return
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "nmt"
    file = folder / "translate_history"
    readline.set_history_length(KEPT)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):  # without a place to keep it, it is not kept
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
            file.chmod(0o600)
            readline.write_history_file(file)
