"""A system that is to be scored: its translations of one test set, made here or read from a file.

Whatever is scored comes through `examine`, which refuses text whose score would be wrong for certain and tells what is
odd. Nothing here knows a metric.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nmt.config import CorpusConfig, RunConfig
from nmt.corpus.test_sets import TestSet, open_reference, open_test_set
from nmt.corpus.text_files import TextFile, read_lines
from nmt.known_test_sets import name_sizes
from nmt.score.text_checks import Text, find_problems
from nmt.system.errors import UserError
from nmt.system.progress import Progress, clock, say
from nmt.translate.translator import OURS, LoadedModel


@dataclass(frozen=True)
class Wanted:
    """The test set that the user asks for; nothing of it: that of the config."""

    name: str | None = None
    src: str | None = None
    ref: str | None = None

    def opened(self, config: RunConfig) -> TestSet:
        data = config.data
        if self.ref is not None and self.src is None:
            return open_reference(Path(self.ref), data)
        if self.ref is not None:
            return open_test_set(CorpusConfig(src=self.src, tgt=self.ref), replace(data, root="."))
        corpus = self.name or data.test
        if corpus is None:
            raise UserError(
                "the config names no test set; give --test-set NAME, or --src and --ref"
            )
        return open_test_set(corpus, data)

    def names(self, test: TestSet) -> tuple[str, str]:
        """What messages call source and reference."""
        return (
            (self.src or "", self.ref)
            if self.ref
            else (f"{test.name}, source", f"{test.name}, reference")
        )


@dataclass(frozen=True)
class System:
    name: str
    config: RunConfig
    test: TestSet
    texts: list[str]
    seconds: float = 0.0
    engine: LoadedModel | None = None  # None: the translations were read

    @property
    def pair(self) -> str:
        return f"{self.config.data.src}-{self.config.data.tgt}"

    @property
    def label(self) -> str:
        """Its name, with the engine where that is not ours."""
        engine = self.engine.translator.engine if self.engine else OURS
        return self.name if engine == OURS else f"{self.name} with {engine}"


def translated(engine: LoadedModel, wanted: Wanted) -> System:
    test = wanted.opened(engine.config)
    if not test.src:
        raise UserError(
            f"{engine.paths[0]}: has nothing to translate; give --src FILE beside --ref FILE"
        )
    progress, began = Progress("translating", len(test.src), "sentences"), clock()
    texts = [found.text for found in engine.translator.translate(test.src, progress)]
    progress.close()
    return System(" + ".join(engine.paths), engine.config, test, texts, clock() - began, engine)


def read(path: str, wanted: Wanted, config: RunConfig) -> System:
    """A file of translations, one a line."""
    return System(path, config, wanted.opened(config), list(read_lines(TextFile(Path(path)))))


def examine(system: System, wanted: Wanted, is_forced: bool) -> None:
    """Refuse what cannot be scored rightly, unless the user insists, and tell what is odd."""
    test, data = system.test, system.config.data
    source, reference = wanted.names(test)
    if test.warning:
        say(f"warning: {test.warning}")
    for problem in find_problems(
        Text(system.name, system.texts, data.tgt),
        Text(reference, test.ref, data.tgt),
        Text(source, test.src, data.src) if test.src else None,
        name_sizes(),
    ):
        if problem.is_fatal and not (is_forced and len(system.texts) == len(test.ref)):
            raise UserError(problem.message)
        say(f"warning: {problem.message}")
