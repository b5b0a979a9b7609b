"""nmt-eval --report writes a page about anybody's translations; nmt-report --attention looks into ours."""

from pathlib import Path

import pytest
from support.page_elements import Elements
from support.untrained import make_checkpoint, make_vocab

from nmt.commands.eval import main as nmt_eval
from nmt.commands.report import main as nmt_report
from nmt.config import RunConfig, format_config
from nmt.system.run_folder import RunFolder

TEXTS = {
    "src": ["the red dog barks", "a cat sleeps", "it rains in Berlin today"],
    "ref": ["der rote Hund bellt", "eine Katze schläft", "es regnet heute in Berlin"],
    "hyp": ["der rote Hund bellt", "eine Katze <b>schläft</b>", "es regnet"],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, lines in TEXTS.items():
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    return {name: str(tmp_path / name) for name in TEXTS}


def test_anybodys_translations_have_a_page(files: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ["--hypotheses", files["hyp"], "--ref", files["ref"], "--src", files["src"], "--force"]
    assert nmt_eval([*given, "--report", str(page)]) == 0
    text = Elements(page.read_text()).text
    assert "95 % interval" in text and "Worst lines" in text
    assert "eine Katze <b>schläft</b>" in text
    assert nmt_eval([*given, "--report", files["src"]]) == 2  # it is given twice
    assert Path(files["src"]).read_text().startswith("the red dog")


def test_the_attention_of_a_test_line_is_in_the_report(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.config.write_text(format_config(RunConfig()))
    make_checkpoint(run.checkpoint(20), make_vocab(tmp_path))
    line = ["--attention", "2"]
    assert nmt_report([str(run.path), *line]) == 2
    assert "run nmt-eval" in capsys.readouterr().err
    settings = ["decoding.max_extra=2", "decoding.beam=1"]
    given = ["--src", files["src"], "--ref", files["ref"], "--force", *settings]
    assert nmt_eval([str(run.checkpoint(20)), *given]) == 0
    assert nmt_report([str(run.path), *line]) == 0
    page = run.report.read_text()
    assert "test line 2: " in page and '"memory":[[' in page and '"encoder":[[' in page
    assert nmt_report([str(run.path), "--attention", "4"]) == 2
    assert "has the lines 1 to 3" in capsys.readouterr().err
