"""SubRip subtitles: numbers, times and tags come back as they were, and the text of each cue is
translated.

A cue is shown by itself, so it is a paragraph of its own: a sentence that continues in the next cue is
translated in two parts. A translation has as many lines as its cue had, of about equal length.
"""

import textwrap
from collections.abc import Sequence
from html import escape, unescape
from itertools import pairwise

import regex

from nmt.documents.document import Translated, join_parts
from nmt.documents.html import HtmlDocument
from nmt.documents.sentences import Sentence, Splitter
from nmt.system.errors import UserError

TAG, IN_TAG = regex.compile("<[^<>]*>"), "\0"  # a space that is no place to break a line
TIMES = regex.compile(r"\s*\d+:\d\d:\d\d[,.]\d+\s*-->.*")
NUMBER = regex.compile(r"\s*\d+\s*")
LINE = regex.compile(r"[^\n]*\n|[^\n]+")
STYLE = regex.compile(r"(</?(?:i|b|u|s|font)(?:\s[^<>]*)?>)", regex.IGNORECASE)
POSITION = regex.compile(r"(?:\{\\[^{}]*\})*")  # {\an8}


class SubRip:
    """The text of a .srt file."""

    needs_links = True

    def __init__(self, text: str, splitter: Splitter) -> None:
        self.sentences: list[Sentence] = []
        self._parts: list[str | Cue] = []
        lines = LINE.findall(text)
        times = [place for place, line in enumerate(lines) if TIMES.match(line)]
        if not times and text.strip():
            raise UserError("no line has the times of a SubRip file; leave out --srt")
        done = 0
        for place, following in pairwise([*times, len(lines)]):
            self._parts += lines[done : place + 1]
            end = following
            if end < len(lines) and NUMBER.fullmatch(lines[end - 1]):
                end -= 1  # of the next cue
            done = place + 1
            while done < end and lines[done].strip():
                done += 1
            for paragraph in split_dialogue(lines[place + 1 : done]):
                cue = Cue(paragraph, splitter)
                self._parts.append(cue)
                self.sentences += cue.sentences
        self._parts += lines[done:]

    def join(self, translations: Sequence[Translated]) -> str:
        return join_parts(self._parts, translations)


def split_dialogue(lines: Sequence[str]) -> list[Sequence[str]]:
    """Return the lines of a cue as one paragraph, or each as one if they are said by different people."""
    if not lines:
        return []
    is_dialogue = all(line.lstrip().startswith(("-", "–")) for line in lines)
    return [[line] for line in lines] if is_dialogue else [lines]


class Cue:
    """The lines of a cue, which may have tags such as <i>, or a line of a dialogue."""

    def __init__(self, lines: Sequence[str], splitter: Splitter) -> None:
        self.n_lines = len(lines)
        last = lines[-1]
        self.line_end = last[len(last.rstrip("\r\n")) :] or "\n"
        self.is_ended = last != last.rstrip("\r\n")
        text = " ".join(line.strip() for line in lines)
        position = POSITION.match(text)
        self.position = position[0] if position else ""
        parts = STYLE.split(text[len(self.position) :])
        parts[::2] = [escape(part, quote=False) for part in parts[::2]]
        self.document = HtmlDocument("".join(parts), splitter)
        self.sentences = self.document.sentences

    def join(self, translations: Sequence[Translated]) -> str:
        text = self.position + unescape(self.document.join(translations))  # SubRip has no entities
        lines = wrap_evenly(text, self.n_lines)
        return self.line_end.join(lines) + (self.line_end if self.is_ended else "")


def wrap_evenly(text: str, n_lines: int) -> list[str]:
    """Break a text into at most `n_lines` lines; the longest is as short as words allow."""
    unbroken = TAG.sub(lambda found: found[0].replace(" ", IN_TAG), text)
    for width in range(max(1, len(text) // n_lines), len(text) + 1):
        lines = textwrap.wrap(unbroken, width, break_long_words=False, break_on_hyphens=False)
        if len(lines) <= n_lines:
            break
    return [line.replace(IN_TAG, " ") for line in lines] or [text]
