"""What searches sentences: torch, or an engine of nmt/engines/ that finds the same faster.

An engine is chosen once, when a Translator is made, from the model, the settings and the processor
alone: never by a clock, by what was translated before, or by what is cached. Without nmt/engines/
torch searches everything, as `SearchEngine` does.
"""

from collections.abc import Iterator, Sequence

import torch

from nmt.config import DecodingConfig
from nmt.model.backend import PLAIN, Backend
from nmt.model.transformer import Transformer
from nmt.system.engines import find_engines
from nmt.translate.batching import (
    DEFAULT_BATCH_TOKENS,
    Requests,
    SearchedBatch,
    halve_until_it_fits,
    search_with_threads,
    split_by_budget,
)
from nmt.translate.search import search
from nmt.translate.search_rules import SearchRules, make_rules
from nmt.translate.search_state import BestHypotheses, Decodable


class SearchEngine:
    """torch, with nothing compiled or repacked. Engines override what they do better."""

    backend: Backend = PLAIN
    batch_tokens = DEFAULT_BATCH_TOKENS  # source pieces of a batch, unless the config sets them

    def prepare(self, model: Transformer, is_bf16: bool) -> Transformer:
        """Lay out the weights of a model as this engine reads them, in place."""
        return model.bfloat16() if is_bf16 else model

    def count_most_hypotheses(self, n_hypotheses: int) -> int | None:
        """Return how many of all hypotheses a batch may have; None if its tokens alone bound it."""
        return None

    def search_batch(
        self, model: Decodable, requests: Requests, rules: SearchRules, device: torch.device
    ) -> BestHypotheses:
        return search(model, requests.pack(device), rules, requests.prefixes)

    def search_batches(
        self,
        model: Decodable,
        requests: Requests,
        config: DecodingConfig,
        device: torch.device,
        n_best: int = 1,
    ) -> Iterator[SearchedBatch]:
        """Search any number of sentences, batch by batch. A batch that a GPU has no room for is halved."""
        rules = make_rules(config, n_best)

        def search_one(batch: list[int]) -> SearchedBatch:
            return batch, self.search_batch(model, requests.choose(batch), rules, device)

        batches = self.split_into_batches(requests, config, rules)
        if device.type == "cpu":
            yield from search_with_threads(search_one, list(batches))
        else:
            yield from halve_until_it_fits(batches, search_one, self.make_room)

    def make_room(self) -> None:
        """After a batch that was too large: give back memory, and halve the batches of later searches."""
        torch.cuda.empty_cache()
        self.batch_tokens = max(1, self.batch_tokens // 2)

    def split_into_batches(
        self, requests: Requests, config: DecodingConfig, rules: SearchRules
    ) -> Iterator[list[int]]:
        most = self.count_most_hypotheses(len(requests.sources) * rules.beam)
        n_tokens = config.batch_tokens or self.batch_tokens
        return split_by_budget(requests.sources, rules.beam, n_tokens, most)


def choose_engine(
    models: Sequence[Transformer], config: DecodingConfig, device: torch.device
) -> SearchEngine:
    """Choose what searches with a model, or with several that translate together."""
    engines = find_engines()
    return SearchEngine() if engines is None else engines.choose_for_search(models, config, device)
