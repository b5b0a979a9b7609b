"""Any number of sentences on a GPU, one batch after another, by recorded steps.

Batches are large, because each takes some recordings and the host's time; a model's size decides how
large. One that does not fit into memory is halved, and so are those of later searches, unless the
config sets their size. Steps recorded for one batch are reused by later ones.
"""

from collections.abc import Iterator, Sequence

import torch

from nmt.config import DecodingConfig
from nmt.engines.cuda.graph_search import RECORDED_RULES, GraphSearch
from nmt.engines.known_values import find_unknown_value
from nmt.model.transformer import Transformer
from nmt.translate.batching import Requests, SearchedBatch, halve_until_it_fits
from nmt.translate.engine import SearchEngine
from nmt.translate.search_rules import SearchRules, make_rules
from nmt.translate.search_state import Decodable

MOST_TOKENS = 131_072  # of a batch: a test set in two, of which more would not be faster
# Numbers in the keys of a batch's sources: 65,536 pieces of base. With values and those of hypotheses
# they take about 11 GB in bf16.
SOURCE_KEYS = 201_326_592


class RecordedEngine(SearchEngine):
    """Keep it as long as there are sentences and the weights of the model keep their addresses."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        # By the models alone, whatever memory is free, so that results repeat on any GPU.
        piece = sum(model.config.decoder_depth * model.config.d_model for model in models)
        self.batch_tokens = min(MOST_TOKENS, SOURCE_KEYS // piece)
        self.graph_search: GraphSearch | None = None

    def search_batches(
        self,
        model: Decodable,
        requests: Requests,
        config: DecodingConfig,
        device: torch.device,
        n_best: int = 1,
    ) -> Iterator[SearchedBatch]:
        rules = make_rules(config, n_best)
        if find_unknown_value(rules, RECORDED_RULES) is not None:
            yield from super().search_batches(model, requests, config, device, n_best)
            return

        def search_one(batch: list[int]) -> SearchedBatch:
            own = requests.choose(batch)
            graph_search = self.record_with(model, rules, device)
            return batch, graph_search.search(own.pack(device), own.prefixes)

        batches = self.split_into_batches(requests, config, rules)
        yield from halve_until_it_fits(batches, search_one, self.make_room)

    def make_room(self) -> None:
        """After a batch that was too large: free everything, and halve those of later searches."""
        self.graph_search = None
        torch.cuda.empty_cache()
        self.batch_tokens = max(1, self.batch_tokens // 2)

    def record_with(
        self, model: Decodable, rules: SearchRules, device: torch.device
    ) -> GraphSearch:
        """Return the search by these rules, with what it recorded for earlier batches."""
        kept = self.graph_search
        if kept is None or kept.model is not model or kept.rules != rules:
            kept = self.graph_search = GraphSearch(model, rules, device)
        return kept
