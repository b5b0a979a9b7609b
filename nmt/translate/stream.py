"""Translates chunks of a stream, and writes the results as whole lines.

Each worker opens the model for itself, once, by the function that the command chose. Output that precedes an
error is written before the error is raised. Only if the process is killed can a chunk be cut while it is written, and
`--resume` continues after the last whole line of such an output.
"""

import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch

from nmt.system.errors import Failure, UserError
from nmt.system.files import refuse_run_file
from nmt.system.run_folder import MODEL_FILE
from nmt.system.runtime import tune_process
from nmt.system.streams import ReaderLeft
from nmt.translate.formats import Layout
from nmt.translate.lines import Chunk
from nmt.translate.sentences import RunningText, Splitter
from nmt.translate.translator import (
    Candidates,
    LineTooLong,
    LoadedModel,
    TextToText,
    Translation,
    find_cut_lines,
)

# Adds to the candidates of some lines which piece comes from which.
Aligner = Callable[[TextToText, Sequence[str], Sequence[Candidates]], list[Candidates]]


@dataclass(frozen=True)
class DoneChunk:
    """What is written for some lines of the input."""

    data: bytes
    n_lines: int
    share: float  # of the input, read up to the end of this chunk; 0: unknown
    error: str | None = None  # raised once `data` is written


@dataclass(frozen=True)
class TranslatedChunk(DoneChunk):
    lines: Sequence[str] = ()  # and their best translations, if the layout keeps them
    translations: Sequence[Translation] = ()
    shortened: Sequence[int] = ()  # lines of several sentences, with fewer in their translations
    # lines whose translations reach the length limit, and whether in a loop
    cut: Mapping[int, bool] = field(default_factory=dict)


def share_cores(n_workers: int) -> None:
    """Leave each of `n_workers` processes its share of torch's threads."""
    tune_process()
    if n_workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // n_workers))


@dataclass(frozen=True)
class ChunkTranslator:
    """Translates chunks in one process."""

    model: LoadedModel
    layout: Layout
    align: Aligner | None = None

    @property
    def identity(self) -> str:
        """All that decides what it writes for a line that is not too long."""
        model = self.model
        weights = [each.sha256[MODEL_FILE] for each in model.checkpoints]
        search = replace(model.config.decoding, long_lines="cut", max_source=1, batch_tokens=None)
        return repr((weights or model.paths, search, self.layout))

    def __call__(self, task: Chunk) -> TranslatedChunk:
        """What is written for a chunk. A line that is refused ends it: the lines before it are translated."""
        translate = self._translate_paragraphs if self.layout.is_text else self._translate_lines
        try:
            chunk = translate(task)
        except LineTooLong as error:
            before = self(task.cut(error.number - task.first))
            return replace(before, error=str(error))
        if self.layout.keeps_translations:
            return chunk
        return replace(chunk, lines=(), translations=())

    def _translate_lines(self, task: Chunk) -> TranslatedChunk:
        translator, layout, lines = self.model.translator, self.layout, task.lines
        candidates = translator.find_candidates(
            lines, layout.n_candidates, task.prefixes, task.numbers
        )
        if self.align is not None:
            candidates = self.align(translator, lines, candidates)
        best = [of_line[0] for of_line in candidates]
        rows = []
        for number, line, of_line in zip(task.numbers, lines, candidates, strict=True):
            rows.append(layout.lines(number, line, of_line, translator))
        shortened = find_shortened(translator, task, best)
        cut = find_cut_lines(best, task.first)
        return TranslatedChunk(
            _encode(rows), len(rows), task.share, None, lines, best, shortened=shortened, cut=cut
        )

    def _translate_paragraphs(self, task: Chunk) -> TranslatedChunk:
        translator, layout = self.model.translator, self.layout
        splitter = translator.make_splitter()
        paragraphs = [RunningText(line, splitter) for line in task.lines]
        translated = translator.translate_texts(paragraphs, layout.n_candidates, task.first)
        sentences = [sentence.text for text in translated for sentence in text.sentences]
        candidates = [of_sentence for text in translated for of_sentence in text.candidates]
        if self.align is not None:
            candidates = self.align(translator, sentences, candidates)

        remaining = iter(candidates)
        rows = []
        cut = {}
        for number, line, text in zip(task.numbers, task.lines, translated, strict=True):
            own = list(islice(remaining, len(text.sentences)))
            rows.append(layout.paragraph(number, line, replace(text, candidates=own), translator))
            if own_cut := find_cut_lines([of_sentence[0] for of_sentence in own]):
                cut[number] = any(own_cut.values())
        best = [of_sentence[0] for of_sentence in candidates]
        return TranslatedChunk(_encode(rows), len(rows), task.share, None, sentences, best, cut=cut)


def start_translating(
    load_model: Callable[[], LoadedModel], layout: Layout, align: Aligner | None, n_here: int
) -> ChunkTranslator:
    share_cores(n_here)
    return ChunkTranslator(load_model(), layout, align)


def _encode(rows: Sequence[str]) -> bytes:
    return "".join(rows).encode(errors="replace")


def find_shortened(
    translator: TextToText, task: Chunk, translations: Sequence[Translation]
) -> list[int]:
    """Return the numbers of the lines that have several sentences, and fewer in their translations: a
    model that was trained on single sentences leaves out the others.
    """
    src, tgt = (Splitter(language, lambda _: True) for language in translator.languages)
    shortened = []
    for number, line, translation in zip(task.numbers, task.lines, translations, strict=True):
        n_sentences = len(src.split(line))
        if n_sentences > 1 and len(tgt.split(translation.text)) < n_sentences:
            shortened.append(number)
    return shortened


# ---- output -------------------------------------------------------------------------------------------------------


def write_uninterrupted(out: IO[bytes], data: bytes) -> None:
    try:
        with _delay_interrupt():
            left = memoryview(data)
            while left:
                left = left[out.write(left) :]
            out.flush()
    except ReaderLeft:
        raise
    except OSError as error:
        raise Failure(
            f"{out.name}: cannot be written ({error.strerror}); --resume continues a file after "
            "its last complete line"
        ) from None


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Ctrl-C takes effect when this is done. A second one takes effect at once, in case the output is stuck.

    `signal.pthread_sigmask` would not do: torch's threads would still receive the signal, and a second Ctrl-C could
    not end a write that never returns.
    """
    is_interrupted = False

    def remember(number: int, _: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:  # as a shell starts what runs in the background
        yield
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if is_interrupted:
        raise KeyboardInterrupt


class OutputFile(FileIO):
    """A file that is emptied by its first write, so that an input refused before costs no result."""

    is_kept = False

    def write(self, data: Any) -> int:
        self.empty()
        return super().write(data)

    def empty(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self.truncate(0)


@contextmanager
def open_output(
    path: str, is_resumed: bool, input_handles: Sequence[int], at_a_time: int
) -> Iterator[tuple[IO[bytes], int]]:
    """The file `path`, open at its end, and the number of lines that it keeps, which is 0 unless resumed.

    It must not be one of the open input files.
    """
    refuse_run_file(Path(path))
    try:
        file = OutputFile(path, "ab")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); choose another -o FILE"
        ) from None
    with file:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        if not is_regular:  # a pipe or a device: nothing to lock or count
            if is_resumed:
                raise UserError(
                    f"{path}: is not a regular file, so --resume cannot count its lines; "
                    "leave --resume out, or give another -o FILE"
                )
            yield file, 0
            return
        check_not_among(file.fileno(), path, input_handles)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path}: another command is writing to it; wait for it or choose another -o FILE"
            ) from None
        if is_resumed:
            yield file, keep_whole_lines(path, at_a_time)
        else:
            file.is_kept = True
            yield file, 0
            file.empty()  # where there was nothing to write


def check_not_among(output: int | str, name: str, handles: Sequence[int]) -> None:
    """Refuse an output that is an input too, which would be cut, or grow while it is read; and one
    that is another output.
    """
    status = os.stat(output)
    is_same = any(os.path.samestat(status, os.fstat(handle)) for handle in handles)
    if is_same and stat.S_ISREG(status.st_mode):
        raise UserError(f"{name}: is also input or output; give another file")


def keep_whole_lines(path: str, at_a_time: int = 1) -> int:
    """Cut off what follows the last whole line of a file, and lines that are no multiple of `at_a_time`;
    returns how many lines are left.
    """
    n_lines = end = n_bytes = 0
    with open(path, "rb+") as file:
        for line in file:
            n_bytes += len(line)
            n_lines += line.endswith(b"\n")
            if line.endswith(b"\n") and n_lines % at_a_time == 0:
                end = n_bytes
        file.truncate(end)
    return n_lines - n_lines % at_a_time
