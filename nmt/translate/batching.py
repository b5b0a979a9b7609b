"""Splits any number of sentences into batches, and searches several of them at a time on a CPU.

One thread searches a batch, or a few do where there are more cores than batches: what a step does
between its matrix products would leave the other cores idle, and they would wait for each other at
each product. Threads share the model; torch and compiled loops release the GIL while they compute.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from nmt.data.batch import Packed, Sentences, pack
from nmt.data.vocab import BOS, EOS
from nmt.system.memory import is_out_of_memory
from nmt.translate.search_state import BestHypotheses

DEFAULT_BATCH_TOKENS = 4_096  # on a CPU, where the config sets none
SOURCE_COST = 16  # of a source piece in memory, where a piece of a hypothesis costs 1
EXTRA_PIECES = 50  # that a hypothesis may have beyond its source
MAX_THREADS = 8  # more do not help: Python's own share of the work is done by one thread at a time
Yielded = TypeVar("Yielded")
# The indices of some sentences, and the best hypotheses of each.
SearchedBatch = tuple[list[int], BestHypotheses]


@dataclass(frozen=True)
class Requests:
    """Sentences to search, and what each translation must begin with. Sentences that torch searches
    end with eos.
    """

    sources: Sentences
    prefixes: Sentences = ()  # none, or one for each

    def choose(self, numbers: Sequence[int]) -> "Requests":
        """Return those at some places, in that order."""
        prefixes = [self.prefixes[i] for i in numbers] if self.prefixes else ()
        return Requests([self.sources[i] for i in numbers], prefixes)

    def pack(self, device: torch.device) -> Packed:
        return pack(self.sources).to(device)


def pack_pairs(
    sources: Sentences, targets: Sentences, device: torch.device
) -> tuple[Packed, Packed]:
    """Pack pairs without marks as a model reads them: each target position predicts the next piece."""
    src = pack([[*ids, EOS] for ids in sources])
    tgt = pack([[BOS, *ids] for ids in targets])
    return src.to(device), tgt.to(device)


def split_by_budget(
    sources: Sentences, beam: int, budget: int, max_hypotheses: int | None = None
) -> Iterator[list[int]]:
    """Indices of the sentences of each batch, long ones first.

    A batch has at most `budget` padded source tokens, and at most SOURCE_COST times as many
    pieces in all its hypotheses: with a wide beam those fill the memory first.
    """
    longest_first = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    first = 0
    while first < len(sources):
        longest = len(sources[longest_first[first]])
        cost_of_hypotheses = beam * (longest + EXTRA_PIECES) / SOURCE_COST
        n = int(budget // max(longest, cost_of_hypotheses))
        if max_hypotheses is not None:
            n = min(n, max_hypotheses // beam)
        n = max(n, 1)  # a sentence beyond the budget is searched alone
        yield longest_first[first : first + n]
        first += n


def halve_until_it_fits(
    batches: Iterable[list[int]],
    run: Callable[[list[int]], Yielded],
    make_room: Callable[[], None],
) -> Iterator[Yielded]:
    """Run batch after batch. One that does not fit into memory is halved, after `make_room`; what it
    would have given then comes in two parts.
    """
    waiting = deque(batches)
    while waiting:
        batch = waiting.popleft()
        try:
            result = run(batch)
        except RuntimeError as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
        else:
            yield result
            continue
        # Only here is the error gone, which kept what the batch had allocated.
        make_room()
        middle = len(batch) // 2
        waiting.extendleft((batch[middle:], batch[:middle]))


def search_with_threads(
    search_batch: Callable[[list[int]], SearchedBatch], batches: Sequence[list[int]]
) -> Iterator[SearchedBatch]:
    """Yield what each batch finds, in order. Threads share torch's own threads among themselves."""
    n_threads = min(len(batches), count_threads())
    if n_threads <= 1:
        yield from map(search_batch, batches)
        return
    all_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, all_threads // n_threads))
    pool = ThreadPoolExecutor(n_threads)
    try:
        yield from pool.map(search_batch, batches)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(all_threads)


def count_threads() -> int:
    return min(torch.get_num_threads(), MAX_THREADS)
