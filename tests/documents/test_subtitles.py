"""Subtitles: what is not text is untouched, and each cue keeps its number of lines."""

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from nmt.documents.document import Link, Translated
from nmt.documents.inline_elements import WORD
from nmt.documents.sentences import Splitter
from nmt.documents.subtitles import SubRip, wrap_evenly
from nmt.system.errors import UserError

SPLITTER = Splitter("en", lambda _: True)
TEXT = """\
1
00:00:01,000 --> 00:00:04,000 X1:0
<i>The old dog sleeps
on the sofa.</i> AT&T!

2
00:00:05,000 --> 00:00:06,500
- Why? 5 < 6

some comment
"""


def repeat(text: str) -> str:
    """Translate each word to itself and an exclamation mark."""
    document = SubRip(text, SPLITTER)
    translated = []
    for sentence in document.sentences:
        said = ""
        links = []
        for found in WORD.finditer(sentence.text):
            said += " " if said else ""
            links.append(Link(found.span(), (len(said), len(said) + len(found[0]))))
            said += found[0]
        translated.append(Translated(said, links))
    return document.join(translated)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_comes_back(end: str) -> None:
    text = TEXT.replace("\n", end)
    expected = text.replace(
        "sleeps" + end + "on the sofa.</i> AT&T!", "sleeps on" + end + "the sofa .</i> AT & T !"
    )
    expected = expected.replace("- Why?", "- Why ?")
    assert repeat(text) == expected
    times = regex.compile(".* --> .*|^[0-9]+$", regex.M)
    assert times.findall(repeat(text)) == times.findall(text)
    assert [one.text for one in SubRip(text, SPLITTER).sentences] == [
        "The old dog sleeps on the sofa.",
        "AT&T!",
        "- Why?",
        "5 < 6",
    ]


TIME = "00:00:01,000 --> 00:00:02,000"


@given(st.lists(st.sampled_from(["a & b", "1", "", TIME, "<i>c", "-", "\r"]), max_size=12))
def test_words_in_their_order_give_the_same_file(lines: list[str]) -> None:
    text = "\n".join([TIME, *lines])
    document = SubRip(text, SPLITTER)
    joined = document.join([Translated(one.text) for one in document.sentences])
    assert joined.count(TIME) == text.count(TIME)
    assert joined.replace("</i>", "").split() == text.split()


@pytest.mark.parametrize(
    ("cue", "joined"),
    [
        ("{\\an8}One dog.", "{\\an8}ONE DOG."),
        ("- One dog.\n- Two dogs.", "- ONE DOG.\n- TWO DOGS."),
        ("if a<b &copy; <Laughs> &amp; &lt;b&gt;", "IF A<B &COPY; <LAUGHS> &AMP; &LT;B&GT;"),
        (f"One.\n2\n{TIME}\nTwo.", f"ONE.\n2\n{TIME}\nTWO."),
    ],
)
def test_cues(cue: str, joined: str) -> None:
    document = SubRip(f"{TIME}\n{cue}\n", SPLITTER)
    capitals = [Translated(one.text.upper()) for one in document.sentences]
    assert document.join(capitals) == f"{TIME}\n{joined}\n"


@pytest.mark.parametrize("text", ["just text", "WEBVTT\n\n00:01.000 --> 00:02.000\nOne."])
def test_what_is_not_subrip_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no line has the times of a SubRip file"):
        SubRip(text, SPLITTER)


def test_a_tag_is_on_one_line() -> None:
    lines = wrap_evenly('<font color="a b c d">a b c</font>', 3)
    assert lines == ['<font color="a b c d">a', "b c</font>"]


@given(st.text(st.sampled_from("ab "), min_size=1, max_size=60), st.integers(1, 4))
def test_lines_are_even(text: str, n_lines: int) -> None:
    lines = wrap_evenly(text, n_lines)
    assert 1 <= len(lines) <= n_lines
    assert " ".join(lines).split() == text.split()
