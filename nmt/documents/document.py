"""Documents: taken apart into sentences, and put together again from translations.

Running text, HTML, subtitles: each has a class that lists the sentences in order and later joins
their translations. It knows neither a model nor a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from nmt.documents.sentences import Sentence, Splitter, interleave


class Link(NamedTuple):
    """Characters of a translation, and those of the sentence that they follow, each from a first to
    before a last.
    """

    source: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True)
class Translated:
    """The translation of a sentence."""

    text: str
    links: Sequence[Link] = ()  # in the order of the translation, if the document needs them


class Document(Protocol):
    sentences: list[Sentence]
    needs_links: bool  # whether `join` reads the links

    def join(self, translations: Sequence[Translated]) -> str:
        """Return the document with each sentence replaced by its translation."""


class DocumentPart(Protocol):
    """A part of a document with sentences of its own."""

    @property
    def sentences(self) -> Sequence[Sentence]: ...

    def join(self, translations: Sequence[Translated]) -> str: ...


def join_parts(parts: Sequence[str | DocumentPart], translations: Sequence[Translated]) -> str:
    """Join the untranslated parts with the translations of the others, which come in their order."""
    remaining = iter(translations)
    texts = []
    for part in parts:
        if not isinstance(part, str):
            part = part.join(list(islice(remaining, len(part.sentences))))
        texts.append(part)
    return "".join(texts)


@dataclass
class PlainText:
    """Running text, each line a paragraph. Line ends and blank lines stay as they are."""

    text: str
    splitter: Splitter
    needs_links: bool = False
    sentences: list[Sentence] = field(default_factory=list)  # places are those in the text

    def __post_init__(self) -> None:
        start = 0
        for line in self.text.split("\n"):
            for one in self.splitter.split(line):
                self.sentences.append(Sentence(one.text, start + one.start, one.is_part))
            start += len(line) + 1

    def join(self, translations: Sequence[Translated]) -> str:
        texts = [one.text.replace("\n", " ") for one in translations]
        return "".join(interleave(self.text, self.sentences, texts))
