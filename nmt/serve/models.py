"""The models of a server: each with a name, its two languages, and a translator for each way to search.

Translators of one model share its weights. Which preset and which beams a client may ask for is
decided here: a wide beam costs time and memory in proportion.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from nmt.config import override_config
from nmt.system.errors import UserError
from nmt.translate.translator import OUR_ENGINE, LoadedModel, TextToText


@dataclass(frozen=True)
class SearchChoice:
    """The search settings that a client may choose; None: as the server was started."""

    preset: str | None = None
    beam: int | None = None


@dataclass(frozen=True, eq=False)
class ServedModel:
    name: str
    loaded: LoadedModel
    _translators: dict[SearchChoice, TextToText] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def src(self) -> str:
        return self.loaded.config.data.src

    @property
    def tgt(self) -> str:
        return self.loaded.config.data.tgt

    @property
    def is_ours(self) -> bool:
        """Whether our own search translates, which can do everything that a client may ask for."""
        return self.loaded.translator.engine == OUR_ENGINE

    def find_translator(self, search: SearchChoice) -> TextToText:
        """Return the translator with this search; each is made once."""
        if search == SearchChoice():
            return self.loaded.translator
        with self._lock:
            if search not in self._translators:
                chosen = {key: value for key, value in vars(search).items() if value is not None}
                overrides = [f"decoding.{key}={value}" for key, value in chosen.items()]
                config = override_config(self.loaded.config, overrides)
                translator = self.loaded.translator.change_search(config.decoding)
                self._translators[search] = translator
            return self._translators[search]


class ServedModels:
    """All models of a server, in the order in which they were given."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.by_name: dict[str, ServedModel] = {}
        for model in models:
            if model.name in self.by_name:
                raise UserError(
                    f"two models are called {model.name}; give one another name: NAME=CHECKPOINT"
                )
            self.by_name[model.name] = model

    def warm_up(self) -> None:
        """Translate once with each model, because the first time takes longer."""
        for model in self.by_name.values():
            model.loaded.translator.translate(["1"])

    @property
    def first(self) -> ServedModel:
        return next(iter(self.by_name.values()))

    def find_pair(self, src: str, tgt: str) -> ServedModel | None:
        """Return the first model that translates from `src` to `tgt`."""
        for model in self.by_name.values():
            if (model.src, model.tgt) == (src, tgt):
                return model
        return None

    def list_sources(self, tgt: str | None = None) -> list[str]:
        """List the languages that can be translated, or translated to `tgt`."""
        sources = [one.src for one in self.by_name.values() if tgt in (None, one.tgt)]
        return list(dict.fromkeys(sources))

    def list_targets(self, src: str | None = None) -> list[str]:
        """List the languages that can be translated to, or to from `src`."""
        targets = [one.tgt for one in self.by_name.values() if src in (None, one.src)]
        return list(dict.fromkeys(targets))
