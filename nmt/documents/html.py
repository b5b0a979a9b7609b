"""HTML: its text is translated, and tags, attributes, scripts and code come back as they were.

What lies between two block tags is a run: text with inline elements, such as <b> or <a>. The text of
a run is a paragraph, split into sentences. <code> and other inline elements that are not translated
take part in their sentence, so that the model sees a whole one.
"""

from collections.abc import Iterator, Sequence

import regex

from nmt.documents.document import Translated, join_parts
from nmt.documents.html_tokens import (
    End,
    Markup,
    Tag,
    Token,
    escape_text,
    fold_untouched,
    read_tokens,
    write_token,
)
from nmt.documents.inline_elements import InlineElement, Run
from nmt.documents.sentences import Sentence, Splitter

DEEPEST = 50  # inline elements in one another

LONGEST_REST = 100  # characters of a word beside an element
WORD_START, WORD_END = regex.compile(r"[\w'’-]+\Z"), regex.compile(r"^[\w'’-]+")

LINE_BREAKS = str.maketrans("\t\n\f\r", "    ")  # which are spaces in HTML


class HtmlDocument:
    """A document, or a piece of one."""

    needs_links = True

    def __init__(self, text: str, splitter: Splitter) -> None:
        self.splitter = splitter
        self.sentences: list[Sentence] = []
        self._parts: list[str | Run] = []
        body = text.strip()  # libxml2 drops some white space around it
        start = text.index(body)
        self._parts.append(text[:start])
        run: list[Token] = []
        for token in fold_untouched(read_tokens(body)):
            if not isinstance(token, str) and token.is_border:
                self._end_run(run)
                run = []
                self._parts.append(write_token(token))
            else:
                run.append(token)
        self._end_run(run)
        self._parts.append(text[start + len(body) :])

    def _end_run(self, tokens: Sequence[Token]) -> None:
        """Add a run, or several: the tag of an inline element that has blocks in it is a border too."""
        done = 0
        for border in find_borders(tokens):
            self._add_run(tokens[done:border])
            self._parts.append(write_token(tokens[border]))
            done = border + 1
        self._add_run(tokens[done:])

    def _add_run(self, tokens: Sequence[Token]) -> None:
        """Add a run. Elements with nothing between them, such as the links of a menu, are runs of their own."""
        groups = list(group_elements(tokens))
        if len(groups) > 1:
            for group in groups:
                self._add_run(group)
            return
        run = make_run(tokens, self.splitter)
        if run.sentences:
            self.sentences += run.sentences
            self._parts.append(run)
        else:
            self._parts += map(write_token, tokens)

    def join(self, translations: Sequence[Translated]) -> str:
        return join_parts(self._parts, translations)


def group_elements(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Yield the tokens of each outermost element, and of the white space between them; or all tokens at once
    if there is other text between them.
    """
    groups: list[list[Token]] = []
    n_elements = depth = 0
    for token in tokens:
        if depth == 0:
            groups.append([])
            n_elements += isinstance(token, Tag)
            if isinstance(token, str) and not token.isspace():
                n_elements = -len(tokens)
            if isinstance(token, Markup) and token.text:
                n_elements = -len(tokens)
        groups[-1].append(token)
        depth += isinstance(token, Tag) - isinstance(token, End)
    if n_elements > 1:
        yield from groups
    elif tokens:
        yield tokens


def find_borders(tokens: Sequence[Token]) -> list[int]:
    """Return the places of tags whose other tag is not among the tokens; if tags are nested too
    deeply, of all tags.
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
    root = InlineElement(0, 0, "")
    open_elements = [root]
    texts: list[str] = []
    end = 0
    for token in tokens:
        text = token if isinstance(token, str) else ""
        if isinstance(token, Markup):
            text = token.text
            fixed = InlineElement(end, end + len(text), token.html, has_fixed_text=True)
            open_elements[-1].children.append(fixed)
        elif isinstance(token, Tag):
            after = End(token.name).html
            open_elements.append(InlineElement(end, end, token.html, after))
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


def widen_fixed(parent: InlineElement, text: str) -> None:
    """Let <code> take the rest of its word with it: the s of <code>int</code>s."""
    bounds = [one.start for one in parent.children[1:]] + [parent.stop]
    done = parent.start
    for element, bound in zip(parent.children, bounds, strict=False):
        widen_fixed(element, text)
        if element.has_fixed_text and element.start < element.stop:
            before = WORD_START.search(
                text[max(done, element.start - LONGEST_REST) : element.start]
            )
            after = WORD_END.search(text[element.stop : min(bound, element.stop + LONGEST_REST)])
            rests = [found[0] if found else "" for found in (before, after)]
            element.before = f"{escape_text(rests[0])}{element.before}{escape_text(rests[1])}"
            element.start -= len(rests[0])
            element.stop += len(rests[1])
        done = element.stop
