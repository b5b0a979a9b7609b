"""nmt-translate at a terminal: it translates each line as it is typed, with editing and history if
readline is available.

Ctrl-C drops the current line, Ctrl-D ends. Prompts go to standard error, unless readline needs to
write them itself, so that standard output holds only translations.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from nmt.system.errors import UserError
from nmt.system.progress import say
from nmt.translate.formats import Layout
from nmt.translate.lines import Chunk
from nmt.translate.stream import ChunkTranslator

HISTORY_LINES = 1_000
PROMPT = "> "


def converse(here: ChunkTranslator) -> None:
    def answer(line: str) -> str:
        if re.fullmatch(
            r":[a-z]+", line.strip()
        ):  # like :q and :help of other prompts; not a sentence
            say(f"{line.strip()}: the prompt has no commands; Ctrl-C drops a line, Ctrl-D ends")
            return ""
        chunk = here(Chunk(1, [line], share=0))
        if chunk.error is not None:
            raise UserError(chunk.error)
        return chunk.data.decode()

    if here.layout == Layout():  # several candidates can only be of one sentence
        here = replace(here, layout=Layout(is_text=True))
    data = here.model.config.data
    unit = "paragraph" if here.layout.is_text else "sentence"
    say(f"{data.src} -> {data.tgt}; one {unit} per line, Ctrl-C drops it, Ctrl-D ends")
    answer_lines(answer)


def answer_lines(answer: Callable[[str], str]) -> None:
    """Print the answer to each line until there are no more."""
    _check_input()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    with _use_readline() as is_editable:
        while True:
            try:
                line = input(PROMPT) if is_editable else _ask_plainly()
                print(answer(line), end="", flush=True)
            except KeyboardInterrupt:
                print(file=sys.stderr, flush=True)
            except UserError as error:
                say(str(error))
            except EOFError:
                if sys.stdin.isatty():
                    print(file=sys.stderr)
                return


def _check_input() -> None:
    """Raise UserError if standard input cannot be read, for example because it is write-only."""
    try:
        os.read(sys.stdin.fileno(), 0)
    except io.UnsupportedOperation:  # a program has put its own stream there
        return
    except OSError as error:
        raise UserError(
            f"standard input cannot be read ({error.strerror}); redirect it, or give -i FILE"
        ) from None


def _ask_plainly() -> str:
    print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def _use_readline() -> Iterator[bool]:
    """Yield whether lines can be edited. Earlier lines are kept, readable only by this user."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield False
        return
    try:
        import readline
    except ImportError:
        yield False
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    if not state.is_absolute():  # there is no home
        yield True
        return
    folder = state / "nmt"
    file = folder / "translate_history"
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):  # a history that cannot be saved is dropped
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))  # never readable by others
            file.chmod(0o600)
            readline.write_history_file(file)
