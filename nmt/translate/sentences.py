"""Where the sentences of a paragraph begin and end.

A model translates what it was trained on, usually one sentence; of a whole paragraph it translates
the first sentence and drops the rest. `sentencex` finds the sentences, by rules of each language.
Nothing is lost or changed: the sentences and the white space between them are the paragraph. `RunningText`
takes a text apart into sentences, and later joins their translations.

A sentence that does not fit into the model is cut as a last resort: at the end of a clause, otherwise
between two words, otherwise anywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unicodedata import east_asian_width

import regex
import sentencex

# the look-ahead is bounded, or it would take a time in proportion to the square of some texts
CLAUSE_GAP = regex.compile(r"[,;:،؛–—][\"'”’»)\]]{0,5}\s+|[，、；：]")
WIDE_SPACE = regex.compile(r"[^\S\n ]")
MOST_SEGMENTED = 10_000  # characters: sentencex takes the square of the time on rows of quotes
HALF_CHARACTER = regex.compile("[\ud800-\udfff]")
PICTOGRAPH = regex.compile(r"[\p{Extended_Pictographic}\p{Emoji_Modifier}\u200d\ufe0f]")
WORD_GAP = regex.compile(r"\s+")


@dataclass(frozen=True)
class Sentence:
    text: str  # without white space and emoji at its ends
    start: int  # its first character, in the paragraph
    is_part: bool = False  # of a sentence that does not fit into the model

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Splitter:
    """Splits paragraphs of one language into sentences that a model accepts."""

    language: str
    fits: Callable[[str], bool]

    def split(self, paragraph: str) -> list[Sentence]:
        """Return the sentences in order; a blank paragraph has none."""
        sentences: list[Sentence] = []
        start = 0
        for segment in self._segment(paragraph):
            sentences += self._cut(segment, start, is_part=False)
            start += len(segment)
        return sentences

    def _segment(self, paragraph: str) -> Iterator[str]:
        paragraph = HALF_CHARACTER.sub("\ufffd", paragraph)  # sentencex reads UTF-8
        readable = WIDE_SPACE.sub(" ", paragraph)  # it panics behind some of these
        start = 0
        while start < len(paragraph):
            segments = find_segments(self.language, readable[start : start + MOST_SEGMENTED])
            if start + MOST_SEGMENTED < len(paragraph) and len(segments) > 1:
                segments.pop()  # it may continue after what was read
            for segment in segments:
                yield paragraph[start : start + len(segment)]
                start += len(segment)

    def _cut(self, text: str, start: int, is_part: bool) -> Iterator[Sentence]:
        first, last = 0, len(text)
        while first < last and is_edge(text[first]):
            first += 1
        while first < last and is_edge(text[last - 1]):
            last -= 1
        stripped = text[first:last]
        if not stripped:
            return
        start += first
        if len(stripped) == 1 or self.fits(stripped):
            yield Sentence(stripped, start, is_part)
            return
        middle = find_cut(stripped)
        yield from self._cut(stripped[:middle], start, is_part=True)
        yield from self._cut(stripped[middle:], start + middle, is_part=True)


def find_segments(language: str, text: str) -> list[str]:
    try:
        segments: list[str] = sentencex.segment(language, text)
    except BaseException as error:  # it is written in Rust, whose panics are not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return [text]
    return segments


def is_edge(character: str) -> bool:
    """Whether it is copied unchanged before or after a sentence: white space, and emoji, which
    models lose.
    """
    return character.isspace() or PICTOGRAPH.match(character) is not None


def find_cut(text: str) -> int:
    """Return the best place to cut a text: the clause end nearest to its middle if there is one in
    its middle half, otherwise the nearest white space, otherwise the middle.
    """
    middle = len(text) // 2
    for mark in (CLAUSE_GAP, WORD_GAP):
        ends = [match.end() for match in mark.finditer(text)]
        central = [cut for cut in ends if len(text) / 4 <= cut <= 3 * len(text) / 4]
        if central:
            return min(central, key=lambda cut: abs(cut - middle))
    return middle


def is_wide(character: str) -> bool:
    """Whether it belongs to a script that is written without spaces, or to no script."""
    return not character or east_asian_width(character) in "WF"


@dataclass
class RunningText:
    """A text, each line a paragraph. Line ends and blank lines stay as they are."""

    text: str
    splitter: Splitter
    sentences: list[Sentence] = field(default_factory=list)  # placed in the whole text

    def __post_init__(self) -> None:
        start = 0
        for line in self.text.split("\n"):
            for sentence in self.splitter.split(line):
                shifted = Sentence(sentence.text, start + sentence.start, sentence.is_part)
                self.sentences.append(shifted)
            start += len(line) + 1

    def join(self, translations: Sequence[str]) -> str:
        """Return the text with each sentence replaced by its translation. White space stays, but there is
        a space between translations of sentences in Chinese or Japanese, which have none.
        """
        joined: list[str] = []
        done = 0
        for sentence, translation in zip(self.sentences, translations, strict=True):
            gap = self.text[done : sentence.start]
            if joined and not gap and is_wide(self.text[done - 1]) and not is_wide(joined[-1][-1:]):
                gap = " "
            joined += [gap, translation.replace("\n", " ")]
            done = sentence.end
        return "".join([*joined, self.text[done:]])
