"""HTML: its text is translated, and tags, attributes, scripts and code come back as they were.

libxml2 reads the document as a stream of tags and text, in which every element is closed. What lies
between two block tags is a run: text with inline elements, such as <b> or <a>. The text of a run is
a paragraph, split into sentences.

The translation of a run has its words in another order. Each inline element comes back once, around
the words that follow the words it had, as the links of a translation tell; where elements of one
parent would overlap, the earlier one is served first. <code> and other inline elements that are not
translated take part in their sentence, so that the model sees a whole one, and then replace the
words that follow them.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import regex
from lxml import etree

from nmt.documents.document import Translated
from nmt.documents.sentences import Sentence, Splitter, interleave
from nmt.system.errors import UserError

BLOCKS = frozenset(
    "address article aside audio base blockquote body br button canvas caption center col colgroup dd "
    "details dialog dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 "
    "h6 head header hgroup hr html iframe legend li link main menu meta nav noframes noscript object ol "
    "optgroup option p param picture plaintext pre script search section select source style summary "
    "table tbody td template textarea tfoot th thead title tr track ul video xmp".split()
)
UNTOUCHED = frozenset(
    "audio canvas code iframe kbd math noframes object plaintext pre samp script style svg template "
    "textarea tt var video xmp".split()
)
EMPTY = frozenset(
    "area base br col embed frame hr img input link meta param source track wbr".split()
)
# Their text is written without entities.
RAW = frozenset(("iframe", "noframes", "plaintext", "script", "style", "xmp"))
DEEPEST = 50  # inline elements in one another
OPTIONAL = ("html", "head", "body")  # libxml2 adds them where they are missing
WORD = regex.compile(r"\w+(?:[-'’]\w+)*|\S")
WORD_START, WORD_END = regex.compile(r"[\w'’-]+\Z"), regex.compile(r"^[\w'’-]+")
NO_SPACE = regex.compile(r"\S")
LINE_BREAKS = str.maketrans("\t\n\f\r", "    ")  # which are spaces in HTML


class Tag(NamedTuple):
    name: str
    html: str
    is_touched: bool  # whether the text of the element is translated

    @property
    def is_border(self) -> bool:
        return self.name in BLOCKS


class End(NamedTuple):
    name: str

    @property
    def html(self) -> str:
        return "" if self.name in EMPTY else f"</{self.name}>"

    @property
    def is_border(self) -> bool:
        return self.name in BLOCKS


class Markup(NamedTuple):
    """What is written as it is: comments, untouched elements."""

    html: str
    text: str = ""  # what a sentence needs of it
    is_border: bool = False  # between runs


Token = Tag | End | Markup | str


@dataclass
class Element:
    """An inline element of a run, or what takes the place of one."""

    start: int  # of its text, in the text of the run
    stop: int
    before: str  # what is written before its words, or instead of them
    after: str = ""
    has_fixed_text: bool = False
    children: list["Element"] = field(default_factory=list)


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
    root: Element
    sentences: list[Sentence]

    def is_blank(self, start: int, stop: int) -> bool:
        return NO_SPACE.search(self.text, start, stop) is None

    def find_words_of(self, words: Sequence[Word], start: int, stop: int) -> tuple[int, int]:
        """Return the range of the words whose sentences have some of these characters."""
        first = bisect_right(self.sentences, start, key=lambda one: one.end)
        last = bisect_left(self.sentences, stop, key=lambda one: one.start)
        return (
            bisect_left(words, first, key=lambda word: word.sentence),
            bisect_left(words, max(last, first + 1), key=lambda word: word.sentence),
        )


class Html:
    """A document, or a piece of one."""

    needs_links = True

    def __init__(self, text: str, splitter: Splitter) -> None:
        self.splitter = splitter
        self.sentences: list[Sentence] = []
        self._parts: list[str | Run] = []
        body = text.lstrip()
        self._parts.append(text[: len(text) - len(body)])  # libxml2 drops it
        run: list[Token] = []
        for token in fold_untouched(read_tokens(body)):
            if not isinstance(token, str) and token.is_border:
                self._end_run(run)
                run = []
                self._parts.append(write_token(token))
            else:
                run.append(token)
        self._end_run(run)

    def _end_run(self, tokens: Sequence[Token]) -> None:
        """Add a run, or several: the tag of an inline element that has blocks in it is a border too."""
        done = 0
        for border in find_borders(tokens):
            self._add_run(tokens[done:border])
            self._parts.append(write_token(tokens[border]))
            done = border + 1
        self._add_run(tokens[done:])

    def _add_run(self, tokens: Sequence[Token]) -> None:
        run = make_run(tokens, self.splitter)
        if run.sentences:
            self.sentences += run.sentences
            self._parts.append(run)
        else:
            self._parts += map(write_token, tokens)

    def join(self, translations: Sequence[Translated]) -> str:
        parts = []
        done = 0
        for part in self._parts:
            if isinstance(part, Run):
                n = len(part.sentences)
                parts.append(write_run(part, translations[done : done + n]))
                done += n
            else:
                parts.append(part)
        return "".join(parts)


# ---- reading -----------------------------------------------------------------------------------------


class TokenList:
    """What lxml calls while it reads; `close` returns everything."""

    def __init__(self, names: set[str]) -> None:
        self.names = names  # of optional elements that the document has, and that did not begin yet
        self.begun: set[str] = set()
        self.tokens: list[Token] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name in OPTIONAL:
            if name not in self.names:
                return
            self.names.remove(name)
            self.begun.add(name)
        words = [name, *(f'{key}="{escape(value)}"' for key, value in attributes.items())]
        classes = attributes.get("class", "").split()
        is_touched = name not in UNTOUCHED and attributes.get("translate") != "no"
        self.tokens.append(
            Tag(
                name,
                f"<{' '.join(words)}>",
                is_touched and "notranslate" not in classes,
            )
        )
        if name in EMPTY:
            self.tokens.append(End(name))

    def end(self, name: str) -> None:
        if name in EMPTY or (name in OPTIONAL and name not in self.begun):
            return
        self.begun.discard(name)
        self.tokens.append(End(name))

    def data(self, text: str) -> None:
        if self.tokens and isinstance(self.tokens[-1], str):
            self.tokens[-1] += text
        else:
            self.tokens.append(text)

    def comment(self, text: str) -> None:
        self.tokens.append(Markup(f"<!--{text}-->"))

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        words = ["<!DOCTYPE", name]
        if public:
            words += ["PUBLIC", f'"{public}"']
        elif system:
            words.append("SYSTEM")
        if system:
            words.append(f'"{system}"')
        self.tokens.append(Markup(f"{' '.join(words)}>"))

    def close(self) -> list[Token]:
        return self.tokens


def read_tokens(text: str) -> list[Token]:
    """Read the tags and texts of a document, in which each element is closed."""
    if not text:
        return []
    names = {name for name in OPTIONAL if regex.search(rf"(?i)<{name}[\s/>]", text)}
    parser = etree.HTMLParser(target=TokenList(names), huge_tree=True)
    try:
        parser.feed(text)
        tokens: list[Token] = parser.close()
    except (etree.LxmlError, IndexError, UnicodeEncodeError):  # for example of one broken tag alone
        raise UserError("the HTML cannot be read; correct it, or send it as text") from None
    return tokens


def fold_untouched(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens, with each element that is not translated as one."""
    names: list[str] = []  # of an untouched element and those in it
    html: list[str] = []
    text: list[str] = []
    is_border = False
    for token in tokens:
        if isinstance(token, Tag) and (names or not token.is_touched):
            is_border = is_border or token.is_border
            names.append(token.name)
        if not names:
            yield token
            continue
        if isinstance(token, str):
            text.append(token)
        is_raw = isinstance(token, str) and names[-1] in RAW
        html.append(str(token) if is_raw else write_token(token))
        if isinstance(token, End):
            names.pop()
            if not names:
                yield Markup("".join(html), "".join(text), is_border)
                html, text, is_border = [], [], False


def find_borders(tokens: Sequence[Token]) -> list[int]:
    """Return the places of tags whose other tag is not among the tokens; where they are nested too deeply,
    of all.
    """
    borders: list[int] = []
    open_places: list[int] = []
    depth = 0
    for place, token in enumerate(tokens):
        if isinstance(token, Tag):
            open_places.append(place)
            depth = max(depth, len(open_places))
        elif isinstance(token, End) and open_places:
            open_places.pop()
        elif isinstance(token, End):
            borders.append(place)
    if depth > DEEPEST:
        return [place for place, token in enumerate(tokens) if isinstance(token, Tag | End)]
    return borders + open_places


def make_run(tokens: Sequence[Token], splitter: Splitter) -> Run:
    """Make the run of tokens of which each tag has its other one. It has no sentences if there is nothing
    to translate.
    """
    root = Element(0, 0, "")
    open_elements = [root]
    texts: list[str] = []
    end = 0
    for token in tokens:
        text = token if isinstance(token, str) else ""
        if isinstance(token, Markup):
            text = token.text
            fixed = Element(end, end + len(text), token.html, has_fixed_text=True)
            open_elements[-1].children.append(fixed)
        elif isinstance(token, Tag):
            after = End(token.name).html
            open_elements.append(Element(end, end, token.html, after))
            open_elements[-2].children.append(open_elements[-1])
        elif isinstance(token, End):
            open_elements.pop().stop = end
        texts.append(text)
        end += len(text)
    root.stop = end
    text = "".join(texts)
    widen_fixed(root, text)
    is_translated = any(isinstance(token, str) and not token.isspace() for token in tokens)
    sentences = splitter.split(text.translate(LINE_BREAKS)) if is_translated else []
    return Run(text, root, sentences)


def widen_fixed(parent: Element, text: str) -> None:
    """Let <code> take the rest of its word with it: the s of <code>int</code>s."""
    bounds = [one.start for one in parent.children[1:]] + [parent.stop]
    done = parent.start
    for element, bound in zip(parent.children, bounds, strict=False):
        widen_fixed(element, text)
        if element.has_fixed_text and element.start < element.stop:
            before = WORD_START.search(text[done : element.start])
            after = WORD_END.search(text[element.stop : bound])
            rests = [found[0] if found else "" for found in (before, after)]
            element.before = f"{write_text(rests[0])}{element.before}{write_text(rests[1])}"
            element.start -= len(rests[0])
            element.stop += len(rests[1])
        done = element.stop


# ---- writing -----------------------------------------------------------------------------------------


def write_text(text: str) -> str:
    return escape(text, quote=False).replace("\xa0", "&nbsp;")


def write_token(token: Token) -> str:
    return write_text(token) if isinstance(token, str) else token.html


def write_run(run: Run, translations: Sequence[Translated]) -> str:
    parts = interleave(run.text, run.sentences, [one.text for one in translations])
    words: list[Word] = []
    start = 0
    for number, translated in enumerate(translations):
        start += len(parts[2 * number])
        words += find_words(number, run.sentences[number], translated, start)
        start += len(translated.text)
    text = "".join(parts)
    placed = place_children(run, run.root, words, 0, len(text))
    return write_children(placed, text, 0, len(text))


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
        first, last = (
            max(sources, key=lambda one: sources[one]) if sources else (middle, middle + 1)
        )
        source = sentence.start + first, sentence.start + last
        yield Word(start + begin, start + end, source, number)


@dataclass(frozen=True)
class PlacedElement:
    element: Element
    start: int  # in the translation
    stop: int
    children: list["PlacedElement"]
    space: str  # after it


def place_children(
    run: Run, parent: Element, words: Sequence[Word], start: int, stop: int
) -> list[PlacedElement]:
    """Find the places of a parent's children among its words, between `start` and `stop`."""
    placed = []
    is_free = [True] * len(words)
    for element in parent.children:
        first, last = choose_words(run, parent, element, words, is_free)
        is_free[first:last] = [False] * (last - first)
        chosen = words[first:last]
        begin = chosen[0].start if chosen else find_gap(run, parent, element, words, start, stop)
        end = chosen[-1].stop if chosen else begin
        children = place_children(run, element, chosen, begin, end)
        before, after = (
            run.text[max(0, element.start - 1)],
            run.text[element.stop : element.stop + 1],
        )
        space = " " if not chosen and before.isspace() and after.isspace() else ""
        placed.append(PlacedElement(element, begin, end, children, space))
    return placed


def choose_words(
    run: Run, parent: Element, element: Element, words: Sequence[Word], is_free: Sequence[bool]
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
    run: Run, parent: Element, element: Element, words: Sequence[Word], start: int, stop: int
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
        parts += [write_text(text[done:first]), one.element.before]
        if not one.element.has_fixed_text:
            parts.append(write_children(one.children, text, first, last))
        parts.append(one.element.after)
        parts.append(one.space)
        done = last
    return "".join([*parts, write_text(text[done:stop])])
