"""Pairs of a .tmx file, the XML in which OPUS and translation memories keep them.

expat reads the file as a stream and only one unit is in memory, so that any size takes little. A
declared entity, which could make a small XML large or read other files, is refused.
"""

import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from nmt.config import DataConfig
from nmt.corpus.text_files import TextFile, TextPair, read_byte_blocks
from nmt.system.errors import UserError

CODES = ("bpt", "ept", "it", "ph", "ut")  # elements of a sentence that hold markup, not text


def read_tmx_pairs(text: TextFile, data: DataConfig) -> Iterator[tuple[TextPair, float]]:
    """Yield the pairs from data.src to data.tgt, with the share of the file read by then.

    Units without both languages are skipped.
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
        present = ", ".join(sorted(reader.languages)[:20]) or "none"
        raise UserError(
            f"{text.name}: has no pair from {data.src} to {data.tgt} (languages found: {present}); "
            "set data.src and data.tgt to two of them"
        )


class TmxReader:
    """Takes bytes and returns the pairs that they complete."""

    def __init__(self, name: str, data: DataConfig) -> None:
        self.name = name
        self.src, self.tgt = _normalize(data.src), _normalize(data.tgt)
        self.languages: set[str] = set()  # of the file
        self.pairs: list[TextPair] = []
        self.unit: TreeBuilder | None = None  # of the unit that has begun
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._add_text
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.SkippedEntityHandler = self._refuse_entity

    def feed(self, block: bytes, is_last: bool = False) -> list[TextPair]:
        try:
            self.parser.Parse(block, is_last)
        except expat.ExpatError as error:
            message = expat.errors.messages[error.code]
            raise UserError(
                f"{self.name}:{error.lineno}:{error.offset + 1}: is not well-formed XML "
                f"({message}); repair or download it again"
            ) from None
        except (LookupError, ValueError) as error:  # of its declaration: there is no such encoding
            raise UserError(
                f"{self.name}: is in an encoding that cannot be read ({error}); convert it to UTF-8"
            ) from None
        pairs, self.pairs = self.pairs, []
        return pairs

    def _refuse_entity(self, name: str, *_: object) -> None:
        where = f"{self.name}:{self.parser.CurrentLineNumber}"
        raise UserError(
            f"{where}: declares or uses the entity {name[:40]!r}, which could be any text; "
            "replace it with its text"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self.unit = TreeBuilder()
        if self.unit is not None:
            self.unit.start(name, attributes)

    def _add_text(self, text: str) -> None:
        if self.unit is not None:
            self.unit.data(text)

    def _end(self, name: str) -> None:
        if self.unit is None:
            return
        element = self.unit.end(name)
        if name == "tu":
            self.unit = None
            self._add_pair(element)

    def _add_pair(self, unit: Element) -> None:
        texts: dict[str, str] = {}  # the first of each language
        for variant in unit.iter("tuv"):
            language = variant.get("xml:lang") or variant.get("lang") or ""
            self.languages.add(language[:40])
            for sentence in variant.iter("seg"):
                texts.setdefault(_normalize(language), _read_text(sentence))
        src = _find_text(texts, self.src, not_this=self.tgt)
        tgt = _find_text(texts, self.tgt, not_this=self.src)
        if src is not None and tgt is not None:
            self.pairs.append((src, tgt))


def _read_text(sentence: Element) -> str:
    for name in CODES:
        for code in list(sentence.iter(name)):
            behind = code.tail
            code.clear()
            code.tail = behind
    # A line break comes from the layout of the file, with the spaces around it.
    text = re.sub(r"[ \t\r]*\n[ \t\r\n]*", " ", "".join(sentence.itertext()))
    return text.strip(" ")


def _find_text(texts: dict[str, str], wanted: str, not_this: str) -> str | None:
    """Return the text in a language, or in its first variant, such as en-us."""
    if wanted in texts:
        return texts[wanted]
    for language, text in texts.items():
        if language.startswith(f"{wanted}-") and language != not_this:
            return text
    return None


def _normalize(language: str) -> str:
    return language.strip().lower().replace("_", "-")
