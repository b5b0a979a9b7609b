"""SubRip subtitles: numbers, times and tags come back as they were, and the text of each cue is
translated.

A cue is shown by itself, so it is a paragraph of its own: a sentence that goes on in the next cue is
translated in two parts. A translation has as many lines as its cue had, of about equal length.
"""

import textwrap
from collections.abc import Sequence
from html import unescape

import regex

from nmt.documents.document import Translated
from nmt.documents.html import HtmlDocument
from nmt.documents.sentences import Sentence, Splitter

TAG, IN_TAG = regex.compile("<[^<>]*>"), "\0"  # a space that is no place to break a line
TIMES = regex.compile(r"\d+:\d\d:\d\d[,.]\d+[ \t]*-->.*")


class SubRip:
    """The text of a .srt file."""

    needs_links = True

    def __init__(self, text: str, splitter: Splitter) -> None:
        self.sentences: list[Sentence] = []
        self._parts: list[str | Cue] = []
        lines = text.splitlines(keepends=True)
        place = 0
        while place < len(lines):
            is_cue = TIMES.match(lines[place]) is not None
            self._parts.append(lines[place])
            place += 1
            end = place
            while is_cue and end < len(lines) and lines[end].strip():
                end += 1
            if end > place:
                cue = Cue(lines[place:end], splitter)
                self._parts.append(cue)
                self.sentences += cue.document.sentences
                place = end

    def join(self, translations: Sequence[Translated]) -> str:
        parts = []
        done = 0
        for part in self._parts:
            if isinstance(part, Cue):
                n = len(part.document.sentences)
                parts.append(part.join(translations[done : done + n]))
                done += n
            else:
                parts.append(part)
        return "".join(parts)


class Cue:
    """The lines of a cue, which may have tags such as <i>."""

    def __init__(self, lines: Sequence[str], splitter: Splitter) -> None:
        self.n_lines = len(lines)
        last = lines[-1]
        self.line_end = last[len(last.rstrip("\r\n")) :] or "\n"
        self.is_ended = last != last.rstrip("\r\n")
        text = " ".join(line.strip() for line in lines)
        self.document = HtmlDocument(text, splitter)

    def join(self, translations: Sequence[Translated]) -> str:
        text = unescape(self.document.join(translations))  # SubRip has tags, but no entities
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
