"""A whole stream through a translator: chunk by chunk, on one process or several, out in order and in whole lines.

A `Job` says everything that a process needs to do its part, so that each can open the model by itself. What stands
before a mistake is written before the mistake is told. Nothing tears a chunk while it is being written but the death of
the process, and an output whose writer died goes on after its last whole line.
"""

import fcntl
import os
import signal
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import IO, cast

import torch

from nmt.checkpoint import Checkpoint, load
from nmt.config import RunConfig, asked_device, changed
from nmt.export.engine import make_engine
from nmt.system.device import choose_device
from nmt.system.errors import Failure, UserError
from nmt.system.pool import ordered
from nmt.system.runtime import settle
from nmt.translate.formats import Layout
from nmt.translate.lines import Chunk, keep_whole_lines
from nmt.translate.translator import LineTooLong, TextToText, make_translator


@dataclass(frozen=True)
class Job:
    checkpoints: tuple[str, ...]
    overrides: tuple[str, ...]
    layout: Layout = Layout()
    is_exported: bool = False  # for CTranslate2
    workers: int = 1


@dataclass(frozen=True)
class Answer:
    data: bytes
    n_lines: int
    n_bytes: int  # of the source, up to here
    mistake: str | None = None  # which comes after


@dataclass(frozen=True)
class Opened:
    translator: TextToText
    config: RunConfig
    paths: list[str]  # of the checkpoints that were meant
    checkpoints: tuple[Checkpoint, ...] = ()  # none behind an export


@lru_cache(maxsize=1)
def opened(job: Job) -> Opened:
    settle()
    if job.workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // job.workers))
    device = choose_device(asked_device(job.overrides))
    if job.is_exported:
        translator, config = make_engine(
            Path(job.checkpoints[0]), job.overrides, torch.get_num_threads(), device.type
        )
        return Opened(translator, config, [job.checkpoints[0]])
    checkpoint, *others = [load(Path(path)) for path in job.checkpoints]
    config = changed(checkpoint.config, job.overrides)
    return Opened(
        make_translator(checkpoint, device, config.decoding, others),
        config,
        [str(one.path) for one in (checkpoint, *others)],
        (checkpoint, *others),
    )


def answer(job: Job, task: Chunk | str) -> Answer:
    """What is written for a chunk; for a mistake, the mistake."""
    if isinstance(task, str):
        return Answer(b"", 0, 0, task)
    translator = opened(job).translator
    lines, prefixes, mistake = task.lines, task.prefixes, None
    try:
        found = translator.candidates(lines, job.layout.request, prefixes, task.first)
    except LineTooLong as error:
        lines, mistake = lines[: error.index], str(error)
        found = translator.candidates(
            lines, job.layout.request, prefixes and prefixes[: error.index], task.first
        )
    text = "".join(
        job.layout.lines(task.first + i, line, candidates, translator)
        for i, (line, candidates) in enumerate(zip(lines, found, strict=True))
    )
    return Answer(text.encode(errors="replace"), len(lines), task.n_bytes, mistake)


def answers(job: Job, chunks: Iterator[Chunk], out: IO[bytes]) -> Generator[Answer]:
    """Write what is answered to each chunk; yields it once it is written."""
    drawn = ordered(partial(answer, job), _with_mistake(chunks), job.workers)
    with closing(cast(Generator[Answer], drawn)) as results:
        for result in results:
            try:
                write_whole(out, result.data)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise Failure(
                    f"{out.name}: cannot be written ({error.strerror}); with --resume a file goes on from "
                    "its last whole line"
                ) from None
            yield result
            if result.mistake is not None:
                raise UserError(result.mistake)


def _with_mistake(chunks: Iterator[Chunk]) -> Iterator[Chunk | str]:
    try:
        yield from chunks
    except UserError as error:
        yield str(error)


def write_whole(out: IO[bytes], data: bytes) -> None:
    with _uninterrupted():
        left = memoryview(data)
        while left:
            left = left[out.write(left) :]
        out.flush()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is done; the second one does not."""
    asked: list[int] = []

    def wait(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # as of what a shell started in the background
        yield
        return
    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@contextmanager
def output_file(
    path: str, is_resumed: bool, inputs: Sequence[int]
) -> Iterator[tuple[IO[bytes], int]]:
    """The file `path`, open at its end, and how many lines it has: none, or the whole ones that it had. It must be none
    of the open files `inputs`."""
    try:
        file = open(path, "ab", buffering=0)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); choose another -o FILE"
        ) from None
    with file:
        if not stat.S_ISREG(
            os.fstat(file.fileno()).st_mode
        ):  # a pipe or a device: nothing to lock or count
            if is_resumed:
                raise UserError(
                    f"{path}: is no plain file, whose lines --resume could count; leave one of them out"
                )
            yield file, 0
            return
        if any(os.path.sameopenfile(file.fileno(), handle) for handle in inputs):
            raise UserError(f"{path}: is the input too; choose another -o FILE")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path}: another nmt-translate writes there; wait for it or choose another -o FILE"
            ) from None
        if is_resumed:
            yield file, keep_whole_lines(path)
        else:
            file.truncate(0)
            yield file, 0
