"""Translates the lines of all clients together: a bounded queue, and threads that take lines from it.

Batches are never delayed to fill up: a free thread takes what waits, at most a batch. Lines with equal
options share one; their translations are those of a line alone (docs/decoding.md). A line that is
refused, or whose translation fails, does not affect the rest of its batch.
"""

import asyncio
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nmt.extras.export.ctranslate2 import CTranslate2Translator
from nmt.extras.serve.models import ServedModel
from nmt.system.errors import ForeseenError
from nmt.translate.batching import MAX_THREADS
from nmt.translate.translator import Candidates, Translator

MOST_LINES = 64  # of a batch: more are hardly any faster, and make others wait
# Of usual text; a batch that is larger after all is split by the search.
PIECES_PER_LINE, CHARACTERS_PER_PIECE = 4, 4

LineAnswer = Candidates | Exception  # why there are none


@dataclass(frozen=True)
class LineOptions:
    """The options of a line; all lines of a batch share them."""

    model: ServedModel
    n_best: int


class WaitingLine:
    """A line in the queue, with text; its answer, or why there is none, appears in `answered`."""

    def __init__(self, options: LineOptions, text: str) -> None:
        self.options, self.text = options, text
        self.answered: asyncio.Future[LineAnswer] = asyncio.get_running_loop().create_future()


class QueueFull(Exception):
    """The queue has as many lines as it may hold."""


class Batcher:
    """Translates the lines that are put into its queue. Call its methods from one event loop."""

    def __init__(self, max_waiting: int, n_threads: int) -> None:
        self.max_waiting = max_waiting
        self.n_cores_each = max(1, torch.get_num_threads() // n_threads)
        self._waiting: list[WaitingLine] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"search-{i}", daemon=True)
            for i in range(n_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads once the queue is empty."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def translate(self, options: LineOptions, texts: Sequence[str]) -> list[LineAnswer]:
        """Return the answers of these lines, or raise QueueFull and translate none."""
        lines = [WaitingLine(options, text) for text in texts]
        with self._changed:
            if len(self._waiting) + len(lines) > self.max_waiting:
                raise QueueFull
            self._waiting += lines
            self._changed.notify(len(lines))
        try:
            return await asyncio.gather(*(line.answered for line in lines))
        finally:  # a caller that gave up waiting has cancelled its lines
            with self._changed:
                self._waiting = [line for line in self._waiting if not line.answered.done()]

    def _work(self) -> None:
        # The threads share the cores, as those of nmt-translate do (nmt/translate/batching.py).
        torch.set_num_threads(self.n_cores_each)
        while batch := self._take_batch():
            answers = answer_batch(batch[0].options, [line.text for line in batch])
            try:
                batch[0].answered.get_loop().call_soon_threadsafe(_resolve, batch, answers)
            except RuntimeError:  # the server has ended
                return

    def _take_batch(self) -> list[WaitingLine]:
        """Wait for lines and take those that go with the first; none when the work is over."""
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return []
                self._changed.wait()
            options = self._waiting[0].options
            most_characters = find_budget(options)
            batch: list[WaitingLine] = []
            left: list[WaitingLine] = []
            longest = 0
            for line in self._waiting:
                widest = max(longest, len(line.text))
                is_full = len(batch) == MOST_LINES or (len(batch) + 1) * widest > most_characters
                if line.options != options or (batch and is_full):
                    left.append(line)
                else:
                    batch.append(line)
                    longest = widest
            self._waiting = left
        return batch


def count_search_threads(models: Sequence[ServedModel]) -> int:
    """How many batches to search at a time: one on a GPU, else one for each core."""
    counts = []
    for model in models:
        translator = model.translator
        if isinstance(translator, CTranslate2Translator):
            counts.append(translator.exported.translator.num_translators)
        elif isinstance(translator, Translator) and translator.device.type == "cpu":
            counts.append(torch.get_num_threads())
        else:
            counts.append(1)
    return max(1, min(*counts, MAX_THREADS))


def find_budget(options: LineOptions) -> int:
    """Return how many characters a batch may have, padded: what fills a batch of the search, or on a
    GPU several, which its memory divides.
    """
    return options.model.translator.chunk_lines * PIECES_PER_LINE * CHARACTERS_PER_PIECE


def search_lines(options: LineOptions, texts: Sequence[str]) -> list[Candidates]:
    return options.model.translator.find_candidates(texts, options.n_best)


def answer_batch(options: LineOptions, texts: Sequence[str]) -> list[LineAnswer]:
    """Translate lines of equal options; an error in one of them becomes its answer."""
    try:
        return [*search_lines(options, texts)]
    except Exception as error:
        if len(texts) > 1:
            return [answer for text in texts for answer in answer_batch(options, [text])]
        if not isinstance(error, ForeseenError):  # a bug, which the operator sees
            traceback.print_exc()
        return [error]


def _resolve(lines: Sequence[WaitingLine], answers: Sequence[LineAnswer]) -> None:
    for line, answer in zip(lines, answers, strict=True):
        if not line.answered.done():  # otherwise its client gave up
            line.answered.set_result(answer)
