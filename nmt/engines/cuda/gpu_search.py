"""Any number of sentences on a GPU, one batch after another, each as large as memory allows.

A batch that does not fit after all is halved, and so are those after it.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from nmt.config import DecodingConfig
from nmt.engines.cuda.graph_search import GraphSearch, measure_free_bytes
from nmt.system.memory import is_out_of_memory
from nmt.translate.batching import SearchedBatch, order_by_length, pack_batch, split_by_budget
from nmt.translate.beams import Decodable
from nmt.translate.phrases import LinePhrases
from nmt.translate.search import search


class GpuSearch:
    """Searches any number of sentences on a GPU.

    What is recorded for one batch serves later ones, so keep it as long as there are sentences and
    the weights of the model keep their addresses.
    """

    def __init__(
        self,
        model: Decodable,
        config: DecodingConfig,
        device: torch.device,
        n_bytes: int | None = None,
    ) -> None:
        self.model, self.config, self.device = model, config, device
        self.graph_search = GraphSearch(model, config, device)
        self.n_bytes = measure_free_bytes(device) if n_bytes is None else n_bytes

    def search_batches(
        self,
        sources: Sequence[Sequence[int]],
        n_best: int = 1,
        prefixes: Sequence[Sequence[int]] | None = None,
        phrases: Sequence[LinePhrases] | None = None,
    ) -> Iterator[SearchedBatch]:
        """Search `sources`, which end with eos, batch by batch. With phrases, steps are not recorded."""
        if phrases is not None:
            for batch in split_by_budget(sources, self.config, n_best):
                packed, forced = pack_batch(batch, sources, prefixes, self.device)
                own = [phrases[i] for i in batch]
                yield batch, search(self.model, packed, self.config, n_best, forced, own)
            return
        batches = deque(self.split_by_memory(sources, n_best, prefixes))
        while batches:
            batch = batches.popleft()
            packed, forced = pack_batch(batch, sources, prefixes, self.device)
            try:
                found = self.graph_search.search(packed, n_best, forced)
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                found = None
            if found is not None:
                yield batch, found
                continue

            # too large after all: free everything, and halve this batch and those of later searches
            self.graph_search = GraphSearch(self.model, self.config, self.device)
            torch.cuda.empty_cache()
            self.n_bytes //= 2
            middle = len(batch) // 2
            batches.extendleft((batch[middle:], batch[:middle]))

    def split_by_memory(
        self,
        sources: Sequence[Sequence[int]],
        n_best: int = 1,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[list[int]]:
        """Indices of the sentences of each batch, long ones first; batches fill the memory, or the
        config's budget.
        """
        if self.config.batch_tokens is not None:
            yield from split_by_budget(sources, self.config, n_best)
            return
        longest_prefix = max(map(len, prefixes), default=0) if prefixes else 0
        order = order_by_length(sources)
        while order:
            longest = len(sources[order[0]])
            n = self.graph_search.count_fitting_sentences(
                longest, longest_prefix, n_best, self.n_bytes
            )
            yield order[:n]
            order = order[n:]
