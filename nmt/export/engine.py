"""An exported model in place of ours: the same text in and out, CTranslate2's search between.

Its search has other rules (`docs/exports.md`), so its scores and its text are labelled with the engine, its version and
the type of its weights wherever they are written, and what it cannot do is refused before it is asked.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nmt.config import RunConfig, load_config, parse_device
from nmt.export.ctranslate2 import CTranslate2, library
from nmt.export.export import load_ctranslate2
from nmt.system.device import choose_device
from nmt.system.errors import UserError
from nmt.system.run_folder import CONFIG_FILE
from nmt.system.strict_yaml import parse_yaml
from nmt.translate.batching import SearchedBatch, split_by_budget
from nmt.translate.translator import LoadedModel, Sentences, TextToText


class EngineTranslator(TextToText):
    def __init__(self, exported: CTranslate2, config: RunConfig, quantization: str) -> None:
        super().__init__(exported.vocab, config.decoding, config.model)
        self.exported, self.quantization = exported, quantization
        self.version: str = library().__version__
        self.engine = f"ctranslate2 {self.version}, {quantization}"

    def search_batches(
        self, sources: Sentences, prefixes: Sentences | None, n_best: int
    ) -> Iterator[SearchedBatch]:
        if n_best > 1 or prefixes is not None or self.config.sample:
            raise UserError(
                "the best few, samples and forced beginnings are not to be had from ctranslate2; "
                "leave --engine out"
            )
        for batch in split_by_budget(sources, self.config):
            yield (
                batch,
                [
                    [one]
                    for one in self.exported.translate([sources[i] for i in batch], self.config)
                ],
            )


def open_ctranslate2(paths: Sequence[str], overrides: Sequence[str]) -> LoadedModel:
    """Load the one export in `paths`, on the device that the overrides ask for."""
    (path,) = paths
    folder = Path(path)
    device = choose_device(parse_device(overrides))
    exported, quantization = load_ctranslate2(folder, torch.get_num_threads(), device.type)
    place = folder / CONFIG_FILE
    if "extends" in parse_yaml(place.read_bytes().decode(errors="replace"), str(place)).values:
        raise UserError(
            f"{place}: extends: the config of an export stands by itself; use another copy"
        )
    config = load_config(str(place), overrides)
    return LoadedModel(EngineTranslator(exported, config, quantization), config, [path])
