"""A system that is to be scored: its translations of one test set, made here or read from a file.

Every system passes `check_texts` before it is scored, which refuses text whose score would
certainly be wrong and warns about odd text. Nothing here knows a metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nmt.checkpoint.checkpoint import Checkpoint
from nmt.config import CorpusConfig, DataConfig, RunConfig
from nmt.config_files import to_plain_values
from nmt.corpus.test_sets import TestSet, add_references, open_reference, open_test_set
from nmt.evaluate.known_text import find_known_text, read_dev_sources
from nmt.evaluate.results import Search, find_other_search
from nmt.known_test_sets import KnownSet, find_filtered_set
from nmt.score.score import Score
from nmt.score.text_checks import (
    Problem,
    Text,
    check_letters,
    find_problems,
    warn_of_traces,
    warn_of_unrelated,
)
from nmt.system.errors import UserError
from nmt.system.progress import Progress, clock, say
from nmt.translate.translator import (
    OUR_ENGINE,
    FoundBatch,
    LoadedModel,
    find_cut_lines,
    warn_if_untagged,
    warn_of_cut,
)

# Of the translations; a weak model repeats itself in some to the end.
FEW_CUT = 0.2


@dataclass(frozen=True)
class TestSetChoice:
    """The test set that the user asked for; if nothing is given, the one that the config names."""

    name: str | None = None
    src: str | None = None
    refs: tuple[str, ...] = ()  # files; the second and later are further translations

    @property
    def is_of_config(self) -> bool:
        return self.name is None and not self.refs

    def open(self, data: DataConfig) -> TestSet:
        if self.refs:
            first, *more = self.refs
            if self.src is None:
                test = open_reference(Path(first), data)
            else:
                files = CorpusConfig(src=self.src, tgt=first)
                test = open_test_set(files, replace(data, root="."))
            return add_references(test, [Path(ref) for ref in more])
        corpus = self.name or data.test
        if corpus is None:
            raise UserError(
                "data.test: is not set in the config; give --test-set NAME, or --src and --ref"
            )
        return open_test_set(corpus, data)

    def name_sides(self, test: TestSet) -> tuple[str, str]:
        """Return what messages call the source and the reference."""
        if self.refs:
            return self.src or "", self.refs[0]
        return f"{test.name}, source", f"{test.name}, reference"


@dataclass(frozen=True)
class System:
    name: str
    data: DataConfig  # the languages, and where the test set and the store are
    test: TestSet
    texts: list[str]  # one translation for each line of the test set
    seconds: float = 0.0
    model: LoadedModel | None = None  # None if the translations were read
    scores: Sequence[Score] = ()  # the headline first
    known_text: str | None = None  # train or valid: the model's own text

    @property
    def pair(self) -> str:
        return f"{self.data.src}-{self.data.tgt}"

    @property
    def checkpoint(self) -> Checkpoint:
        """The first one, which knows how the model was trained."""
        if self.model is None or not self.model.checkpoints:
            raise UserError(
                f"{self.name}: a verdict judges the training too, so it needs a checkpoint; give RUN or RUN/average"
            )
        return self.model.checkpoints[0]

    @property
    def only_checkpoint(self) -> Checkpoint | None:
        """The one that alone made the translations; None for a file, an export or an ensemble."""
        checkpoints = () if self.model is None else self.model.checkpoints
        return checkpoints[0] if len(checkpoints) == 1 else None

    @property
    def recorded_name(self) -> str:
        """The name of its folder: `last` is another one tomorrow, and `.` is none at all."""
        checkpoint = self.only_checkpoint
        return self.name if checkpoint is None else checkpoint.path.resolve().name

    @property
    def config(self) -> RunConfig:
        """What it was trained and translated with, which is not known of translations from a file."""
        assert self.model is not None
        return self.model.config

    @property
    def other_search(self) -> Search:
        """The settings of its search that are not those of the model's own config."""
        if self.model is None or not self.model.checkpoints:
            return {}
        decoding = to_plain_values(self.config.decoding)
        return find_other_search(decoding, self.test.label, self.checkpoint.config)

    @property
    def label(self) -> str:
        """The name, followed by the engine unless it is our own."""
        engine = self.model.translator.engine if self.model else OUR_ENGINE
        return self.name if engine == OUR_ENGINE else f"{self.name} with {engine}"

    @property
    def filtered_set(self) -> KnownSet | None:
        """The known set of which the test set seems to be the filtered form, by its number of
        lines.
        """
        return find_filtered_set(len(self.test.ref), self.data.src, self.data.tgt)

    def find_score(self, name: str) -> Score:
        return next(score for score in self.scores if score.name == name)


def translate_test_set(model: LoadedModel, choice: TestSetChoice) -> System:
    test = choice.open(model.config.data)
    if not test.src:
        raise UserError(
            f"{model.paths[0]}: there is nothing to translate; give --src FILE as well as --ref FILE"
        )
    model = _set_tag(model, choice)
    warn_if_untagged(model.config)
    started_at = clock()
    found: FoundBatch = []
    with Progress("translating", len(test.src), "sentences") as progress:
        for batch in model.translator.find_by_batch(test.src):
            found += batch
            progress.advance(len(batch))
    translations = [best for _, (best, *_) in sorted(found)]
    cut = find_cut_lines(translations)
    if len(cut) > FEW_CUT * len(translations):
        first = f"{choice.name_sides(test)[0]}:{min(cut)}"
        warn_of_cut(first, len(cut), sum(cut.values()), len(translations))
    texts = [translation.text for translation in translations]
    seconds = clock() - started_at
    known_text = find_known_text(model, test, (choice.src, *choice.refs))
    name, data = " + ".join(model.paths), model.config.data
    return System(name, data, test, texts, seconds, model, known_text=known_text)


def _set_tag(model: LoadedModel, choice: TestSetChoice) -> LoadedModel:
    """Return the model set to the test set's own tag, if it has one."""
    test, decoding = model.config.data.test, model.config.decoding
    tag = decoding.tag
    if not choice.is_of_config or test is None or test.tag is None:
        return model
    if tag is not None and tag != test.tag:
        raise UserError(
            f"decoding.tag is {tag!r}, but data.test has the tag {test.tag!r}; leave one of them out"
        )
    model.translator.set_tag(test.tag)
    return replace(model, config=replace(model.config, decoding=replace(decoding, tag=test.tag)))


def check_texts(system: System, choice: TestSetChoice, is_forced: bool) -> None:
    """Refuse text that cannot be scored correctly, unless the user insists, and warn about odd
    text.
    """
    test, data = system.test, system.data
    source, reference = choice.name_sides(test)
    if test.warning:
        say(f"warning: {test.warning}")
    warn_of_unrelated(source, test.src, reference, test.ref)
    for more in test.more_refs:
        warn_of_unrelated(reference, test.ref, str(more.path), more.lines)
    if system.model is not None:
        warn_of_traces(source, test.src)
    else:
        warn_of_unrelated(system.name, system.texts, reference, test.ref)
    filtered = system.filtered_set
    if filtered is not None:
        assert filtered.lines is not None and filtered.subset is not None
        say(
            f"warning: {reference}: {len(test.ref):,} lines, as many as {filtered.name} after filtering "
            f"(sacreBLEU's {filtered.subset.sacrebleu}); if it is that, no score compares with the "
            f"paper's, which counts all {filtered.lines:,} lines"
        )
    hypotheses = Text(system.name, system.texts, data.tgt, system.model is not None)
    sources = Text(source, test.src, data.src) if test.src else None
    references = [Text(reference, test.ref, data.tgt)]
    references += [Text(str(more.path), more.lines, data.tgt) for more in test.more_refs]
    problems: dict[Problem, None] = {}  # what concerns the translations alone is said once
    for text in references:
        for other in (hypotheses, sources):
            if other is not None and text.lines == other.lines:
                say(f"note: {other.name} and {text.name} are the same text, line for line")
        problems |= dict.fromkeys(find_problems(hypotheses, text, sources))
    if sources is not None and system.model is not None:
        dev_set = read_dev_sources(system.model, len(test.src))
        if dev_set.lines:
            problems |= dict.fromkeys(check_letters(sources, dev_set))
    # If the user insists, a score may be wrong, but lists of unequal length have no score at all.
    is_tolerant = is_forced and len(system.texts) == len(test.ref)
    for problem in problems:
        if problem.is_fatal and not is_tolerant:
            raise UserError(problem.message)
        say(f"warning: {problem.message}")
