"""Any number of sentences on a GPU, one batch after another, by recorded steps.

Unless the config says otherwise, a batch fills the memory. One that does not fit after all is halved,
and so are those after it. What is recorded for one batch serves later ones.
"""

from collections import deque
from collections.abc import Iterator

import torch

from nmt.config import DecodingConfig
from nmt.engines.cuda.graph_search import RECORDED_RULES, GraphSearch, measure_free_bytes
from nmt.engines.known_values import find_unknown_value
from nmt.system.memory import is_out_of_memory
from nmt.translate.batching import Requests, SearchedBatch, order_by_length, split_by_budget
from nmt.translate.beams import Decodable
from nmt.translate.engine import SearchEngine
from nmt.translate.search_rules import SearchRules, make_rules


class RecordedEngine(SearchEngine):
    """Keep it as long as there are sentences and the weights of the model keep their addresses."""

    def __init__(self, n_bytes: int | None = None) -> None:
        self.n_bytes = n_bytes  # of memory for sentences; None: to be measured
        self.graph_search: GraphSearch | None = None

    @property
    def fills_memory(self) -> bool:
        return True

    def search_batches(
        self,
        model: Decodable,
        requests: Requests,
        config: DecodingConfig,
        device: torch.device,
        n_best: int = 1,
    ) -> Iterator[SearchedBatch]:
        rules = make_rules(config, n_best)
        if requests.phrases is not None or find_unknown_value(rules, RECORDED_RULES) is not None:
            yield from super().search_batches(model, requests, config, device, n_best)
            return
        if self.n_bytes is None:
            self.n_bytes = measure_free_bytes(device)
        batches = deque(self.split_by_memory(model, requests, config, rules, device))
        while batches:
            batch = batches.popleft()
            own = requests.choose(batch)
            graph_search = self.record_with(model, rules, device)
            try:
                found = graph_search.search(own.pack(device), own.prefixes)
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                found = None
            if found is not None:
                yield batch, found
                continue

            # too large after all: free everything, and halve this batch and those of later searches
            self.graph_search = None
            del graph_search
            torch.cuda.empty_cache()
            self.n_bytes //= 2
            middle = len(batch) // 2
            batches.extendleft((batch[middle:], batch[:middle]))

    def record_with(
        self, model: Decodable, rules: SearchRules, device: torch.device
    ) -> GraphSearch:
        """Return the search by these rules, with what it recorded for earlier batches."""
        kept = self.graph_search
        if kept is None or kept.model is not model or kept.rules != rules:
            kept = self.graph_search = GraphSearch(model, rules, device)
        return kept

    def split_by_memory(
        self,
        model: Decodable,
        requests: Requests,
        config: DecodingConfig,
        rules: SearchRules,
        device: torch.device,
    ) -> Iterator[list[int]]:
        """Indices of the sentences of each batch, long ones first; batches fill the memory, or the
        config's budget.
        """
        sources = requests.sources
        if config.batch_tokens is not None:
            yield from split_by_budget(sources, config, rules.n_best)
            return
        longest_prefix = max(map(len, requests.prefixes or ()), default=0)
        order = order_by_length(sources)
        while order:
            assert self.n_bytes is not None
            graph_search = self.record_with(model, rules, device)
            n = graph_search.count_fitting_sentences(
                len(sources[order[0]]), longest_prefix, self.n_bytes
            )
            yield order[:n]
            order = order[n:]
