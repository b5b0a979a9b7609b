"""The models of a server, each with a name and its two languages."""

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.system.errors import UserError
from nmt.translate.translator import OUR_ENGINE, LoadedModel, TextToText


@dataclass(frozen=True, eq=False)
class ServedModel:
    name: str
    loaded: LoadedModel

    @property
    def src(self) -> str:
        return self.loaded.config.data.src

    @property
    def tgt(self) -> str:
        return self.loaded.config.data.tgt

    @property
    def translator(self) -> TextToText:
        return self.loaded.translator

    @property
    def most_candidates(self) -> int:
        """How many candidates of a sentence the search can find."""
        config = self.translator.config
        has_beam = self.translator.engine == OUR_ENGINE and not config.sample
        return config.beam if has_beam else 1


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
            model.translator.translate(["1"])

    @property
    def first(self) -> ServedModel:
        return next(iter(self.by_name.values()))
