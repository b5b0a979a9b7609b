"""Text to text: encode, split into batches, search, decode, back in order.

The one path by which this project translates, whether for validation, scoring or a user's file. An
empty line stays empty. The translation of a sentence does not depend on its neighbours in the
batch. A line that is too long is cut or refused, as `decoding.long_lines` says, and always with a
message. Running text is split into sentences first (sentences.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import torch

from nmt.agreement import check_agreement, find_direction
from nmt.checkpoint.checkpoint import Checkpoint, load_weights
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import DecodingConfig, ModelConfig, RunConfig
from nmt.config_files import override_config, parse_device
from nmt.data.batch import Sentences
from nmt.data.vocab import EOS, MOSTLY_UNKNOWN, EncodedLines, Vocabulary
from nmt.model.backend import use_backend
from nmt.model.decoding_copy import copy_sharing_weights
from nmt.model.dropout import suspend_dropout
from nmt.model.transformer import Transformer
from nmt.model.weightless import WithoutDrawing
from nmt.system.arguments import take_lines, take_text
from nmt.system.device import choose_device
from nmt.system.errors import Failure, UserError
from nmt.system.memory import explain_memory_error
from nmt.system.progress import say, say_once
from nmt.system.run_folder import MODEL_FILE
from nmt.translate.batching import DEFAULT_BATCH_TOKENS, Requests, SearchedBatch
from nmt.translate.capitals import is_in_capitals, lower_capitals
from nmt.translate.engine import choose_engine
from nmt.translate.ensemble import Ensemble
from nmt.translate.search_state import BestHypotheses, Decodable
from nmt.translate.sentences import RunningText, Sentence, Splitter

OUR_ENGINE = "nmt"
SEARCH_TOO_LARGE = (
    "the search ran out of memory; lower decoding.beam (--n-best if you sample) or "
    "decoding.batch_tokens"
)
SAID_OF_CAPITALS = (
    "lines in capitals are translated in small letters, and their translations put in capitals; "
    "decoding.lower_capitals=false leaves them as they are"
)
# of source, in lines that are given at a time, even if batches are larger: others may wait for them
MOST_CHUNK_TOKENS = 32_768
Candidates = list["Translation"]  # of a line, best first
FoundBatch = list[tuple[int, Candidates]]  # the indices of some lines, and what was found for them


@dataclass(frozen=True)
class Translation:
    text: str
    score: float  # penalised log-probability
    piece_ids: Sequence[int] = ()
    alignment: Sequence[int] = ()  # for each piece the index of its source piece, once added
    is_cut: bool = False  # it has as many pieces as it may have, so its end may be missing
    alternatives: "Sequence[Translation]" = ()  # the next best, if translate() was asked for several

    @property
    def is_loop(self) -> bool:
        """Whether it ends in the same pieces three times."""
        ids = tuple(self.piece_ids)
        return any(ids[-n:] * 3 == ids[-3 * n :] for n in range(1, len(ids) // 3 + 1))


SHOWN_OF_PART = 60  # characters, in a message
NO_TRANSLATION = Translation("", 0.0)  # of an empty line


@dataclass(frozen=True)
class TranslatedText:
    """A document, its sentences, and the candidates of each."""

    text: str
    sentences: list[Sentence]
    candidates: list[Candidates]


class LineTooLong(UserError):
    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"line {number}{message}")
        self.number = number


class TextToText(ABC):
    """What every engine has in common: texts to sentences, lines to pieces, and back again."""

    engine = OUR_ENGINE  # other engines' scores are labelled with name and version
    languages = ("", "")  # of the sources and of the translations, if they are known
    direction: str | None = None  # the same as en-de; None also if tags choose the languages
    usual_batch_tokens = DEFAULT_BATCH_TOKENS  # unless the config sets them

    def __init__(self, vocab: Vocabulary, config: DecodingConfig, *shapes: ModelConfig) -> None:
        self.vocab, self.config = vocab, config
        self.is_unknown_said = False
        tables = [shape.max_positions - 1 for shape in shapes if shape.positions == "learned"]
        self.longest_table = min(tables, default=None)  # the shortest table bounds them all
        self.longest_source = min([config.max_source, *tables])
        self.set_tag(config.tag)

    def set_tag(self, tag: str | None) -> None:
        """Put a tag in front of all sources from now on."""
        try:
            self.tag_ids = [] if tag is None else [self.vocab.src.find_symbol(tag)]
        except UserError as error:
            raise UserError(f"decoding.tag: {error}") from None
        self.longest = self.longest_source - len(self.tag_ids)  # of a line, in pieces
        if self.longest < 1:
            raise UserError(
                f"decoding.max_source is {self.config.max_source}, which leaves no room for a line "
                "beside its tag; raise it"
            )

    @property
    def chunk_lines(self) -> int:
        """How many lines to give at a time, so that they make several batches."""
        return (self.config.batch_tokens or self.usual_batch_tokens) // 4

    @abstractmethod
    def search_batches(self, requests: Requests, n_best: int) -> Iterator[SearchedBatch]:
        """Search sentences without eos, of which none is empty, batch by batch: the best hypotheses of
        each, best first.
        """

    def fits(self, sentence: str) -> bool:
        """Whether the model can translate a sentence whole."""
        if len(sentence.encode(errors="replace")) < self.longest:
            return True  # no character or byte has more than one piece, and the first space another
        (ids,) = self.encode_source([sentence])
        return len(ids) <= self.longest

    def is_lowered(self, line: str) -> bool:
        """Whether a line is read in small letters, and its translation put in capitals."""
        return self.config.lower_capitals and is_in_capitals(line)

    def clean(self, lines: Sequence[str]) -> list[str]:
        """Return the lines as the model reads them: without spaces of any kind at their ends, as training
        sentences are, and in small letters if they are in capitals.
        """
        return [
            lower_capitals(line.strip()) if self.is_lowered(line) else line.strip()
            for line in lines
        ]

    def encode_source(self, lines: Sequence[str]) -> EncodedLines:
        """Return the pieces of each line that the model reads, without tags."""
        return self.vocab.src.encode(self.clean(lines))

    def make_splitter(self) -> Splitter:
        """Make what splits paragraphs into sentences that the model can translate."""
        return Splitter(self.languages[0], self.fits)

    def translate_text(self, text: str) -> TranslatedText:
        """Translate running text: each line of it is a paragraph of sentences."""
        text = take_text(text, "translate_text: what it got")
        (translated,) = self.translate_texts([RunningText(text, self.make_splitter())])
        return translated

    def translate_texts(
        self, texts: Sequence[RunningText], n_best: int = 1, first: int = 1
    ) -> list[TranslatedText]:
        """Translate texts sentence by sentence. In messages a sentence has the number of its text, and
        the first text the number `first`.
        """
        sentences = [sentence for text in texts for sentence in text.sentences]
        numbers = [number for number, text in enumerate(texts, first) for _ in text.sentences]
        report_parts(sentences)
        candidates: list[Candidates] = []
        for start in range(0, len(sentences), self.chunk_lines):
            here = slice(start, start + self.chunk_lines)
            lines = [sentence.text for sentence in sentences[here]]
            candidates += self.find_candidates(lines, n_best, numbers=numbers[here])

        remaining = iter(candidates)
        results = []
        for text in texts:
            of_text = list(islice(remaining, len(text.sentences)))
            joined = text.join([best.text for best, *_ in of_text])
            results.append(TranslatedText(joined, text.sentences, of_text))
        return results

    def translate(
        self, lines: Iterable[str], *, beam: int | None = None, n_best: int = 1
    ) -> Candidates:
        """Translate each line, in order. `beam` replaces decoding.beam; with `n_best` each translation
        has that many less one `alternatives`, best first.
        """
        for name, n in (("beam", beam), ("n_best", n_best)):
            if n is not None and (type(n) is not int or n < 1):
                raise UserError(f"{name} is {n!r:.60}; give an integer, at least 1")
        translator = self
        if beam is not None:
            translator = copy(self)
            translator.config = replace(self.config, beam=beam)
        found = translator.find_candidates(take_lines(lines), n_best)
        return [replace(best, alternatives=others) for best, *others in found]

    def find_candidates(
        self,
        lines: Sequence[str],
        n_best: int = 1,
        prefixes: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> list[Candidates]:
        """Find the candidates of each line, in order, as `find_by_batch` does."""
        batches = self.find_by_batch(lines, n_best, prefixes, numbers)
        return [candidates for _, candidates in sorted(chain.from_iterable(batches))]

    def find_by_batch(
        self,
        lines: Sequence[str],
        n_best: int = 1,
        prefixes: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> Generator[FoundBatch]:
        """Yield the candidates of lines batch by batch. Those of a line begin with its prefix. Empty lines
        have one, without a search, and come first.

        `numbers` are those of the lines in messages; without them the first line is 1.
        """
        numbers = numbers or range(1, len(lines) + 1)
        self._warn_of_unknown(lines, numbers)
        sources: dict[int, list[int]] = {}
        empty: FoundBatch = []
        starts = self.vocab.tgt.encode(prefixes or [""] * len(lines))
        requested = zip(numbers, lines, self.encode_source(lines), starts, strict=True)
        for index, (number, line, ids, start) in enumerate(requested):
            if self.is_lowered(line):
                say_once(SAID_OF_CAPITALS)
            if len(start) > self.longest:
                raise LineTooLong(
                    number,
                    f": its prefix has {len(start):,} pieces, more than {self.longest:,}; "
                    "shorten it, or raise decoding.max_source",
                )
            if ids:
                sources[index] = [*self.tag_ids, *self.shorten(ids, number)]
            else:
                empty.append((index, [NO_TRANSLATION]))
        if empty:
            yield empty

        indices = list(sources)
        own_starts = [starts[index] for index in indices]
        requests = Requests(list(sources.values()), own_starts if any(own_starts) else ())
        for places, hypotheses in self.search_batches(requests, n_best):
            searched = requests.choose(places).sources
            translations = self._make_translations(searched, hypotheses)
            found = []
            for place, candidates in zip(places, translations, strict=True):
                index = indices[place]
                if self.is_lowered(lines[index]):
                    candidates = [replace(each, text=each.text.upper()) for each in candidates]
                found.append((index, candidates))
            yield found

    def _warn_of_unknown(self, lines: Sequence[str], numbers: Sequence[int]) -> None:
        """Say once that the model cannot read a text."""
        text = "".join(self.clean(lines))
        unknown = set(text) - self.vocab.src.letters  # to the model, or spelled in bytes
        n_unknown = sum(map(text.count, unknown))
        if n_unknown > MOSTLY_UNKNOWN * len(text) and not self.is_unknown_said:
            self.is_unknown_said = True
            say(
                f"warning: lines {numbers[0]} to {numbers[-1]} are mostly <unk> or single bytes: the "
                "vocabulary lacks their letters, so their translations mean little; is it the right "
                "language?"
            )

    def _make_translations(
        self, sources: Sentences, hypotheses: BestHypotheses
    ) -> list[Candidates]:
        # the texts of all hypotheses of all sentences: together they are decoded faster
        texts = iter(self.vocab.tgt.decode([each.ids for some in hypotheses for each in some]))
        results = []
        for source, some in zip(sources, hypotheses, strict=True):
            longest = self.config.find_longest(len(source))
            if self.longest_table is not None:
                longest = min(longest, self.longest_table)
            candidates = []
            for each in some:
                is_cut = len(each.ids) >= longest
                candidates.append(
                    Translation(next(texts), each.score, tuple(each.ids), is_cut=is_cut)
                )
            results.append(candidates)
        return results

    def shorten(self, ids: list[int], number: int) -> list[int]:
        """Return what the model reads of the line that has this number in messages."""
        n, longest = len(ids), self.longest
        if n <= longest:
            return ids
        if self.config.long_lines == "refuse":
            raise LineTooLong(
                number,
                f" has {n:,} pieces, more than {longest:,}; split it, raise decoding.max_source, or "
                "set decoding.long_lines=cut",
            )
        say(
            f"warning: line {number} has {n:,} pieces and is cut to {longest:,}; split it, or raise "
            "decoding.max_source"
        )
        return ids[:longest]


def find_cut_lines(translations: Sequence[Translation], first: int = 1) -> dict[int, bool]:
    """Return the numbers of the lines whose translations reach the length limit, and whether in a loop."""
    return {n: each.is_loop for n, each in enumerate(translations, first) if each.is_cut}


def warn_of_cut(line: str, n_cut: int, n_loops: int, n: int) -> None:
    """Say that the translation at `line` is the first of `n_cut` that reach the length limit."""
    remedy = "raise decoding.max_extra"
    if n_loops:
        why = "this text is not like the training text, or the model needs more training"
        remedy = f"{n_loops:,} of them repeat the same words: {why}; for any other, {remedy}"
    say(
        f"warning: {line}: its translation has as many pieces as decoding.max_ratio and "
        f"decoding.max_extra allow, so its end may be missing; so have {n_cut:,} of {n:,}; {remedy}"
    )


def report_parts(sentences: Sequence[Sentence]) -> None:
    """Say which sentences are too long to be translated whole."""
    cut = [sentence for sentence in sentences if sentence.is_part]
    if cut:
        say(
            f"warning: {len(cut):,} parts of sentences are translated separately, because the model "
            f"does not accept the whole; the first is {cut[0].text[:SHOWN_OF_PART]!r}"
        )


class Translator(TextToText):
    """Our own search, with one model or the mean of several."""

    def __init__(
        self,
        model: Transformer,
        vocab: Vocabulary,
        config: DecodingConfig,
        device: torch.device,
        others: Sequence[Transformer] = (),
    ) -> None:
        super().__init__(vocab, config, model.config, *(other.config for other in others))
        self.models, self.device = [model, *others], device
        self.search_engine = choose_engine(self.models, config, device)
        self.usual_batch_tokens = min(self.search_engine.batch_tokens, MOST_CHUNK_TOKENS)
        for each in self.models:
            use_backend(each, self.search_engine.backend)

    @property
    def model(self) -> Transformer:
        """The first, whose attention is shown."""
        return self.models[0]

    @cached_property
    def decodable(self) -> Decodable:
        """What is searched."""
        models = self.prepared_models
        return Ensemble(models) if len(models) > 1 else models[0]

    @cached_property
    def prepared_models(self) -> list[Transformer]:
        """Copies of the models as the engine reads them; made at the first use, from the weights of
        that moment.
        """
        return [self._prepare(copy_sharing_weights(model)) for model in self.models]

    def keep_prepared_models(self) -> None:
        """Prepare the models themselves, so that no weights are in memory twice. They cannot be trained
        or written afterwards.
        """
        self.models = self.prepared_models = [self._prepare(model) for model in self.models]

    def _prepare(self, model: Transformer) -> Transformer:
        model.writes_unknown = not self.vocab.tgt.has_bytes
        return self.search_engine.prepare(model, self.config.precision == "bf16")

    def search_batches(self, requests: Requests, n_best: int) -> Iterator[SearchedBatch]:
        requests = replace(requests, sources=[[*ids, EOS] for ids in requests.sources])
        with suspend_dropout(self.model), explain_memory_error(Failure(SEARCH_TOO_LARGE)):
            yield from self.search_engine.search_batches(
                self.decodable, requests, self.config, self.device, n_best
            )


def make_translator(
    checkpoint: Checkpoint,
    device: torch.device,
    config: DecodingConfig,
    others: Sequence[Checkpoint] = (),
) -> Translator:
    """Make the translator of a loaded checkpoint, or of several with one vocabulary."""
    vocab, data = checkpoint.vocab, checkpoint.config.data
    path, direction = checkpoint.path, find_direction(data)
    for other in others:
        name, remedy = other.path, "the models of an ensemble must share it"
        own_direction = find_direction(other.config.data)
        check_agreement("direction", name, own_direction, path, direction, remedy)
        check_agreement("BPE model", name, other.vocab.digest, path, vocab.digest, remedy)
    members = [checkpoint, *others]
    if len({member.sha256[MODEL_FILE] for member in members}) < len(members):
        names = " ".join(str(member.path) for member in members)
        say(
            f"warning: {names}: some of these have the same weights, and count for more in the ensemble"
        )
    if others and config.beam > vocab.tgt.size:  # it would take rows that another model may lack
        raise UserError(f"decoding.beam is {config.beam}, more than the pieces there are; lower it")
    models = [_load_model(member).to(device) for member in members]
    translator = Translator(models[0], vocab, config, device, models[1:])
    translator.languages, translator.direction = (data.src, data.tgt), direction
    return translator


def warn_if_untagged(config: RunConfig, key: str = "decoding.tag") -> None:
    """Print a warning if a text gets no tag although all training sources had one; `key` sets it."""
    if config.decoding.tag is None and config.data.has_tags_only:
        say(
            f"warning: all training corpora of this model have a tag, but {key} is not set; set it to "
            f"one of {' '.join(config.data.train_tags)}"
        )


@dataclass(frozen=True)
class LoadedModel:
    """A translator, and what it was made from."""

    translator: TextToText
    config: RunConfig
    paths: list[str]  # of the checkpoint or export, and of the others of an ensemble
    checkpoints: tuple[Checkpoint, ...] = ()  # none behind an export


def open_translator(paths: Sequence[str], overrides: Sequence[str]) -> LoadedModel:
    """Load one checkpoint, or several that translate together, on the device that the overrides ask
    for.
    """
    device = choose_device(parse_device(overrides))
    checkpoints = tuple(open_checkpoint(Path(path)) for path in paths)
    first, *others = checkpoints
    config = override_config(first.config, overrides)
    translator = make_translator(first, device, config.decoding, others)
    translator.keep_prepared_models()
    return LoadedModel(
        translator, config, [str(member.path) for member in checkpoints], checkpoints
    )


def _load_model(checkpoint: Checkpoint) -> Transformer:
    shape = checkpoint.config.model
    if shape.positions != "learned":  # this table is in no file, and grows as needed
        shape = replace(shape, max_positions=min(shape.max_positions, 1024))
    with WithoutDrawing():
        model = Transformer(shape, *checkpoint.vocab.sizes)
    load_weights(checkpoint, model)
    return model.requires_grad_(False).eval()
