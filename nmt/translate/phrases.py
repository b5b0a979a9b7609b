"""Phrases that a translation must not contain, and phrases that it must contain.

A text contains a phrase if it has the phrase's words in this order, with white space between them, and no letter,
digit, mark or underscore directly before or after: see the regular expression of `make_pattern`. Case matters. The
search follows the characters of the pieces, so it does not matter how the model cuts a phrase into pieces, or that
it spells a character in bytes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import regex
import torch
from torch import Tensor

from nmt.corpus.text_files import TextFile, read_lines
from nmt.data.vocab import EOS, Vocab
from nmt.system.errors import UserError

WORD_CHARACTER = regex.compile(r"\w")
WHITE_SPACE = regex.compile(r"\s+")
TOKEN = regex.compile(r"\w+|\S")
END = torch.tensor([EOS])
NO_PIECES = torch.tensor([], dtype=torch.int64)


def make_pattern(phrase: str) -> regex.Pattern[str]:
    words = r"\s+".join(map(regex.escape, phrase.split(" ")))
    return regex.compile(rf"(?<!\w){words}(?!\w)")


def is_word(character: str) -> bool:
    return WORD_CHARACTER.match(character) is not None


def is_space(character: str) -> bool:
    return WHITE_SPACE.match(character) is not None


def tidy_phrase(text: str) -> str:
    """Return the words of a phrase with one space between them."""
    return WHITE_SPACE.sub(" ", text).strip(" ")


# ---- files --------------------------------------------------------------------------------------------------------


def read_forbidden(path: str) -> list[str]:
    """Read phrases, one per line. Empty lines are skipped."""
    phrases = [tidy_phrase(line) for line in read_lines(TextFile(Path(path)))]
    phrases = [phrase for phrase in phrases if phrase]
    if not phrases:
        raise UserError(f"{path}: has no phrases; give one per line, or leave out --forbid")
    return phrases


def read_glossary(path: str) -> dict[str, str]:
    """Read lines `phrase of the source TAB phrase of the translation`."""
    glossary: dict[str, str] = {}
    for number, line in enumerate(read_lines(TextFile(Path(path))), 1):
        if not line.strip():
            continue
        source, *targets = map(tidy_phrase, line.split("\t"))
        if len(targets) != 1 or not source or not targets[0]:
            raise UserError(
                f"{path}:{number}: is not of the form SOURCE PHRASE, tab, TARGET PHRASE; correct it"
            )
        if glossary.setdefault(source, targets[0]) != targets[0]:
            raise UserError(
                f"{path}:{number}: {source!r} has a second translation; keep one of the two"
            )
    if not glossary:
        raise UserError(f"{path}: has no phrases; give some, or leave out --glossary")
    return glossary


# ---- what a hypothesis has said -----------------------------------------------------------------------------------


class PhraseState(NamedTuple):
    """What is remembered of a hypothesis's text, to decide what may follow."""

    is_boundary: bool  # the text does not end in a word character, so a phrase may begin next
    # (phrase, n): the text ends in the first n characters of the phrase, which may be all of them
    begun: frozenset[tuple[str, int]]
    met: frozenset[str]  # required phrases that the text contains
    tail: bytes = b""  # of a character that is not whole yet

    @property
    def ended(self) -> set[str]:
        """The phrases whose last character is that of the text."""
        return {phrase for phrase, n in self.begun if n == len(phrase)}


START = PhraseState(True, frozenset(), frozenset())


def read_text(
    state: PhraseState, text: str, phrases_by_first: dict[str, list[str]]
) -> tuple[bool, set[tuple[str, int]], set[str]]:
    """Follow a text character by character; return the new `is_boundary` and `begun`, and the phrases found."""
    is_boundary, begun = state.is_boundary, set(state.begun)
    found = set()
    for character in text:
        ends_word = not is_word(character)
        if is_space(character):
            character = " "
        after = set()
        for phrase, n in begun:
            if n == len(phrase):
                if ends_word:
                    found.add(phrase)
            elif phrase[n] == character:
                after.add((phrase, n + 1))
            elif character == " " and phrase[n - 1] == " ":  # more white space
                after.add((phrase, n))
        if is_boundary:
            after.update((phrase, 1) for phrase in phrases_by_first.get(character, ()))
        is_boundary, begun = ends_word, after
    return is_boundary, begun, found


def read_bytes_after(tail: bytes, text: str | bytes) -> tuple[str, bytes]:
    """Return the characters that a piece completes behind the bytes of one, and the bytes that it leaves."""
    if not text:
        return "", tail
    if isinstance(text, str):
        return ("\ufffd" if tail else "") + text, b""
    try:
        return (tail + text).decode(), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return "", tail + text
    if not tail:
        return "\ufffd", b""
    more, rest = read_bytes_after(b"", text)  # the byte does not belong to those before
    return "\ufffd" + more, rest


def count_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def group_by_first(phrases: Sequence[str]) -> dict[str, list[str]]:
    groups = defaultdict(list)
    for phrase in phrases:
        groups[phrase[0]].append(phrase)
    return dict(groups)


class Glossary:
    """Phrases of the source, and the phrase of the translation for each."""

    def __init__(self, terms: Mapping[str, str]) -> None:
        self.terms = terms
        self.sources_by_token: dict[str, list[str]] = defaultdict(list)
        for source in terms:
            self.sources_by_token[TOKEN.match(source)[0]].append(source)

    def list_targets(self, source: str) -> list[str]:
        """List the phrases that the translation of a line must contain. If one phrase contains
        another, the longest counts.
        """
        spans = list(self._find_terms(source))
        targets = []
        for first, last, target in spans:
            is_inside = any(a <= first and last <= b and b - a > last - first for a, b, _ in spans)
            if not is_inside:
                targets.append(target)
        return targets

    def _find_terms(self, source: str) -> Iterator[tuple[int, int, str]]:
        for token in set(TOKEN.findall(source)):
            for term in self.sources_by_token.get(token, ()):
                for match in make_pattern(term).finditer(source):
                    yield *match.span(), self.terms[term]


class PhraseRules:
    """The forbidden phrases and the glossary, which hold for all lines, and the texts of the pieces."""

    def __init__(
        self,
        texts: Sequence[str | bytes],
        forbidden: Sequence[str] = (),
        glossary: dict[str, str] | None = None,
    ) -> None:
        self.texts, self.forbidden = texts, frozenset(forbidden)
        self.glossary = Glossary(glossary or {})
        self.forbidden_by_first = group_by_first(sorted(self.forbidden))
        self.by_text: dict[str, list[int]] = defaultdict(list)
        self.by_first: dict[str, list[int]] = defaultdict(list)
        not_words = []
        self.byte_pieces: dict[bytes, int] = {}
        for piece, text in enumerate(texts):
            if isinstance(text, bytes):
                self.byte_pieces[text] = piece
            elif text:
                self.by_text[text].append(piece)
                self.by_first[" " if is_space(text[0]) else text[0]].append(piece)
                if not is_word(text[0]):
                    not_words.append(piece)
        self.not_words = torch.tensor(not_words, dtype=torch.int64)  # they end the word before
        with_text = [piece for piece, text in enumerate(texts) if text and isinstance(text, str)]
        self.with_text = torch.tensor(with_text, dtype=torch.int64)
        self.banned_whole = {  # pieces that hold a whole forbidden phrase, by whether one may begin
            is_boundary: self._find_whole(is_boundary) for is_boundary in (False, True)
        }
        self.banned_ends: dict[tuple[str, int], Tensor] = {}
        self.without_required = LinePhrases(self, ())

    @classmethod
    def from_files(cls, vocab: Vocab, forbid: str | None, glossary: str | None) -> "PhraseRules":
        texts = vocab.list_texts()
        forbidden = [] if forbid is None else read_forbidden(forbid)
        terms = {} if glossary is None else read_glossary(glossary)
        characters = set(texts)
        for target in terms.values():
            for character in target:
                if character not in characters and b"\0" not in characters:
                    raise UserError(
                        f"{glossary}: {target!r}: the vocabulary has no {character!r}, so the model cannot "
                        "write it; leave it out"
                    )
        return cls(texts, forbidden, terms)

    def for_line(self, source: str, demanded: Sequence[str] = ()) -> "LinePhrases":
        """Return the phrases for the translation of one line: those the glossary requires, and those demanded."""
        required = [*map(tidy_phrase, demanded), *self.glossary.list_targets(source)]
        required = [phrase for phrase in dict.fromkeys(required) if phrase]
        return LinePhrases(self, tuple(required)) if required else self.without_required

    def _find_whole(self, is_boundary: bool) -> Tensor:
        state = PhraseState(is_boundary, frozenset(), frozenset())
        pieces = []
        for piece, text in enumerate(self.texts if self.forbidden else ()):
            if isinstance(text, bytes):
                continue
            has_end = not all(map(is_word, text[1:]))
            if has_end and read_text(state, text, self.forbidden_by_first)[2]:
                pieces.append(piece)
        return torch.tensor(pieces, dtype=torch.int64)

    def find_ends(self, phrase: str, n: int) -> Tensor:
        """Find the pieces that complete a forbidden phrase, if the text ends in its first `n` characters."""
        if n == len(phrase):
            return self.not_words
        if (phrase, n) not in self.banned_ends:
            candidates = list(self.by_first.get(phrase[n], ()))
            if phrase[n - 1] == " ":
                candidates += self.by_first.get(" ", ())
            state = PhraseState(False, frozenset([(phrase, n)]), frozenset())
            ends = [
                piece for piece in candidates if read_text(state, str(self.texts[piece]), {})[2]
            ]
            self.banned_ends[phrase, n] = torch.tensor(ends, dtype=torch.int64)
        return self.banned_ends[phrase, n]


class LinePhrases:
    """The phrases of one line, and what may follow a hypothesis with them."""

    def __init__(self, rules: PhraseRules, required: Sequence[str]) -> None:
        self.rules, self.required = rules, tuple(required)
        self.by_first = rules.forbidden_by_first
        if required:
            self.by_first = group_by_first([*rules.forbidden, *required])

    @property
    def n_needed(self) -> int:
        """A number of pieces that is enough to write all required phrases."""
        length = len if not self.rules.byte_pieces else count_bytes
        return sum(length(phrase) + 2 for phrase in self.required)

    def advance(self, state: PhraseState, piece: int) -> PhraseState:
        if piece == EOS:
            met = state.met | state.ended.intersection(self.required)
            return PhraseState(True, frozenset(), met)
        text = self.rules.texts[piece]
        text, tail = read_bytes_after(state.tail, text)
        is_boundary, begun, found = read_text(state, text, self.by_first)
        met = state.met | found.intersection(self.required)
        begun = {one for one in begun if one[0] not in met}
        return PhraseState(is_boundary, frozenset(begun), met, tail)

    def may_end(self, state: PhraseState) -> bool:
        """Return whether eos may follow: unless it completes a forbidden phrase or a required one is missing."""
        return self.rules.forbidden.isdisjoint(state.ended) and not self.find_missing(state)

    def may_end_after(self, state: PhraseState, piece: int) -> bool:
        return piece == EOS or self.may_end(self.advance(state, piece))

    def find_banned(self, state: PhraseState) -> list[Tensor]:
        """Find the pieces that must not follow, because they complete a forbidden phrase, and eos if it must not."""
        banned = [self.rules.banned_whole[state.is_boundary]]
        forbidden = [one for one in state.begun if one[0] in self.rules.forbidden]
        banned += [self.rules.find_ends(*one) for one in forbidden]
        if forbidden and self.rules.byte_pieces:
            banned.append(self._find_banned_bytes(state))
        if state.tail and not self.rules.forbidden.isdisjoint(state.ended):
            banned.append(self.rules.with_text)  # what is not a character ends the word
        if not self.may_end(state):
            banned.append(END)
        return [pieces for pieces in banned if len(pieces)]

    def _find_banned_bytes(self, state: PhraseState) -> Tensor:
        """Find the bytes that complete a character behind a forbidden phrase, or its last one."""
        pieces = []
        for byte, piece in self.rules.byte_pieces.items():
            text, _ = read_bytes_after(state.tail, byte)
            if not self.rules.forbidden.isdisjoint(read_text(state, text, {})[2]):
                pieces.append(piece)
        return torch.tensor(pieces, dtype=torch.int64)

    def find_missing(self, state: PhraseState) -> list[str]:
        """Return the required phrases that do not occur even if the text ends here."""
        said = state.ended | state.met
        return [phrase for phrase in self.required if phrase not in said]

    def find_helpful(self, state: PhraseState) -> Tensor:
        """Find the pieces that continue a missing phrase that is begun, or else begin any missing one. If none is
        missing but the last must still end its word, find the pieces that end it.
        """
        missing = self.find_missing(state)
        if not missing:
            is_open = len(state.met) < len(self.required)
            return torch.cat([self.rules.not_words, END]) if is_open else NO_PIECES
        pieces = self.rules.by_text
        found: list[int] = []
        if state.tail:
            return torch.tensor(list(self._find_next_bytes(state, missing)), dtype=torch.int64)
        going = [(phrase, n) for phrase, n in state.begun if phrase in missing]
        for phrase, n in going or [(phrase, 0) for phrase in missing]:
            for end in range(n + 1, len(phrase) + 1):
                part = phrase[n:end]
                if n > 0 or state.is_boundary:
                    found += pieces.get(part, ())
                if n == 0:
                    found += pieces.get(f" {part}", ())
            if phrase[n : n + 1] not in pieces:  # a character without a piece
                found += self._find_next_bytes(state, [phrase])
        if not going and not state.is_boundary:
            found += pieces.get(" ", ())
        return torch.tensor(found, dtype=torch.int64)

    def _find_next_bytes(self, state: PhraseState, missing: Sequence[str]) -> Iterator[int]:
        """Find the bytes that continue the character with which a missing phrase continues, or begins."""
        begun = dict(state.begun)
        for phrase in missing:
            n = begun.get(phrase, 0)
            character = phrase[n : n + 1].encode(errors="replace")
            if (n > 0 or state.is_boundary) and character.startswith(state.tail):
                byte = character[len(state.tail) : len(state.tail) + 1]
                if byte in self.rules.byte_pieces:
                    yield self.rules.byte_pieces[byte]

    def measure_progress(self, state: PhraseState) -> int:
        """Return how much of the required phrases is written, in eighths of a character; each helpful piece raises
        it, and a byte is one piece of at most four.
        """
        total = sum(8 * (len(phrase) + 1) for phrase in state.met)
        going = 0
        n_bytes = (
            len(state.tail) if any(self._find_next_bytes(state, self.find_missing(state))) else 0
        )
        for phrase, n in state.begun:
            if phrase in self.required:
                if n == len(phrase):
                    total += 8 * n
                else:
                    going = max(going, 8 * n + n_bytes)
        if going == 0 and state.is_boundary and self.find_missing(state):
            going = 1 + n_bytes
        return total + going
