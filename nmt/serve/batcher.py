"""Lines of all clients, translated together: a bounded queue, and threads that take from it what waits.

Batches are never delayed to fill up: a free thread takes what waits, at most a batch and, beside
other threads, at most its share, so that one does not take all and leave the others idle. Lines with
equal options share a batch; their translations are those of a line alone (docs/decoding.md). A line
that is refused, or whose translation fails, does not affect the rest of its batch. Lines whose client
has left are dropped.
"""

import asyncio
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import torch

from nmt.export.ctranslate2 import CTranslate2Translator
from nmt.serve.answers import LineOptions, answer_lines_alike
from nmt.serve.messages import LineCandidate
from nmt.serve.models import ServedModels
from nmt.system.errors import Failure, UserError
from nmt.translate.batching import MAX_THREADS
from nmt.translate.translator import LineTooLong, Translator

SMALLEST_SHARE = 4  # lines: together they take little longer than one
# Of usual text; a batch that is larger after all is split by the search.
PIECES_PER_LINE, CHARACTERS_PER_PIECE = 4, 4


LineAnswer = list[LineCandidate] | Exception  # why there are none


class WaitingLine:
    """A line in the queue, with text; its answer, or why there is none, appears in `answered`."""

    def __init__(self, options: LineOptions, text: str, prefix: str = "") -> None:
        self.options, self.text, self.prefix = options, text, prefix
        self.answered: asyncio.Future[LineAnswer] = asyncio.get_running_loop().create_future()


class QueueFull(Exception):
    """As many lines wait as may."""


class Batcher:
    """Translates the lines that are put into its queue. Call its methods from one event loop."""

    def __init__(
        self,
        max_waiting: int,
        n_threads: int,
        observe_batch: Callable[[int], None],
    ) -> None:
        self.max_waiting, self.n_threads = max_waiting, n_threads
        self.observe_batch = observe_batch
        self.n_cores_each = max(1, torch.get_num_threads() // n_threads)
        self._waiting: deque[WaitingLine] = deque()
        self._n_translating = 0  # lines
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
        """End the threads once nothing waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_working(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def put(self, lines: Sequence[WaitingLine]) -> None:
        """Queue all of these lines that are not answered, or raise QueueFull and queue none."""
        unanswered = [line for line in lines if not line.answered.done()]
        with self._changed:
            if len(self._waiting) + len(unanswered) > self.max_waiting:
                raise QueueFull
            self._waiting.extend(unanswered)
            self._changed.notify(len(unanswered))

    def drop(self, lines: Sequence[WaitingLine]) -> None:
        """Forget lines that are no longer wanted; a batch that has begun is completed."""
        abandoned = {line for line in lines if not line.answered.done()}
        if not abandoned:
            return
        with self._changed:
            kept = [line for line in self._waiting if line not in abandoned]
            self._waiting.clear()
            self._waiting.extend(kept)
        for line in abandoned:
            line.answered.cancel()

    def _work(self) -> None:
        # The threads share the cores, as those of nmt-translate do (nmt/translate/batching.py).
        torch.set_num_threads(self.n_cores_each)
        while batch := self._take_batch():
            answers = answer_batch(batch)
            with self._changed:
                self._n_translating -= len(batch)
            loop = batch[0].answered.get_loop()
            try:
                loop.call_soon_threadsafe(_resolve, batch, answers)
            except RuntimeError:  # the server has ended
                return

    def _take_batch(self) -> list[WaitingLine]:
        """Wait for lines and take those that go with the first; none when the work is over."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return []
            options = self._waiting[0].options
            n_characters = find_budget(options)
            share = math.ceil((len(self._waiting) + self._n_translating) / self.n_threads)
            n_lines = max(SMALLEST_SHARE, share)
            batch: list[WaitingLine] = []
            others: list[WaitingLine] = []
            longest = 0
            while self._waiting:
                line = self._waiting.popleft()
                is_too_much = len(batch) == n_lines or (
                    (len(batch) + 1) * max(longest, len(line.text)) > n_characters
                )
                if line.options != options or (batch and is_too_much):
                    others.append(line)
                    continue
                longest = max(longest, len(line.text))
                batch.append(line)
            self._waiting.extend(others)
            self._n_translating += len(batch)
        self.observe_batch(len(batch))
        return batch


def count_search_threads(models: ServedModels) -> int:
    """How many batches to search at a time: one on a GPU, else one for each core."""
    counts = []
    for model in models.by_name.values():
        translator = model.loaded.translator
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
    translator = options.model.find_translator(options.search)
    return translator.chunk_lines * PIECES_PER_LINE * CHARACTERS_PER_PIECE


def answer_batch(lines: Sequence[WaitingLine]) -> list[LineAnswer]:
    """Translate lines of equal options; what goes wrong with one of them is its answer."""
    try:
        texts = [line.text for line in lines]
        prefixes = [line.prefix for line in lines]
        return [*answer_lines_alike(lines[0].options, texts, prefixes)]
    except LineTooLong as error:
        problem: Exception = error
        if len(lines) > 1:
            i = error.index
            others = answer_batch([*lines[:i], *lines[i + 1 :]])
            return [*others[:i], error, *others[i:]]
    except (UserError, Failure) as error:
        problem = error
    except Exception as error:  # a bug: the operator sees it, and this thread goes on
        traceback.print_exc()
        problem = error
    if len(lines) == 1:
        return [problem]
    answers = []
    for line in lines:
        answers += answer_batch([line])
    return answers


def _resolve(lines: Sequence[WaitingLine], answers: Sequence[LineAnswer]) -> None:
    for line, answer in zip(lines, answers, strict=True):
        if not line.answered.done():  # else it was dropped
            line.answered.set_result(answer)
