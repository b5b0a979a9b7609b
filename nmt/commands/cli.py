"""What all commands share: exit codes, the arguments that name a configuration, and --offline.

Exit codes: 0 done; 1 a failure, in one line if it was foreseen, otherwise with a traceback to
report; 2 the user's mistake, in one line; 75 preempted, and the same command continues;
130 interrupted. Nothing heavy is imported here, because `--help` must answer at once, and --offline
must be known before any library goes online.
"""

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from argparse import (
    Action,
    ArgumentError,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import nmt
from nmt.system.errors import Failure, UserError, fit_into_line
from nmt.system.escapes import escape_line
from nmt.system.extras import check_extra
from nmt.system.memory import is_out_of_memory
from nmt.system.progress import say, say_once
from nmt.system.streams import STDOUT, ReaderLeft, secure_standard_streams

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import SupportsWrite

    from nmt.evaluate.results import Result
    from nmt.system.pool import Executor
    from nmt.system.progress import Progress
    from nmt.translate.stream import DoneChunk

    Done = TypeVar("Done", bound=DoneChunk)

# Errors that the user's disk, mount or path causes. Any other errno is a bug, shown with its traceback.
FORESEEN_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.ENAMETOOLONG,
    errno.EPERM,
    errno.EIO,
    errno.EBUSY,
    errno.ELOOP,
    errno.EISDIR,
    errno.ENOTDIR,
)
Argv = Sequence[str] | None  # the words of a command line; None: those of this process
LOG_LINE_S = 60.0  # between lines of progress in a log, so that short work writes none
MAX_WORKERS = 4_096
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

# What to do when memory has run out, unless the work itself gives better advice.
TO_LOWER = {
    "nmt-train": "lower training.micro_tokens, model.d_model, model.d_ff or model.n_layers, or "
    "data.workers while data is prepared",
    "nmt-prepare": "lower data.workers, or vocab.sample_sentences while the BPE is learned",
    "nmt-translate": "lower decoding.beam or decoding.batch_tokens, or use fewer --workers",
    "nmt-score": "lower decoding.batch_tokens",
    "nmt-eval": "lower decoding.beam or decoding.batch_tokens",
}


def start_command(
    program: str,
    parse: Callable[[Argv], Namespace],
    work: Callable[[Namespace], int],
    argv: Argv = None,
    extra: str | None = None,
) -> int:
    """Parse the arguments of a command and do its work; each command's `main` is this for that command.
    `extra` is the folder of nmt/extras/ that has the work.
    """
    secure_standard_streams()
    args = parse(argv)

    def check_and_work() -> int:
        keys = Counter(word.partition("=")[0] for word in vars(args).get("overrides", ()))
        for key, n in keys.items():
            if n > 1:
                say(f"note: {key} is given {n} times; the last value counts")
        if extra is not None:
            check_extra(extra, program)
        return work(args)

    return run_command(check_and_work, program)


def run_command(work: Callable[[], int], program: str) -> int:
    """Run `work` and turn its errors into an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # whatever the locale
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    try:
        code = work()
        if sys.stdout is not None:  # the user may have closed it
            sys.stdout.flush()
        return code
    except BaseException as error:
        exit_code = report_error(error, program)
        n_ranks = os.environ.get("WORLD_SIZE", "1")
        if n_ranks.isdecimal() and int(n_ranks) > 1:
            leave_ranks(error, exit_code)
        if exit_code is None:
            raise
        return exit_code


def report_error(error: BaseException, program: str) -> int | None:
    """Report an error in one line and return its exit code, or None for a bug of ours."""
    code = 1
    if isinstance(error, UserError):
        code, text = 2, f"error: {error}"
    elif isinstance(error, Failure):
        text = f"failed: {error}"
    elif isinstance(error, ModuleNotFoundError) and str(error.name).startswith("nmt."):
        code, text = 2, f"error: {error.name} is missing; install nmt again"
    elif isinstance(error, KeyboardInterrupt):
        code, text = 130, "interrupted"
    elif isinstance(error, ReaderLeft):  # it has read all that it wanted
        return 0
    elif is_out_of_memory(error):
        remedy = TO_LOWER.get(program, "end other processes, or use a machine with more")
        text = f"failed: out of memory; {remedy}"
    elif isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
        text = "failed: too many files are open; raise the limit, for example with ulimit -n 1024"
    elif isinstance(error, OSError) and error.errno in FORESEEN_ERRORS:
        text = f"error: {error.filename or 'output'}: {error.strerror}"
    else:
        return None
    print(escape_line(f"{program}: {text}"), file=sys.stderr)
    return code


def leave_ranks(error: BaseException, reported: int | None) -> NoReturn:
    """End this process, which is one rank of many, at once.

    An ordinary exit destroys the process group, and NCCL then waits for collectives that this rank
    has left: torchrun would see no exit, and the other ranks would hold their GPUs until a timeout.
    """
    code = 1 if reported is None else reported
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    elif reported is None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        # its reader may have left, or it was closed from the start
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(code)


class StoreOnce(Action):
    """Stores the value of an option. An option given twice is an error, whereas argparse's own action
    silently drops the first value.
    """

    is_given = False

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string and self.is_given:
            raise ArgumentError(self, "given twice; leave one of them out")
        self.is_given = True
        setattr(namespace, self.dest, values)


# commands whose settings are those of decoding
TRANSLATING = ("nmt-translate", "nmt-eval", "nmt-score", "nmt-serve")


class CommandParser(ArgumentParser):
    """The argument parser of a command, which reports errors in one line, because the usage of our commands takes
    ten, and refuses an option given twice. It parses one command line.
    """

    def __init__(self, program: str, description: str, examples: str) -> None:
        super().__init__(
            prog=program,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=RawDescriptionHelpFormatter,
        )
        self.register("action", None, StoreOnce)  # what add_argument() takes by default
        self.add_argument("--version", action="version", version=f"nmt {nmt.__version__}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            option = word.partition("=")[0]
            explanation = option.startswith("-") and self.explain_option(option)
            if explanation:
                self.error(f"{option}: unknown option; {explanation}")
        return namespace, unknown

    def explain_option(self, option: str) -> str | None:
        """Say how a setting is written that is given like an option, by our name or another toolkit's."""
        from nmt.config_files import explain_name

        section = "decoding." if self.prog in TRANSLATING else ""
        name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
        return explain_name(name, "=...", section)

    def error(self, message: str) -> NoReturn:
        line = fit_into_line(f"{self.prog}: error: {message}; see {self.prog} --help")
        self.exit(2, f"{line}\n")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        def print_all() -> int:
            print(self.format_help(), end="", file=file)
            return 0

        # argparse would ignore a full disk, and complain about a reader that has left.
        if code := run_command(print_all, self.prog):
            self.exit(code)


def parse_checkpoints(parser: ArgumentParser, argv: Argv) -> Namespace:
    """Parse a command line that names checkpoints in `arguments`, and after them settings of decoding."""
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.arguments if is_setting(word)]
    args.checkpoints = [word for word in args.arguments if not is_setting(word)]
    if not args.checkpoints:
        parser.error("no checkpoint is given; put it before the settings")
    for word in args.overrides:
        if not word.startswith(("decoding.", "device=")):
            parser.error(
                f"{word}: was fixed by training; give only settings of decoding, or device=cpu"
            )
    return args


def add_checkpoints(parser: ArgumentParser, verb: str) -> None:
    """Add the models that translate or score, for `parse_checkpoints`."""
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CHECKPOINT",
        help=f"a checkpoint folder, an average, or a run folder; several with one vocabulary {verb} "
        "together. Settings may follow: decoding.key=value, device=cpu",
    )


def add_engine(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("nmt", "ctranslate2"),
        default="nmt",
        help="ctranslate2: CHECKPOINT is a folder that nmt-export --to ctranslate2 wrote",
    )


def add_workers(parser: ArgumentParser) -> None:
    """Add the options for the processes that do the work, here or elsewhere."""
    parser.add_argument(
        "--workers",
        type=parse_workers,
        default=1,
        metavar="N",
        help="number of processes, each with a copy of the model and its share of the cores (default 1)",
    )
    add_on(parser)


def add_on(parser: ArgumentParser) -> None:
    """Add --on: where the workers are."""
    parser.add_argument(
        "--on",
        choices=["ray"],
        help="where the workers are, if not on this machine: in the Ray cluster at RAY_ADDRESS; see docs/clusters.md",
    )


def parse_workers(text: str) -> int:
    """Parse the value of --workers."""
    value = parse_positive(text)
    if value > MAX_WORKERS:
        raise ArgumentTypeError(f"{value:,} is more than {MAX_WORKERS:,}")
    return value


def is_setting(text: str) -> bool:
    """Whether a word is a setting; a path may hold a "=" too, but does not begin like this."""
    return re.match(r"([a-z_0-9]+(\.[a-z_0-9]+)+|device)=", text) is not None


def parse_positive(text: str) -> int:
    """Parse the value of an option that counts something."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise ArgumentTypeError(f"{value}: give a number of at least 1")
    return value


def check_options(
    parser: ArgumentParser,
    args: Namespace,
    conflicts: Mapping[str, str],
    needs: Mapping[str, str],
) -> None:
    """Refuse options that do not go together: `conflicts` lists those that an option excludes, `needs`
    the one that an option requires.
    """
    given: dict[str, str] = {}  # what to call each option that is given
    for action in parser._actions:
        value = vars(args).get(action.dest, action.default)
        if value != action.default:
            chosen = f" {value}" if action.choices else ""
            given |= {option: option + chosen for option in action.option_strings}
    for option in conflicts:
        for other in conflicts[option].split():
            if option in given and other in given:
                parser.error(f"{given[option]} does not support {other}; leave one of them out")
    for option, needed in needs.items():
        if option in given and needed not in given:
            parser.error(f"{option} needs {needed}")


def open_lines_output(
    args: Namespace,
    inputs: Sequence[int],
    stack: ExitStack,
    task: str,
    unit: str,
    at_a_time: int = 1,
) -> "tuple[IO[bytes], int, Progress]":
    """Open -o FILE or standard output, which must not be one of the inputs, and a progress bar. The
    number in between is how many lines of FILE --resume keeps, a multiple of `at_a_time`.
    """
    from nmt.system.progress import Progress, is_terminal
    from nmt.translate.stream import check_not_among, open_output

    out: IO[bytes]
    n_done = 0
    if args.output:
        out, n_done = stack.enter_context(open_output(args.output, args.resume, inputs, at_a_time))
    else:
        check_not_among(STDOUT, "standard output", inputs)
        out = sys.stdout.buffer
    if n_done:
        say(f"{args.output} has {n_done:,} lines; continuing with line {n_done + 1:,}")
    # a bar would disturb lines on the same terminal
    is_shown = args.output is not None or (is_terminal() and not sys.stdout.isatty())
    bar = stack.enter_context(Progress(task, None, unit, n_done, is_shown, line_s=LOG_LINE_S))
    return out, n_done, bar


def open_executor(
    on: str | None, n_workers: int, uses_gpu: bool
) -> "AbstractContextManager[Executor]":
    """Open the workers: processes of this machine, or where --on says that they are."""
    from nmt.system.pool import use_processes

    if on is None:
        return nullcontext(use_processes(n_workers))
    check_extra("cluster", f"--on {on}")
    from nmt.extras.cluster import open_cluster

    return open_cluster(n_workers, uses_gpu)


def do_chunks(
    args: Namespace,
    start: Callable[[], Callable[[Any], "Done"]],
    here: Callable[[Any], "Done"],
    chunks: Iterator[Any],
    out: IO[bytes],
    progress: "Progress",
) -> "Generator[Done]":
    """Write and yield, in order, the workers' results for the chunks. `start` makes a worker in another
    process, `here` works in this one.
    """
    from nmt.system.pool import map_with_workers
    from nmt.translate.stream import write_uninterrupted

    uses_gpu = "device=cpu" not in args.overrides
    with (
        open_executor(args.on, args.workers, uses_gpu) as executor,
        closing(map_with_workers(start, chunks, executor, here)) as done,
    ):
        for chunk in done:
            write_uninterrupted(out, chunk.data)
            progress.advance(chunk.n_lines)
            if chunk.share:
                progress.total = round(progress.done / chunk.share)
            yield chunk
            if chunk.error is not None:
                raise UserError(chunk.error)


def add_config_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="a YAML file, or the name of a bundled config (base.yaml, big.yaml, demo.yaml, ...)",
    )
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that take precedence over the file, such as training.steps=1000",
    )


def add_offline(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--offline",
        action="store_true",
        help="do not access the network: use only local files and cached downloads",
    )


def go_offline(args: Namespace) -> None:
    """Keep huggingface_hub and wandb off the network; call this before they are imported, because
    they read these variables once.
    """
    if args.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["WANDB_MODE"] = "offline"


def write_card(average: "Path", results: "Sequence[Result]") -> None:
    """Write the model card of an average, or say once that what writes it is missing."""
    try:
        check_extra("cards", "README.md")
    except UserError as error:
        say_once(f"warning: no model card: {error}")
        return
    from nmt.extras.cards.card import write_average_card

    write_average_card(average, results)
