"""The Python door: a run from config to score without a command, equal to what the commands give."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nmt.api
from nmt.commands.eval import main as nmt_eval
from nmt.commands.translate import main as nmt_translate
from nmt.system.errors import UserError


@pytest.fixture
def run(toy: Path) -> Path:
    config = nmt.api.load_config(
        str(toy), ["training.steps=4", "training.checkpoint_every=4", "evaluation.bleu=false"]
    )
    assert nmt.api.prepare(config)  # it is new
    assert not nmt.api.prepare(config)  # and is not made again
    assert nmt.api.train(config) == 0
    assert (config.folder / "report.html").exists()
    return config.folder


def test_a_run_from_python_gives_what_the_commands_give(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    source = corpus / "test.en"
    lines = source.read_text().splitlines()

    translations = nmt.api.load(run, settings=["decoding.beam=2"]).translate(lines)

    out = tmp_path / "out"
    assert nmt_translate([str(run), "-i", str(source), "-o", str(out), "decoding.beam=2"]) == 0
    assert [translation.text for translation in translations] == out.read_text().splitlines()

    evaluation = nmt.api.evaluate(run, settings=["decoding.beam=2"])
    assert evaluation.systems[0].texts == [translation.text for translation in translations]
    assert not (run / "results.json").exists()  # only the command records
    assert nmt_eval([str(run), "decoding.beam=2"]) == 0
    assert (run / "results.json").exists()


def test_pairs_are_scored_with_signature_and_interval() -> None:
    reference = "Das ist ein kleines Haus mit einem roten Dach."
    bleu, chrf = nmt.api.score([(reference, reference)] * 3)
    assert bleu.value == pytest.approx(100.0) and chrf.value == pytest.approx(100.0)
    assert "tok:13a" in bleu.signature and bleu.low is not None


def test_what_cannot_be_scored_is_refused_like_on_the_command_line() -> None:
    with pytest.raises(UserError, match="BPE"):
        nmt.api.score([("Das ist ein klei@@ nes Haus .", "Das ist ein kleines Haus.")] * 40)


def test_a_missing_checkpoint_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found; give RUN"):
        nmt.api.load(tmp_path / "nowhere")


def test_attention_returns_its_weights_on_request() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)
    output, weights = nmt.api.attention(q, k, v, return_weights=True)
    assert torch.allclose(weights, (q @ k.T / 2).softmax(-1), atol=1e-6)
    assert torch.allclose(output, weights @ v, atol=1e-6)
    assert torch.equal(nmt.api.attention(q, k, v), output)


def test_importing_it_imports_nothing_heavy() -> None:
    program = "import sys, nmt.api; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
