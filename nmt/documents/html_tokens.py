"""HTML as a stream of tags and texts in which every element is closed, as libxml2 reads any text."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import regex
from lxml import etree

from nmt.system.errors import UserError

BLOCKS = frozenset(
    "address article aside audio base blockquote body br button canvas caption center col colgroup dd "
    "details dialog dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 "
    "h6 head header hgroup hr html iframe legend li link main menu meta nav noframes noscript object ol "
    "optgroup option p param picture plaintext pre script search section select source style summary "
    "table tbody td template textarea tfoot th thead title tr track ul video xmp".split()
)

UNTOUCHED = frozenset(
    "audio canvas code iframe kbd math noframes object plaintext pre samp script style sub sup svg "
    "template textarea tt var video xmp".split()
)

VOID_TAGS = frozenset(
    "area base br col embed frame hr img input link meta param source track wbr".split()
)

# Their text is written without entities.
RAW = frozenset(("iframe", "noframes", "plaintext", "script", "style", "xmp"))

OPTIONAL = ("html", "head", "body")  # libxml2 adds them where they are missing


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
        return "" if self.name in VOID_TAGS else f"</{self.name}>"

    @property
    def is_border(self) -> bool:
        return self.name in BLOCKS


class Markup(NamedTuple):
    """Markup that is written unchanged: comments, untouched elements."""

    html: str
    text: str = ""  # what a sentence needs of it
    is_border: bool = False  # between runs


Token = Tag | End | Markup | str


class TokenList:
    """The target that lxml calls while it reads; `close` returns everything."""

    def __init__(self, names: set[str]) -> None:
        self.names = names  # of optional elements that the document has, and that did not begin yet
        self.begun: set[str] = set()
        self.tokens: list[Token] = []
        self.texts: list[str] = []  # since the last tag

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name in OPTIONAL:
            if name not in self.names:
                return
            self.names.remove(name)
            self.begun.add(name)
        words = [name, *(f'{key}="{escape(value)}"' for key, value in attributes.items())]
        classes = attributes.get("class", "").split()
        is_touched = name not in UNTOUCHED and attributes.get("translate") != "no"
        self.add(
            Tag(
                name,
                f"<{' '.join(words)}>",
                is_touched and "notranslate" not in classes,
            )
        )
        if name in VOID_TAGS:
            self.add(End(name))

    def end(self, name: str) -> None:
        if name in VOID_TAGS or (name in OPTIONAL and name not in self.begun):
            return
        self.begun.discard(name)
        self.add(End(name))

    def data(self, text: str) -> None:
        self.texts.append(text)

    def add(self, token: Token) -> None:
        if self.texts:
            self.tokens.append("".join(self.texts))
            self.texts = []
        self.tokens.append(token)

    def comment(self, text: str) -> None:
        self.add(Markup(f"<!--{text}-->"))

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        words = ["<!DOCTYPE", name]
        if public:
            words += ["PUBLIC", f'"{public}"']
        elif system:
            words.append("SYSTEM")
        if system:
            words.append(f'"{system}"')
        self.add(Markup(f"{' '.join(words)}>"))

    def close(self) -> list[Token]:
        self.add("")
        return self.tokens[:-1]


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
                yield Markup("".join(html), "".join(text).strip(), is_border)
                html, text, is_border = [], [], False


def escape_text(text: str) -> str:
    return escape(text, quote=False).replace("\xa0", "&nbsp;")


def write_token(token: Token) -> str:
    return escape_text(token) if isinstance(token, str) else token.html
