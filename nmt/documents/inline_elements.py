"""Puts inline elements, such as <b> and <a>, around the right words of a translation.

The translation of a run has its words in another order. Each element comes back once, around the
target words that correspond to its source words, by the links of the translation. If elements of one
parent would overlap, the earlier one takes precedence. An element with fixed text, such as <code>,
replaces the words that correspond to it.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import regex

from nmt.documents.document import Translated
from nmt.documents.html_tokens import escape_text
from nmt.documents.sentences import Sentence, interleave

WORD = regex.compile(r"\w+(?:[-'’]\w+)*|\S")

NO_SPACE = regex.compile(r"\S")


@dataclass
class InlineElement:
    """An inline element of a run, or what replaces one."""

    start: int  # of its text, in the text of the run
    stop: int
    before: str  # what is written before its words, or instead of them
    after: str = ""
    has_fixed_text: bool = False
    children: list["InlineElement"] = field(default_factory=list)


class Word(NamedTuple):
    """A word of a translated run, and the place in the text of the run that it follows."""

    start: int
    stop: int
    source: tuple[int, int]
    sentence: int  # the number of its sentence in the run


@dataclass
class Run:
    """Inline text, as it was and as its sentences are."""

    text: str
    root: InlineElement
    sentences: list[Sentence]

    def join(self, translations: Sequence[Translated]) -> str:
        parts = interleave(self.text, self.sentences, [one.text for one in translations])
        words: list[Word] = []
        start = 0
        for number, translated in enumerate(translations):
            start += len(parts[2 * number])
            words += find_words(number, self.sentences[number], translated, start)
            start += len(translated.text)
        text = "".join(parts)
        placed = place_children(self, self.root, text, words, 0, len(text))
        return write_children(placed, text, 0, len(text))

    def is_blank(self, start: int, stop: int) -> bool:
        return NO_SPACE.search(self.text, start, stop) is None

    def is_spaced(self, element: InlineElement) -> bool:
        """Whether there is white space on both sides of an element."""
        before = self.text[max(0, element.start - 1)]
        after = self.text[element.stop : element.stop + 1]
        return before.isspace() and after.isspace()

    def find_words_of(self, words: Sequence[Word], start: int, stop: int) -> tuple[int, int]:
        """Return the range of the words whose sentences have some of these characters."""
        first = bisect_right(self.sentences, start, key=lambda one: one.end)
        last = bisect_left(self.sentences, stop, key=lambda one: one.start)
        return (
            bisect_left(words, first, key=lambda word: word.sentence),
            bisect_left(words, max(last, first + 1), key=lambda word: word.sentence),
        )


def find_words(
    number: int, sentence: Sentence, translated: Translated, start: int
) -> Iterator[Word]:
    """Yield the words of a translation that begins at `start`, each with the characters that it follows;
    without links, those at the same part of the sentence.
    """
    followed: dict[int, tuple[int, int]] = {}  # by characters of the translation
    for link in translated.links:
        for place in range(*link.target):
            followed.setdefault(place, link.source)
    scale = len(sentence.text) / max(1, len(translated.text))
    for found in WORD.finditer(translated.text):
        begin, end = found.span()
        middle = int(scale * (begin + end) / 2)
        sources = Counter(followed[place] for place in range(begin, end) if place in followed)
        first, last = middle, middle + 1
        if sources:
            ((first, last), _) = sources.most_common(1)[0]
        source = sentence.start + first, sentence.start + last
        yield Word(start + begin, start + end, source, number)


@dataclass(frozen=True)
class PlacedElement:
    element: InlineElement
    start: int  # in the translation
    stop: int
    children: list["PlacedElement"]
    space: str  # after it


def place_children(
    run: Run, parent: InlineElement, text: str, words: Sequence[Word], start: int, stop: int
) -> list[PlacedElement]:
    """Find the places of a parent's children among its words, in a translation between `start` and `stop`."""
    placed = []
    is_free = [True] * len(words)
    for element in parent.children:
        first, last = choose_words(run, parent, element, words, is_free)
        is_free[first:last] = [False] * (last - first)
        chosen = words[first:last]
        space = ""
        if chosen:
            begin, end = chosen[0].start, chosen[-1].stop
        else:
            begin = find_gap(run, parent, element, words, start, stop)
            is_spaced = start < begin < stop and run.is_spaced(element)
            if is_spaced and text[begin - 2 : begin].isspace():
                begin -= 1  # there is one space for each side
            elif is_spaced:
                space = " "
            end = begin
        children = place_children(run, element, text, chosen, begin, end)
        placed.append(PlacedElement(element, begin, end, children, space))
    return placed


def choose_words(
    run: Run,
    parent: InlineElement,
    element: InlineElement,
    words: Sequence[Word],
    is_free: Sequence[bool],
) -> tuple[int, int]:
    """Choose neighbouring words: most that follow the element's text, and fewest others. Return the place
    of the first, and that after the last.
    """
    if run.is_blank(element.start, element.stop):
        return 0, 0
    if run.is_blank(parent.start, element.start) and run.is_blank(element.stop, parent.stop):
        return 0, len(words)  # the element has all text of its parent
    first, last = run.find_words_of(words, element.start, element.stop)
    cost = last - first if element.has_fixed_text else 1  # of a word that it would replace wrongly
    best, best_sum = (0, 0), 0
    begin, total = first, 0
    for place in range(first, last):
        if total <= 0 or not is_free[place]:
            begin, total = place, 0
        if not is_free[place]:
            begin = place + 1
            continue
        source = words[place].source
        is_own = source[0] < element.stop and source[1] > element.start
        total += 1 if is_own else -cost
        if total > best_sum:
            best, best_sum = (begin, place + 1), total
    if best_sum or element.has_fixed_text:
        return best
    middle = (element.start + element.stop) / 2
    free = [place for place in range(first, last) if is_free[place]]
    nearest = min(free, key=lambda place: abs(sum(words[place].source) / 2 - middle), default=None)
    return (0, 0) if nearest is None else (nearest, nearest + 1)


def find_gap(
    run: Run,
    parent: InlineElement,
    element: InlineElement,
    words: Sequence[Word],
    start: int,
    stop: int,
) -> int:
    """Return the place of an element without words: before the word that follows the text after it."""
    if run.is_blank(parent.start, element.start):
        return start
    if run.is_blank(element.stop, parent.stop):
        return stop
    first, last = run.find_words_of(words, element.stop, element.stop + 1)
    after = [word for word in words[first:last] if word.source[1] > element.stop]
    if after:
        return min(after, key=lambda word: word.source).start
    return words[last - 1].stop if last else start


def write_children(placed: Sequence[PlacedElement], text: str, start: int, stop: int) -> str:
    """Write the part of a translation from `start` to before `stop` with the elements in it."""
    parts = []
    done = start
    for one in sorted(placed, key=lambda one: (one.start, one.stop)):
        first = max(done, one.start)
        last = max(first, one.stop)
        parts += [escape_text(text[done:first]), one.element.before]
        if not one.element.has_fixed_text:
            parts.append(write_children(one.children, text, first, last))
        parts.append(one.element.after)
        parts.append(one.space)
        done = last
    return "".join([*parts, escape_text(text[done:stop])])
