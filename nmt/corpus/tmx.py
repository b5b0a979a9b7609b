"""Pairs of a .tmx file, the XML in which OPUS and translation memories keep them.

expat reads the file as a stream, so that any size takes little memory. What makes a small XML large
or lets it read other files, a declared entity, is refused, and so is whatever else would grow:
deep nesting, ever new names, tokens and sentences without end.
"""

import re
from collections.abc import Iterator
from xml.parsers import expat

from nmt.config import DataConfig
from nmt.corpus.text_files import TextFile, read_byte_blocks
from nmt.system.errors import UserError

CODES = {"bpt", "ept", "it", "ph", "ut"}  # elements of a sentence that hold markup, not text
MAX_TMX_DEPTH = 100
MAX_NAMES = 10_000
MAX_TMX_BYTES = 16 << 20  # of a sentence or of a token
TmxPair = tuple[str, str]


def read_tmx_pairs(text: TextFile, data: DataConfig) -> Iterator[tuple[TmxPair, float]]:
    """Yield the pairs from data.src to data.tgt, with the share of the file read by then.

    A unit that lacks one of the languages is no pair.
    """
    reader = TmxReader(text.name, data)
    n = 0
    for block, share in read_byte_blocks(text):
        for pair in reader.feed(block):
            n += 1
            yield pair, share
    for pair in reader.feed(b"", is_last=True):
        n += 1
        yield pair, 1.0
    if not n:
        found = ", ".join(sorted(reader.languages)[:20]) or "none"
        raise UserError(
            f"{text.name}: has no pair from {data.src} to {data.tgt} (languages found: {found}); "
            "set data.src and data.tgt to two of them"
        )


class TmxReader:
    """Takes bytes and returns the pairs that they complete."""

    def __init__(self, name: str, data: DataConfig) -> None:
        self.name = name
        self.wanted = (_normalize(data.src), _normalize(data.tgt))
        self.languages: set[str] = set()  # of the file, some of them
        self.pairs: list[TmxPair] = []
        self.n_bytes = 0
        self.depth = 0
        self.texts: dict[str, str] = {}  # of the current unit, by language
        self.language = ""
        self.parts: list[str] | None = None  # of the current sentence
        self.n_characters = 0
        self.n_codes = 0  # how many elements of markup are open in it
        self.parser = expat.ParserCreate(intern={})
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._add_text
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity

    def feed(self, block: bytes, is_last: bool = False) -> list[TmxPair]:
        try:
            self.parser.Parse(block, is_last)
        except expat.ExpatError as error:
            message = expat.errors.messages[error.code]
            raise UserError(
                f"{self.name}:{error.lineno}:{error.offset + 1}: is not well-formed XML "
                f"({message}); repair or download it again"
            ) from None
        self.n_bytes += len(block)
        if self.n_bytes - self.parser.CurrentByteIndex > MAX_TMX_BYTES:
            raise self._complain(f"has a tag or comment of more than {MAX_TMX_BYTES:,} bytes")
        if len(self.parser.intern) > MAX_NAMES:
            raise self._complain(f"has more than {MAX_NAMES:,} different names of elements")
        pairs, self.pairs = self.pairs, []
        return pairs

    def _complain(self, what: str) -> UserError:
        place = f"{self.name}:{self.parser.CurrentLineNumber}"
        return UserError(f"{place}: {what}; is it a .tmx file?")

    def _refuse_entity(self, name: str, *_: object) -> None:
        place = f"{self.name}:{self.parser.CurrentLineNumber}"
        raise UserError(
            f"{place}: declares or uses the entity {name[:40]!r}, which could stand for any text; "
            "replace it with its text"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > MAX_TMX_DEPTH:
            raise self._complain(f"has more than {MAX_TMX_DEPTH} elements inside each other")
        if name == "tu":
            self.texts = {}
        elif name == "tuv":
            language = attributes.get("xml:lang") or attributes.get("lang") or ""
            self.language = _normalize(language)
            if len(self.languages) < MAX_NAMES:
                self.languages.add(language[:40])
        elif name == "seg":
            self.parts, self.n_characters, self.n_codes = [], 0, 0
        elif name in CODES:
            self.n_codes += 1

    def _add_text(self, text: str) -> None:
        if self.parts is None or self.n_codes:
            return
        self.parts.append(text)
        self.n_characters += len(text)
        if self.n_characters > MAX_TMX_BYTES:
            raise self._complain(f"has a sentence of more than {MAX_TMX_BYTES:,} characters")

    def _end(self, name: str) -> None:
        self.depth -= 1
        if name == "seg" and self.parts is not None:
            # A line break comes from the layout of the file, with the spaces around it.
            text = re.sub(r"[ \t\r]*\n[ \t\r\n]*", " ", "".join(self.parts))
            if len(self.texts) < MAX_TMX_DEPTH:
                self.texts.setdefault(self.language, text.strip(" "))
            self.parts = None
        elif name in CODES:
            self.n_codes -= 1
        elif name == "tu":
            src = self._find_text(self.wanted[0], not_this=self.wanted[1])
            tgt = self._find_text(self.wanted[1], not_this=self.wanted[0])
            if src is not None and tgt is not None:
                self.pairs.append((src, tgt))
            self.texts = {}

    def _find_text(self, wanted: str, not_this: str) -> str | None:
        """Return the text of the unit in a language, else in its first variant, such as en-us."""
        if wanted in self.texts:
            return self.texts[wanted]
        for language, text in self.texts.items():
            if language.startswith(f"{wanted}-") and language != not_this:
                return text
        return None


def _normalize(language: str) -> str:
    return language.strip().lower().replace("_", "-")
