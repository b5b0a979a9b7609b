"""The rules of a search, made once from the settings of `decoding`; every search reads them here.

A rule that is added is a field of `SearchRules`. Engines compare every field with what they know, so a
rule that an engine does not know makes it step aside (nmt/translate/engine.py).
"""

from dataclasses import dataclass
from typing import Literal

from nmt.config import DecodingConfig
from nmt.system.errors import UserError


@dataclass(frozen=True)
class SearchRules:
    n_best: int  # hypotheses to return for each sentence
    beam: int  # hypotheses of a sentence that are active at a time
    is_sampling: bool
    # What a log-probability is divided by (length_penalty.py), and what the length may be.
    penalty: Literal["gnmt", "length", "none"]
    length_penalty: float
    max_ratio: float
    max_extra: int
    min_length: int
    no_repeat_ngram: int | None
    finishing: Literal["any", "top", "shrink"]
    stopping: Literal["exact", "full", "likely", "never"]
    # of sampling
    temperature: float
    top_k: int | None
    top_p: float
    seed: int

    @property
    def n_considered(self) -> int:
        """How many continuations of a sentence each step considers."""
        return 2 * self.beam if self.beam > 1 else 1

    @property
    def n_kept(self) -> int:
        """How many finished hypotheses of a sentence are kept: `likely` compares with the beam-th best."""
        return self.beam if self.stopping == "likely" else self.n_best


def make_rules(config: DecodingConfig, n_best: int = 1) -> SearchRules:
    if not config.sample and n_best > config.beam:
        raise UserError(
            f"a beam of {config.beam} is too small for the {n_best} best translations; raise decoding.beam"
        )
    return SearchRules(
        n_best=n_best,
        beam=n_best if config.sample else config.beam,
        is_sampling=config.sample,
        penalty=config.penalty,
        length_penalty=config.length_penalty,
        max_ratio=config.max_ratio,
        max_extra=config.max_extra,
        min_length=config.min_length,
        no_repeat_ngram=config.no_repeat_ngram,
        finishing=config.finishing,
        stopping=config.stopping,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
