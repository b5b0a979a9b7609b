"""Translates the lines of all clients together: a bounded queue, and threads that take lines from it.

Clients take turns, and so do the requests of each: a line waits for about one line of every other
request, however many lines that has. A batch that has begun is not interrupted; so while short requests
arrive, long ones leave one thread free, and use small batches with a pause after each.

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
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from nmt.export.ctranslate2 import CTranslate2Translator
from nmt.serve.answers import LineOptions, answer_lines_alike
from nmt.serve.messages import LineCandidate
from nmt.serve.models import ServedModels
from nmt.system.errors import Failure, UserError
from nmt.system.progress import clock
from nmt.translate.batching import MAX_THREADS
from nmt.translate.translator import LineTooLong, Translator

SMALLEST_SHARE = 4  # lines: together they take little longer than one
MOST_LONG = 64  # lines of long requests in a batch: on a CPU, more are hardly any faster
MOST_BESIDE_SHORT = 16  # the same while short requests come
SHORT_S = 5.0  # after a short request, in which another one is expected
# Of usual text; a batch that is larger after all is split by the search.
PIECES_PER_LINE, CHARACTERS_PER_PIECE = 4, 4


LineAnswer = list[LineCandidate] | Exception  # why there are none


@dataclass(eq=False)
class Asker:
    """A request of a client."""

    client: str  # a key or an address
    is_long: bool = False  # has more than SMALLEST_SHARE lines, or texts
    turn: int = 0  # of its last line


class WaitingLine:
    """A line in the queue, with text; its answer, or why there is none, appears in `answered`."""

    def __init__(self, asker: Asker, options: LineOptions, text: str, prefix: str = "") -> None:
        self.asker, self.options, self.text, self.prefix = asker, options, text, prefix
        self.turn = 0
        self.answered: asyncio.Future[LineAnswer] = asyncio.get_running_loop().create_future()


class QueueFull(Exception):
    """The queue has as many lines as it may hold."""


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
        self._waiting: list[WaitingLine] = []  # by their turns
        self._turn = 0  # of the first line of the last batch
        self._short_until = 0.0
        self._n_translating = 0  # lines
        # Until when threads are taken by long requests: by a batch, and by the pause after it.
        self._long_until: dict[threading.Thread, float] = {}
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
    def is_working(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def has_room(self, client: str, n: int = 1) -> bool:
        """Whether `n` more lines of a client fit; once the queue is full, only up to its equal share."""
        if len(self._waiting) + n <= self.max_waiting:
            return True
        n_lines = Counter(line.asker.client for line in self._waiting)
        n_clients = len(n_lines.keys() | {client})
        return n_clients > 1 and n_lines[client] + n <= self.max_waiting // n_clients

    def put(self, lines: Sequence[WaitingLine]) -> None:
        """Queue all of these lines of a request that are not answered, or raise QueueFull and queue none."""
        unanswered = [line for line in lines if not line.answered.done()]
        if not unanswered:
            return
        asker = unanswered[0].asker
        with self._changed:
            if not self.has_room(asker.client, len(unanswered)):
                raise QueueFull
            if not asker.is_long:
                self._short_until = clock() + SHORT_S
            # The requests of a client share its turns.
            waiting = {line.asker for line in self._waiting if line.asker.client == asker.client}
            n_requests = len(waiting | {asker})
            asker.turn = max(asker.turn, self._turn)
            for line in unanswered:
                asker.turn += n_requests
                line.turn = asker.turn
                insort(self._waiting, line, key=lambda other: other.turn)
            self._changed.notify(len(unanswered))

    def _remove(self, lines: Collection[WaitingLine]) -> None:
        left = set(lines)
        self._waiting = [line for line in self._waiting if line not in left]

    def drop(self, lines: Sequence[WaitingLine]) -> None:
        """Forget lines that are no longer wanted; a batch that has begun is completed."""
        abandoned = {line for line in lines if not line.answered.done()}
        if not abandoned:
            return
        with self._changed:
            self._remove(abandoned)
        for line in abandoned:
            line.answered.cancel()

    def _work(self) -> None:
        # The threads share the cores, as those of nmt-translate do (nmt/translate/batching.py).
        torch.set_num_threads(self.n_cores_each)
        while batch := self._take_batch():
            began_at = clock()
            answers = answer_batch(batch)
            with self._changed:
                self._n_translating -= len(batch)
                if batch[0].asker.is_long:  # a pause that is as long as the batch
                    self._long_until[threading.current_thread()] = 2 * clock() - began_at
            loop = batch[0].answered.get_loop()
            try:
                loop.call_soon_threadsafe(_resolve, batch, answers)
            except RuntimeError:  # the server has ended
                return

    def _take_batch(self) -> list[WaitingLine]:
        """Wait for lines and take those that go with the first; none when the work is over."""
        with self._changed:
            while not (waiting := self._list_lines_to_take()):
                if self._is_closed:
                    return []
                # lines of long requests may be translated at the first of these times
                now = clock()
                times = [max(now, self._short_until), *self._long_until.values()]
                pause = min(time for time in times if time >= now) - now
                self._changed.wait(pause if self._waiting else None)
            first = waiting[0]
            n_characters = find_budget(first.options)
            share = math.ceil((len(self._waiting) + self._n_translating) / self.n_threads)
            n_lines = max(SMALLEST_SHARE, share)
            if first.asker.is_long and self.n_threads > 1:
                has_short = clock() < self._short_until
                n_lines = min(MOST_BESIDE_SHORT if has_short else MOST_LONG, n_lines)
            batch: list[WaitingLine] = []
            longest = 0
            for line in waiting:
                is_too_much = len(batch) == n_lines or (
                    (len(batch) + 1) * max(longest, len(line.text)) > n_characters
                )
                is_like_first = (
                    line.options == first.options and line.asker.is_long == first.asker.is_long
                )
                if not is_like_first or (batch and is_too_much):
                    continue
                longest = max(longest, len(line.text))
                batch.append(line)
            self._turn = max(self._turn, first.turn)
            self._remove(batch)
            self._n_translating += len(batch)
            if first.asker.is_long:
                self._long_until[threading.current_thread()] = math.inf
        self.observe_batch(len(batch))
        return batch

    def _list_lines_to_take(self) -> list[WaitingLine]:
        """List the lines that wait, by their turns. While short requests come, one thread is theirs."""
        now = clock()
        n_long = sum(until > now for until in self._long_until.values())
        is_theirs = now < self._short_until and n_long >= self.n_threads - 1
        if self.n_threads == 1 or self._is_closed or not is_theirs:
            return self._waiting
        return [line for line in self._waiting if not line.asker.is_long]


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
    """Translate lines of equal options; an error in one of them becomes its answer."""
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
    except Exception as error:  # a bug: the operator sees it, and this thread continues
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
        if not line.answered.done():  # otherwise it was dropped
            line.answered.set_result(answer)
