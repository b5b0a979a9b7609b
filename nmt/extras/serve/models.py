"""The models of a server, each with its two languages."""

from collections.abc import Sequence
from dataclasses import dataclass

from nmt.system.errors import UserError
from nmt.translate.translator import OUR_ENGINE, LoadedModel, TextToText


@dataclass(frozen=True, eq=False)
class ServedModel:
    loaded: LoadedModel

    @property
    def src(self) -> str:
        return self.loaded.config.data.src

    @property
    def tgt(self) -> str:
        return self.loaded.config.data.tgt

    @property
    def direction(self) -> str:
        return f"{self.src} to {self.tgt}"

    @property
    def translator(self) -> TextToText:
        return self.loaded.translator

    @property
    def most_candidates(self) -> int:
        """How many candidates of a sentence the search can find."""
        config = self.translator.config
        has_beam = self.translator.engine == OUR_ENGINE and not config.sample
        return config.beam if has_beam else 1


def check_directions(models: Sequence[ServedModel]) -> None:
    """Refuse two models of one direction: a request names only its languages."""
    paths: dict[str, str] = {}
    for model in models:
        (path,) = model.loaded.paths
        if model.direction in paths:
            raise UserError(
                f"{paths[model.direction]} and {path} both translate {model.direction}; "
                "give one of them, and start another server for the other"
            )
        paths[model.direction] = path
