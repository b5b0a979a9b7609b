"""Text to text: encode, sort by length, batch, search, decode, back in order.

The one path by which this project translates, whether for validation, scoring or a user's file. An empty line stays
empty. What a sentence becomes does not depend on its neighbours in the batch.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nmt.batch import pack
from nmt.checkpoint import Checkpoint, load_weights
from nmt.config import DecodingConfig
from nmt.data.vocab import EOS, Vocab
from nmt.decode.beam import search
from nmt.model.transformer import Transformer
from nmt.progress import Progress, say


@dataclass(frozen=True)
class Translation:
    text: str
    score: float


class Translator:
    def __init__(self, model: Transformer, vocab: Vocab, config: DecodingConfig, device: torch.device) -> None:
        self.model, self.vocab, self.config, self.device = model, vocab, config, device

    def translate(self, lines: Sequence[str], progress: Progress | None = None, first: int = 1) -> list[Translation]:
        """A translation for each line, in order; `first` is the number of the first line in messages."""
        results = [Translation("", 0.0)] * len(lines)
        for n_done in self.translating(lines, results, first):
            if progress is not None:
                progress.advance(n_done)
        return results

    def translating(self, lines: Sequence[str], results: list[Translation], first: int = 1) -> Generator[int]:
        """Fill `results` batch by batch; yields how many lines each one had."""
        pieces = [self.shortened(ids, first + i) + [EOS] for i, ids in enumerate(self.vocab.encode(lines))]
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in _batches(pieces, self.config.batch_tokens):
                found = search(self.model, pack([pieces[i] for i in batch]).to(self.device), self.config)
                texts = self.vocab.decode([best[0].ids for best in found])
                for i, text, best in zip(batch, texts, found, strict=True):
                    results[i] = Translation(text, best[0].score)
                yield len(batch)
        finally:
            self.model.train(was_training)

    def shortened(self, ids: list[int], line: int) -> list[int]:
        model = self.model.config
        longest = self.config.max_source
        if model.positions == "learned":
            longest = min(longest, model.max_positions - 1)
        if len(ids) > longest:
            say(f"warning: line {line} has {len(ids):,} pieces and is cut to {longest:,}; split it, "
                "or raise decoding.max_source")
        return ids[:longest]


def _batches(pieces: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of the non-empty sentences, long ones first, at most so many padded tokens together."""
    batch: list[int] = []
    for i in sorted((i for i, ids in enumerate(pieces) if len(ids) > 1), key=lambda i: -len(pieces[i])):
        if batch and (len(batch) + 1) * len(pieces[batch[0]]) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def make_translator(checkpoint: Checkpoint, device: torch.device, config: DecodingConfig) -> Translator:
    """The translator of a loaded checkpoint."""
    vocab = Vocab(checkpoint.vocab_model)
    shape = checkpoint.config.model
    if shape.positions == "sinusoidal":  # a table that no file bounds; it grows when a sentence asks for more
        shape = replace(shape, max_positions=min(shape.max_positions, 1024))
    model = Transformer(shape, vocab.size)
    load_weights(checkpoint, model)
    return Translator(model.requires_grad_(False).to(device), vocab, config, device)
