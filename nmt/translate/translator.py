"""Text to text: encode, sort by length, batch, search, decode, back in order.

The one path by which this project translates, whether for validation, scoring or a user's file. An empty line stays
empty. What a sentence becomes does not depend on its neighbours in the batch. A line that is too long is cut, refused,
or translated in parts, as `decoding.long_lines` says, and never without a word.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nlargest
from itertools import product
from pathlib import Path

import torch

from nmt.checkpoint import Checkpoint, load_weights, open_checkpoint
from nmt.config import DecodingConfig, ModelConfig, RunConfig, override_config, parse_device
from nmt.data.vocab import EOS, Vocab
from nmt.model.cpu_linear import prepare_for_decoding
from nmt.model.transformer import Transformer
from nmt.system.device import choose_device, is_out_of_memory
from nmt.system.errors import Failure, UserError
from nmt.system.progress import Progress, say
from nmt.translate.alignment import align
from nmt.translate.batching import DEFAULT_BATCH_TOKENS, GpuSearch, SearchedBatch, search_batches
from nmt.translate.beams import Decodable, Hypothesis
from nmt.translate.ensemble import Ensemble
from nmt.translate.lines import split

OURS = "nmt"
GPU_LINES = 8_192  # lines at a time where memory decides how many are searched together
Sentences = Sequence[Sequence[int]]  # without marks


@dataclass(frozen=True)
class Translation:
    text: str
    score: float  # penalised log-probability; of a line in parts their sum
    ids: tuple[int, ...] = ()
    links: tuple[
        int, ...
    ] = ()  # for each of them the source piece that it comes from, where that was asked for


@dataclass(frozen=True)
class Request:
    """What is wanted of each line."""

    n_best: int = 1
    is_aligned: bool = False


class LineTooLong(UserError):
    def __init__(self, index: int, told: str) -> None:
        super().__init__(told)
        self.index = index  # of the line, among those given


class TextToText(ABC):
    """What is the same whichever engine searches."""

    engine = OURS  # another's stands with its version wherever a number of it is written

    def __init__(self, vocab: Vocab, config: DecodingConfig, *shapes: ModelConfig) -> None:
        self.vocab, self.config = vocab, config
        tables = [shape.max_positions - 1 for shape in shapes if shape.positions == "learned"]
        self.longest = min([config.max_source, *tables])  # the shortest table bounds them all

    @property
    def chunk_lines(self) -> int:
        """Of so many lines at a time several batches can be made."""
        return (self.config.batch_tokens or DEFAULT_BATCH_TOKENS) // 4

    @abstractmethod
    def search_batches(
        self, sources: Sentences, prefixes: Sentences | None, n_best: int
    ) -> Iterator[SearchedBatch]:
        """The best few translations of each sentence, best first, some sentences at a time; none is empty."""

    def aligned(self, sources: Sentences, targets: Sentences) -> list[list[int]]:
        """For each piece of a translation the index of its source piece."""
        raise UserError("alignments are not to be had from this engine")

    def translate(
        self, lines: Sequence[str], progress: Progress | None = None, first: int = 1
    ) -> list[Translation]:
        """A translation for each line, in order; `first` is the number of the first line in messages."""
        results = [Translation("", 0.0)] * len(lines)
        for n_done in self.translating(lines, results, first):
            if progress is not None:
                progress.advance(n_done)
        return results

    def translating(
        self, lines: Sequence[str], results: list[Translation], first: int = 1
    ) -> Generator[int]:
        """Fill `results` batch by batch; yields how many lines each one completed."""
        for done in self._completing(lines, Request(), None, first):
            for line, candidates in done:
                results[line] = candidates[0]
            yield len(done)

    def candidates(
        self,
        lines: Sequence[str],
        request: Request,
        prefixes: Sequence[str] | None = None,
        first: int = 1,
    ) -> list[list[Translation]]:
        """For each line its translations, best first; `prefixes` are how they must begin. An empty line has one."""
        results = [[Translation("", 0.0)]] * len(lines)
        for done in self._completing(lines, request, prefixes, first):
            for line, candidates in done:
                results[line] = candidates
        return results

    def _completing(
        self, lines: Sequence[str], request: Request, prefixes: Sequence[str] | None, first: int
    ) -> Iterator[list[tuple[int, list[Translation]]]]:
        """The lines that each batch completes, with their candidates."""
        begins = None if prefixes is None else self.vocab.encode(prefixes)
        parts: list[list[range]] = []  # of each line
        units: list[tuple[int, int]] = []  # line and place in it
        pieces: list[list[int]] = []  # of each unit
        for line, ids in enumerate(self.vocab.encode(lines)):
            if begins is not None and len(begins[line]) > self.longest:
                raise LineTooLong(
                    line,
                    f"line {first + line}: its prefix has {len(begins[line]):,} pieces, more than "
                    f"{self.longest:,}; shorten it, or raise decoding.max_source",
                )
            parts.append(self.parts(ids, line, first))
            units.extend((line, place) for place in range(len(parts[line])))
            pieces.extend([ids[part.start : part.stop] for part in parts[line]])
        ready: dict[int, dict[int, list[Translation]]] = {}
        forced = (
            None
            if begins is None
            else [begins[line] if place == 0 else [] for line, place in units]
        )
        for batch, found in self.search_batches(pieces, forced, request.n_best):
            done = []
            for i, candidates in zip(
                batch, self._of_units([pieces[i] for i in batch], found, request), strict=True
            ):
                line, place = units[i]
                of_line = ready.setdefault(line, {})
                of_line[place] = candidates
                if len(of_line) == len(parts[line]):
                    del ready[line]
                    done.append(
                        (
                            line,
                            self._joined(
                                [of_line[n] for n in sorted(of_line)], parts[line], request
                            ),
                        )
                    )
            yield done

    def _of_units(
        self, sources: Sentences, found: list[list[Hypothesis]], request: Request
    ) -> list[list[Translation]]:
        flat = [(src, one) for src, some in zip(sources, found, strict=True) for one in some]
        texts = self.vocab.decode([one.ids for _, one in flat])
        links = (
            [[]] * len(flat)
            if not request.is_aligned
            else self.aligned([src for src, _ in flat], [one.ids for _, one in flat])
        )
        made = (
            Translation(text, one.score, tuple(one.ids), tuple(links_of))
            for (_, one), text, links_of in zip(flat, texts, links, strict=True)
        )
        return [[next(made) for _ in some] for some in found]

    def _joined(
        self, candidates: list[list[Translation]], parts: list[range], request: Request
    ) -> list[Translation]:
        """The candidates of a line from those of its parts: each with each, best sums first; samples one by one."""
        whole, *others = candidates
        for part, other in zip(parts[1:], others, strict=True):
            moved = [replace(b, links=tuple(part.start + link for link in b.links)) for b in other]
            pairs = zip(whole, moved, strict=False) if self.config.sample else product(whole, moved)
            joined = [
                Translation(
                    f"{a.text} {b.text}", a.score + b.score, a.ids + b.ids, a.links + b.links
                )
                for a, b in pairs
            ]
            whole = (
                joined
                if self.config.sample
                else nlargest(request.n_best, joined, key=lambda one: one.score)
            )
        return whole

    def parts(self, ids: list[int], index: int, first: int) -> list[range]:
        """What of a line's pieces is translated, together or in parts. An empty line has none."""
        n, how = len(ids), self.config.long_lines
        if n <= self.longest:
            return [range(n)] if n else []
        line = f"line {first + index} has {n:,} pieces"
        if how == "refuse":
            raise LineTooLong(
                index,
                f"{line}, more than {self.longest:,}; split it, raise decoding.max_source, or "
                "take decoding.long_lines=split or cut",
            )
        if how == "cut":
            say(
                f"warning: {line} and is cut to {self.longest:,}; split it, or raise decoding.max_source"
            )
            return [range(self.longest)]
        parts = split(self.vocab.pieces(ids), self.longest)
        say(f"{line} and is translated in {len(parts):,} parts")
        return parts

    def shortened(self, ids: list[int], line: int) -> list[int]:
        return [ids[i] for part in self.parts(ids, 0, line)[:1] for i in part]


class Translator(TextToText):
    """With our own search, by one model or by the mean of several."""

    def __init__(
        self,
        model: Transformer,
        vocab: Vocab,
        config: DecodingConfig,
        device: torch.device,
        others: Sequence[Transformer] = (),
    ) -> None:
        super().__init__(vocab, config, model.config, *(other.config for other in others))
        self.model, self.others, self.device = model, others, device

    @cached_property
    def speaker(self) -> Decodable:
        """Made at the first search, of the weights of that moment."""
        ready = [
            prepare_for_decoding(model, self.config.precision == "bf16")
            for model in (self.model, *self.others)
        ]
        return Ensemble(ready) if self.others else ready[0]

    @cached_property
    def gpu_search(self) -> GpuSearch:
        """With its recorded steps, which serve all searches to come."""
        return GpuSearch(self.speaker, self.config, self.device)

    @property
    def chunk_lines(self) -> int:
        is_by_memory = self.device.type == "cuda" and self.config.batch_tokens is None
        return GPU_LINES if is_by_memory else super().chunk_lines

    def search_batches(
        self, sources: Sentences, prefixes: Sentences | None, n_best: int
    ) -> Iterator[SearchedBatch]:
        marked = [[*ids, EOS] for ids in sources]
        with _at_rest(self.model):
            try:
                if self.device.type == "cuda":
                    yield from self.gpu_search.search_batches(marked, n_best, prefixes)
                else:
                    yield from search_batches(
                        self.speaker, marked, self.config, self.device, n_best, prefixes
                    )
            except (MemoryError, RuntimeError) as error:  # of a host tensor it is a plain one
                if is_out_of_memory(error):
                    raise Failure(
                        "not enough memory for this search; lower decoding.beam (or --n-best of samples) or "
                        "decoding.batch_tokens"
                    ) from None
                raise

    def aligned(self, sources: Sentences, targets: Sentences) -> list[list[int]]:
        """As the first model's attention tells."""
        with _at_rest(self.model):
            return align(self.model, sources, targets)


@contextmanager
def _at_rest(model: Transformer) -> Iterator[None]:
    """Without dropout for the moment: it may be in training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def make_translator(
    checkpoint: Checkpoint,
    device: torch.device,
    config: DecodingConfig,
    others: Sequence[Checkpoint] = (),
) -> Translator:
    """The translator of a loaded checkpoint, or of several with one vocabulary."""
    vocab = checkpoint.vocab
    for other in others:
        if other.vocab.digest != vocab.digest:
            raise UserError(
                f"{other.path}: has another BPE model than {checkpoint.path} "
                f"({other.vocab.digest[:12]}, {vocab.digest[:12]}); "
                "only models with one vocabulary translate together"
            )
    models = [_model(one, vocab.size).to(device) for one in (checkpoint, *others)]
    return Translator(models[0], vocab, config, device, models[1:])


@dataclass(frozen=True)
class LoadedModel:
    """A translator, and what it was made from."""

    translator: TextToText
    config: RunConfig
    paths: list[str]  # of the checkpoint or export, and of the others of an ensemble
    checkpoints: tuple[Checkpoint, ...] = ()  # none behind an export


def open_translator(paths: Sequence[str], overrides: Sequence[str]) -> LoadedModel:
    """Load one checkpoint, or several that translate together, on the device that the overrides ask for."""
    device = choose_device(parse_device(overrides))
    checkpoints = tuple(open_checkpoint(Path(path)) for path in paths)
    first, *others = checkpoints
    config = override_config(first.config, overrides)
    translator = make_translator(first, device, config.decoding, others)
    return LoadedModel(translator, config, [str(one.path) for one in checkpoints], checkpoints)


def _model(checkpoint: Checkpoint, vocab_size: int) -> Transformer:
    shape = checkpoint.config.model
    if (
        shape.positions == "sinusoidal"
    ):  # a table that no file bounds; it grows when a sentence asks for more
        shape = replace(shape, max_positions=min(shape.max_positions, 1024))
    model = Transformer(shape, vocab_size)
    load_weights(checkpoint, model)
    return model.requires_grad_(False).eval()
