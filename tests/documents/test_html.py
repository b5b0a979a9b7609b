"""HTML: what is not text comes back as it was, and inline elements stay at their words."""

from collections import Counter
from collections.abc import Callable
from random import Random
from time import process_time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from nmt.documents.document import Link, Translated
from nmt.documents.html import HtmlDocument
from nmt.documents.inline_elements import WORD
from nmt.documents.sentences import Sentence, Splitter
from nmt.system.errors import UserError

Translate = Callable[[Sentence], Translated]
SPLITTER = Splitter("en", lambda _: True)
NAMES = (
    "p div b i a span code li td br img script style pre x-y h1 section svg textarea title".split()
)
PIECES = st.one_of(
    st.sampled_from(NAMES).map(lambda name: f"<{name}>"),
    st.sampled_from(NAMES).map(lambda name: f"</{name}>"),
    st.sampled_from(
        "Hello |world. |One two! |&amp; |&lt; |&nbsp;|\n |<!-- c -->|<a href='?a=1&b=é ü'>|<br/>"
        "|<p translate=no>|<b class='x notranslate'>|<|>|\0|<html lang=en>|<body>|<head>".split("|")
    ),
)
SOUP = st.lists(PIECES, max_size=20).map("".join)


def keep(sentence: Sentence) -> Translated:
    places = [found.span() for found in WORD.finditer(sentence.text)]
    return Translated(sentence.text, [Link(place, place) for place in places])


def turn_round(sentence: Sentence) -> Translated:
    """Say the words in capitals, the last first."""
    text = ""
    links = []
    for found in reversed(list(WORD.finditer(sentence.text))):
        text += " " if text else ""
        links.append(Link(found.span(), (len(text), len(text) + len(found[0]))))
        text += "".join(c if c == "ß" else c.upper() for c in found[0])
    return Translated(text, links)


def leave_out_links(sentence: Sentence) -> Translated:
    return Translated(sentence.text)


def shuffle(sentence: Sentence) -> Translated:
    """Say something else, with links to anywhere."""
    rng = Random(sentence.text)
    text = " ".join(rng.choices(["x", "y,", "<z>", "&"], k=rng.randint(0, 5)))
    links = []
    for _ in range(rng.randint(0, 6)):
        source, target = rng.randint(0, 30), rng.randint(0, 12)
        links.append(Link((source, source + rng.randint(0, 9)), (target, target + 2)))
    return Translated(text, links)


def translate(text: str, translate_sentence: Translate) -> str:
    document = HtmlDocument(text, SPLITTER)
    return document.join([translate_sentence(one) for one in document.sentences])


def list_tags(text: str) -> Counter[str]:
    """Count the tags as another parse of the same text finds them, with attributes."""
    parser = etree.HTMLParser(huge_tree=True)
    root = etree.fromstring(f"<div>{text}</div>", parser)
    tags: Counter[str] = Counter()
    for element in root.iter():
        name = element.tag if isinstance(element.tag, str) else "comment"
        tags[f"{name} {sorted(element.items())}"] += 1
    return tags


def read_words(text: str) -> str:
    root = etree.fromstring(f"<div>{text}</div>", etree.HTMLParser(huge_tree=True))
    return regex.sub(r"\s+", "", "".join(root.itertext(tag=None)))


@pytest.mark.parametrize(
    "text",
    [
        "Tom &amp; Jerry",
        "<p>Hello <img> world</p>",
        "<p>Hi <b>dear</b> friend</p>",
        '<a href="?a=1&amp;b=é">my <b>dear</b> friend</a> is',
        "Use <code>map&lt;x&gt;</code> here.\n<i>Two <u>three</u></i> four",
    ],
)
def test_words_in_their_order_give_the_same_document(text: str) -> None:
    assert translate(text, keep) == text


@pytest.mark.parametrize(
    ("text", "turned"),
    [
        (
            '<a href="?a=1&amp;b=é">my <b>dear</b> friend</a> is',
            'IS <a href="?a=1&amp;b=é">FRIEND <b>DEAR</b> MY</a>',
        ),
        ("<i>One two.</i> <b>Three</b> four.", "<i>. TWO ONE</i> . FOUR <b>THREE</b>"),
        ("See <img src=x> now. <!-- c -->Go", '. <img src="x"> NOW SEE <!-- c -->GO'),
        ("<td>a b</td><td>c d</td>", "<td>B A</td><td>D C</td>"),
        ("<a><div>one <i>two</i></div></a> three", "<a><div><i>TWO</i> ONE</div></a> THREE"),
        ("a <b></b>b <i> </i>c", "<i></i>C <b></b>B A"),
        (
            "not <span translate=no>this one</span> here",
            'HERE <span translate="no">this one</span> NOT',
        ),
        ("<ul>\n  <li>a b</li>\n</ul>\n", "<ul>\n  <li>B A</li>\n</ul>\n"),
        ("Use <code>map&lt;x&gt;</code> here", "HERE <code>map&lt;x&gt;</code> USE"),
        ("a non-<code>int</code>s b", "B non-<code>int</code>s A"),
        ("a 10<sup>6</sup> b", "B 10<sup>6</sup> A"),
        ("<a>one two</a> <a>three</a> <a>four</a>", "<a>TWO ONE</a> <a>THREE</a> <a>FOUR</a>"),
        ("<p>a b<p>c d", "<p>B A</p><p>D C</p>"),
        ("a b<br>c d", "B A<br>D C"),
    ],
)
def test_inline_elements_follow_their_words(text: str, turned: str) -> None:
    assert translate(text, turn_round) == turned


def test_what_is_not_text_is_untouched() -> None:
    kept = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<script>if (a<b && c) "one two";</script>\n'
        '<style>p > a { color: red }</style>\n<link rel="x" href="é ü?a=1&amp;b">\n</head>\n<body>\n'
        "<!-- one two --><pre>one  two\n</pre><textarea>one &lt;two&gt;</textarea>"
        '<svg><title>one two</title></svg><p translate="no">one <b>two</b></p>\n'
    )
    text = f'{kept}<p class="a" data-x="&quot;&lt;">one two</p>\n</body>\n</html>\n'
    expected = f'{kept}<p class="a" data-x="&quot;&lt;">TWO ONE</p>\n</body>\n</html>\n'
    assert translate(text, turn_round).replace("html><html", "html>\n<html") == expected


@given(text=SOUP)
def test_tag_soup_comes_back_with_all_tags_and_words(text: str) -> None:
    """Against libxml2's tree of the same text; what it drops is no tag of the document."""
    clean = translate(text, keep)  # once through, everything is closed
    assert translate(clean, keep) == clean
    words, tags = read_words(clean), list_tags(clean)
    assert list_tags(translate(clean, turn_round)) == tags
    for translate_sentence in (leave_out_links, shuffle):
        assert list_tags(translate(clean, translate_sentence)) == tags
    if "<code" not in clean and "translate" not in clean:
        assert Counter(read_words(translate(clean, turn_round)).lower()) == Counter(words.lower())


@pytest.mark.parametrize(
    "text",
    [
        "b" * 50_000 + "<code>x</code>",
        "<pre>" + "&amp; w" * 200_000,
        "<b>" * 5_000 + "x" + "</b>" * 5_000 + "<p>y",
        "<" * 50_000,
        "</a" * 9_000,
        "&" * 9_000,
        "<!--" * 9,
    ]
    + ["<a b='" * 9_000, "x" * 50_000, "<p>a b " * 9_000, "", " \n"],
    ids=lambda text: f"{text[:6]!r}",
)
def test_hostile_documents_end_soon(text: str) -> None:
    before = process_time()
    translate(text, keep)
    assert process_time() - before < 5


def test_half_a_character_is_refused() -> None:
    with pytest.raises(UserError, match="the HTML cannot be read"):
        HtmlDocument("\ud800<p>x", SPLITTER)
