"""nmt-eval --report writes a page about anybody's translations."""

from pathlib import Path

from pytest import fixture
from support.in_process import succeed
from support.page_elements import Elements
from support.text_lines import join_lines

from nmt.commands.eval import main as nmt_eval

TEXTS = {
    "src": ["the red dog barks", "a cat sleeps", "it rains in Berlin today"],
    "ref": ["der rote Hund bellt", "eine Katze schläft", "es regnet heute in Berlin"],
    "hyp": ["der rote Hund bellt", "eine Katze <b>schläft</b>", "es regnet"],
}


@fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, lines in TEXTS.items():
        (tmp_path / name).write_text(join_lines(lines))
    return {name: str(tmp_path / name) for name in TEXTS}


def test_anybodys_translations_have_a_page(files: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ["--hypotheses", files["hyp"], "--ref", files["ref"], "--src", files["src"], "--force"]
    succeed(nmt_eval, *given, "--report", page)
    text = Elements(page.read_text()).text
    assert "95 % interval" in text and "Worst lines" in text
    assert "eine Katze <b>schläft</b>" in text
    assert nmt_eval([*given, "--report", files["src"]]) == 2  # it is given twice
    assert Path(files["src"]).read_text().startswith("the red dog")
