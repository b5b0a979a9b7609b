"""Running text as sentences: nothing is lost, and a sentence that is too long is cut where it harms least."""

from time import process_time

from hypothesis import given
from hypothesis import strategies as st
from pytest import mark

from nmt.translate.sentences import RunningText, Splitter

# sentencex panics on a letter, a wide space and a mark
TEXT = st.text(st.sampled_from("aB e.g. 1?!,;\u3000。、\"'()\u2028\xa0\t\r\n"), max_size=80)


def fit_in(longest: int) -> Splitter:
    return Splitter("en", lambda text: len(text) <= longest)


@given(text=TEXT, longest=st.integers(1, 40))
def test_a_text_comes_back_as_it_was(text: str, longest: int) -> None:
    document = RunningText(text, fit_in(longest))
    for one in document.sentences:
        assert one.text == text[one.start : one.end] == one.text.strip() != ""
        assert len(one.text) <= longest
        assert "\n" not in one.text
    unchanged = [one.text for one in document.sentences]
    assert document.join(unchanged) == text


@mark.parametrize(
    "language, sentences",
    [
        ("en", ["I have a dog.", "It is 3.5 years old, e.g. young!", "Dr. Smith asked: “Why?”"]),
        ("de", ["Am 3. Mai kam Dr. Meier.", "Das ist z. B. gut.", "Warum nicht?"]),
        ("fr", ["Bonjour !", "Il en coûte 3.50, p. ex. hier.", "Pourquoi ?"]),
        ("zh", ["你好。", "今天很好！"]),
        ("a language that nobody speaks", ["One thing.", "Another thing."]),
    ],
)
def test_sentences_are_found(language: str, sentences: list[str]) -> None:
    gap = "" if language == "zh" else "  "
    found = Splitter(language, lambda _: True).split(gap.join(sentences))
    assert [one.text for one in found] == sentences
    assert not any(one.is_part for one in found)


@mark.parametrize(
    "text, parts",
    [
        ("When it rains, the old dog sleeps.", ["When it rains,", "the old dog sleeps."]),
        ("one two three four five six seven", ["one two three", "four five six seven"]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijklm", "nopqrstuvwxyz"]),
        ("今天天气很好好好，我们去公园公园散步", ["今天天气很好好好，", "我们去公园公园散步"]),
    ],
)
def test_a_long_sentence_is_cut_where_a_clause_ends_else_a_word(
    text: str, parts: list[str]
) -> None:
    longest = max(map(len, parts))
    found = fit_in(longest).split(text)
    assert [one.text for one in found] == parts
    assert all(one.is_part for one in found)


@mark.parametrize(
    "text",
    [")" * 100_000, "“" * 100_000, "a" * 100_000, "A B. " * 20_000, '("' * 50_000, "C\xa0! D."],
)
def test_a_hostile_paragraph_ends_soon(text: str) -> None:
    before = process_time()
    document = RunningText(text, fit_in(1_000))
    assert document.join([one.text for one in document.sentences]) == text
    assert process_time() - before < 3


def test_emoji_around_a_sentence_stay_where_they_are() -> None:
    document = RunningText("😀 One. 👩‍👩‍👧\n👍🏽\nI ❤️ you!  Two.❤️", fit_in(99))
    assert [one.text for one in document.sentences] == ["One.", "I ❤️ you!", "Two."]
    german = [text for text in ("Eins.", "Dich!", "Zwei.")]
    assert document.join(german) == "😀 Eins. 👩‍👩‍👧\n👍🏽\nDich!  Zwei.❤️"


def test_a_space_is_put_where_the_source_needs_none() -> None:
    document = RunningText("你好。今天很好。\n再见。", Splitter("zh", lambda _: True))
    english = [text for text in ("Hello.", "It is fine today.", "Goodbye.")]
    assert document.join(english) == "Hello. It is fine today.\nGoodbye."
    assert document.join(["你。"] * 3) == "你。你。\n你。"


def test_a_translation_stays_in_its_paragraph() -> None:
    document = RunningText("One.\nTwo.", fit_in(99))
    assert document.join(["Ei\nns.", "Zwei."]) == "Ei ns.\nZwei."
