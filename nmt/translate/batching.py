"""Ids to ids for any number of sentences: sorted by length, split into batches, several of them
searched at a time on CPU.

On a GPU batches are searched one after another by recorded steps, each batch as large as memory
allows.

On CPU a batch is searched by one thread, or by few where there are more cores than batches: what a
step does between its matrix products would leave the other cores idle, and they would wait for each
other at each product. Threads share the model; torch and compiled
loops release the GIL while they compute. In fp32 the results do not depend on any of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from nmt.config import DecodingConfig
from nmt.data.batch import Packed, pack
from nmt.translate.beams import Decodable, Hypothesis, count_hypotheses
from nmt.translate.cpu_search import search_on_cpu
from nmt.translate.phrases import LinePhrases

DEFAULT_BATCH_TOKENS = 4_096  # where the config sets none, and memory does not decide
SOURCE_COST = 16  # of a source piece in memory, where a piece of a hypothesis costs 1
EXTRA_PIECES = 50  # that a hypothesis may have beyond its source
# Hypotheses of a batch on a CPU: with more, products are not faster; with fewer, they are slower.
MAX_HYPOTHESES, MIN_HYPOTHESES = 256, 64
BATCHES_PER_THREAD = 4  # so that threads end at about the same time
MAX_THREADS = 8  # more do not help: Python's own share of the work is done by one thread at a time
# The indices of some sentences, and the best hypotheses of each.
SearchedBatch = tuple[list[int], list[list[Hypothesis]]]


def search_batches(
    model: Decodable,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    device: torch.device,
    n_best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    phrases: Sequence[LinePhrases] | None = None,
) -> Iterator[SearchedBatch]:
    """Search `sources`, which end with eos, batch by batch."""
    if device.type == "cuda":
        from nmt.engines.cuda.gpu_search import GpuSearch

        gpu_search = GpuSearch(model, config, device)
        yield from gpu_search.search_batches(sources, n_best, prefixes, phrases)
        return

    def search_batch(batch: list[int]) -> SearchedBatch:
        packed, forced = pack_batch(batch, sources, prefixes, device)
        own = None if phrases is None else [phrases[i] for i in batch]
        return batch, search_on_cpu(model, packed, config, n_best, forced, own)

    n_threads = min(torch.get_num_threads(), MAX_THREADS)
    most = _choose_most_hypotheses(len(sources) * count_hypotheses(config, n_best), n_threads)
    batches = list(split_by_budget(sources, config, n_best, most))
    n_threads = min(len(batches), n_threads)
    if n_threads <= 1:
        yield from map(search_batch, batches)
        return
    with _start_threads(n_threads) as pool:
        yield from _map_in_order(pool, search_batch, batches, 2 * n_threads)


def _choose_most_hypotheses(n_hypotheses: int, n_threads: int) -> int:
    """Choose how many hypotheses a batch may have, so that each thread gets several batches."""
    n_batches = BATCHES_PER_THREAD * n_threads
    share = -(-n_hypotheses // n_batches)
    return min(max(share, MIN_HYPOTHESES), MAX_HYPOTHESES)


def pack_batch(
    batch: list[int],
    sources: Sequence[Sequence[int]],
    prefixes: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> tuple[Packed, list[Sequence[int]] | None]:
    """Return the sources of a batch, and its prefixes if there are any."""
    packed = pack([sources[i] for i in batch]).to(device)
    if prefixes is None:
        return packed, None
    return packed, [prefixes[i] for i in batch]


def split_by_budget(
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    n_best: int = 1,
    max_hypotheses: int | None = None,
) -> Iterator[list[int]]:
    """Indices of the sentences of each batch, long ones first.

    A batch has at most `batch_tokens` padded source tokens, and at most SOURCE_COST times as many
    pieces in all its hypotheses: with a wide beam those fill the memory first.
    """
    batch: list[int] = []
    budget = config.batch_tokens or DEFAULT_BATCH_TOKENS
    beam = n_best if config.sample else config.beam
    for i in order_by_length(sources):
        longest = len(sources[batch[0]]) if batch else 0
        hypotheses_cost = beam * (longest + EXTRA_PIECES) / SOURCE_COST
        n = len(batch) + 1
        is_over_budget = n * max(longest, hypotheses_cost) > budget
        if max_hypotheses is not None and n * beam > max_hypotheses:
            is_over_budget = True
        if batch and is_over_budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def order_by_length(sources: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the sentences, the longest first, so that the largest batch comes
    first.
    """
    return sorted(range(len(sources)), key=lambda i: -len(sources[i]))


@contextmanager
def _start_threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """Start `n` threads; meanwhile they share torch's own threads among themselves."""
    all_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, all_threads // n))
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(all_threads)


def _map_in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[list[int]], SearchedBatch],
    tasks: Iterable[list[int]],
    n_ahead: int,
) -> Iterator[SearchedBatch]:
    """Yield `work(task)` for each task in order; at most `n_ahead` tasks are in flight, to bound
    memory.
    """
    in_flight: deque[Future[SearchedBatch]] = deque()
    for task in tasks:
        in_flight.append(pool.submit(work, task))
        if len(in_flight) == n_ahead:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()
