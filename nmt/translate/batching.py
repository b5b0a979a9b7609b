"""Ids to ids for any number of sentences: sorted by length, cut into batches, searched several at a time on CPU.

On a GPU batches are searched one after another by recorded steps, each as large as memory allows.

On CPU a batch is searched by one thread, or by few where there are more cores than batches: what a step does between
its products would leave the other cores idle, and they would wait for each other at each product. Threads share the
model; torch leaves Python's lock while it works. What comes out does not depend on any of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from nmt.config import DecodingConfig
from nmt.data.batch import pack
from nmt.system.device import is_out_of_memory
from nmt.translate.graph_search import GraphSearch, free_bytes
from nmt.translate.search import Hypothesis, Speaker, search

BATCH_TOKENS = 4_096  # where nothing else is asked for, and memory does not decide
SAID, MORE = 16, 50  # a hypothesis is taken to say so many pieces more than its source has
MOST = 8  # batches at a time: Python's own share of the work is done by one at a time
Found = tuple[list[int], list[list[Hypothesis]]]  # which sentences, and of each its best


class GpuSearch:
    """Searches any number of sentences on a GPU. What is recorded for one batch serves later ones, so keep it as long
    as there are sentences and the weights of the model stay as they are."""

    def __init__(
        self,
        model: Speaker,
        config: DecodingConfig,
        device: torch.device,
        n_bytes: int | None = None,
    ) -> None:
        self.model, self.config, self.device = model, config, device
        self.graph_search = GraphSearch(model, config, device)
        self.n_bytes = free_bytes(device) if n_bytes is None else n_bytes

    def searching(
        self,
        sources: Sequence[Sequence[int]],
        n_best: int = 1,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Found]:
        """What the function `searching` yields."""
        batches = deque(self.cut(sources, n_best, prefixes))
        while batches:
            batch = batches.popleft()
            forced = None if prefixes is None else [prefixes[i] for i in batch]
            try:
                found = self.graph_search.search(
                    pack([sources[i] for i in batch]).to(self.device), n_best, forced
                )
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                found = None
            if found is not None:
                yield batch, found
                continue

            # too large after all: give back what was taken, and halve this batch and those of later searches
            self.graph_search = GraphSearch(self.model, self.config, self.device)
            torch.cuda.empty_cache()
            self.n_bytes //= 2
            middle = len(batch) // 2
            batches.extendleft((batch[middle:], batch[:middle]))

    def cut(
        self,
        sources: Sequence[Sequence[int]],
        n_best: int = 1,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[list[int]]:
        """Indices of the sentences, long ones first."""
        if self.config.batch_tokens is not None:
            yield from cut(sources, self.config, n_best)
            return
        longest_prefix = max(map(len, prefixes), default=0) if prefixes else 0
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        while order:
            longest = len(sources[order[0]])
            n = self.graph_search.count_fitting(longest, longest_prefix, n_best, self.n_bytes)
            yield order[:n]
            order = order[n:]


def searching(
    model: Speaker,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    device: torch.device,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Iterator[Found]:
    """Batch by batch, the sentences found and what was found. Sources end with eos."""
    if device.type == "cuda":
        yield from GpuSearch(model, config, device).searching(sources, n_best, prefixes)
        return

    def one(batch: list[int]) -> Found:
        forced = None if prefixes is None else [prefixes[i] for i in batch]
        return batch, search(
            model, pack([sources[i] for i in batch]).to(device), config, n_best, forced
        )

    batches = list(cut(sources, config, n_best))
    n = min(len(batches), torch.get_num_threads(), MOST)
    if n <= 1:
        yield from map(one, batches)
        return
    with _threads(n) as pool:
        yield from _in_turn(pool, one, batches, 2 * n)


def cut(
    sources: Sequence[Sequence[int]], config: DecodingConfig, n_best: int = 1
) -> Iterator[list[int]]:
    """Indices of the sentences, long ones first: at most `batch_tokens` padded tokens together, and `SAID` times as
    many in what all their hypotheses say, for that fills the memory."""
    batch: list[int] = []
    most = config.batch_tokens or BATCH_TOKENS
    beam = n_best if config.sample else config.beam
    for i in sorted(range(len(sources)), key=lambda i: -len(sources[i])):
        longest = len(sources[batch[0]]) if batch else 0
        if (len(batch) + 1) * max(longest, beam * (longest + MORE) / SAID) > most and batch:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@contextmanager
def _threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """`n` threads, among which torch's are shared out meanwhile."""
    all_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, all_threads // n))
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(all_threads)


def _in_turn(
    pool: ThreadPoolExecutor,
    work: Callable[[list[int]], Found],
    tasks: Iterable[list[int]],
    ahead: int,
) -> Iterator[Found]:
    """`map(work, tasks)`, of which so many are under way."""
    flying: deque[Future[Found]] = deque()
    for task in tasks:
        flying.append(pool.submit(work, task))
        if len(flying) == ahead:
            yield flying.popleft().result()
    while flying:
        yield flying.popleft().result()
