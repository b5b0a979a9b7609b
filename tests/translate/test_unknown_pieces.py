"""A model with byte fallback never writes the unknown piece, however it is searched."""

from dataclasses import replace
from pathlib import Path

import torch
from pytest import mark
from support.capture import Capture, read_errors, read_stderr
from support.processor import CPU
from support.untrained import DECODING, SHAPE, make_model, make_vocab

from nmt.config import DecodingConfig
from nmt.data.vocab import EOS, UNK
from nmt.translate.translator import Translator

WAYS = [
    replace(DECODING, compile="off"),
    replace(DECODING, compile="on"),
    DecodingConfig(sample=True, max_extra=5),
]


@mark.parametrize("config", WAYS, ids=["torch", "compiled", "sampling"])
@mark.parametrize("has_bytes", [True, False])
def test_the_unknown_piece_is_forbidden_where_bytes_spell_everything(
    tmp_path: Path, config: DecodingConfig, has_bytes: bool
) -> None:
    vocab = make_vocab(tmp_path, 340 if has_bytes else 80, byte_fallback=has_bytes)
    model = make_model(vocab, replace(SHAPE, n_layers=2))
    with torch.no_grad():
        model.projection.weight[UNK] = 30 * model.projection.weight[EOS]
    translators = [Translator(model, vocab, config, CPU, others) for others in ((), (model,))]
    for translator in translators:
        found = translator.translate(["a b c", "snow \N{SNOWMAN}"])
        text = "".join(each.text for each in found)
        assert ("\u2047" in text) == (not has_bytes)


@mark.parametrize("has_bytes", [True, False])
def test_text_whose_letters_the_vocabulary_lacks_is_warned_of_once(
    tmp_path: Path, has_bytes: bool, capsys: Capture
) -> None:
    vocab = make_vocab(tmp_path, 340 if has_bytes else 80, byte_fallback=has_bytes)
    ours = Translator(make_model(vocab), vocab, DECODING, CPU)
    ours.translate(["a dog \N{SNOWMAN}"])  # of its bytes one counts
    assert not read_stderr(capsys)
    ours.translate(["\u4eca\u65e5\u306f\u826f\u3044\u5929\u6c17"] * 3)
    ours.translate(["\u4eca\u65e5"])
    (warning,) = read_errors(capsys)
    assert "warning: lines 1 to 3 are mostly <unk>" in warning
