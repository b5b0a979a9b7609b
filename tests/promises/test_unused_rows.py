"""A model with more rows than pieces: the softmax is over all rows, and no unused row is ever decoded.

The authors' models of June 2017 were such: 40,960 rows for about 36,500 pieces.
"""

from dataclasses import replace
from pathlib import Path

from pytest import fixture, raises
from support.prepared_toy import prepare_toy
from support.processor import ALONE, CPU
from support.untrained import TINY, make_checkpoint, make_random_model

from nmt.average.mean import average_checkpoints
from nmt.checkpoint.checkpoint import load_weights
from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.config import DecodingConfig, RunConfig
from nmt.config_files import override_config
from nmt.data.batch import pack
from nmt.data.vocab import EOS, Vocab
from nmt.model.transformer import Transformer
from nmt.system.errors import UserError
from nmt.system.files import seal
from nmt.system.run_folder import CONFIG_FILE, MODEL_FILE, RunFolder
from nmt.train.checkpoint_writer import Mirror
from nmt.train.events import Listener
from nmt.train.run_start import find_begun_run, train
from nmt.translate.search import search
from nmt.translate.search_rules import make_rules
from nmt.translate.translator import make_translator

V, ROWS = 80, 120
WIDE = replace(TINY, attention_bias=True, vocab_rows=ROWS)
SOURCES = [[5, 6, 7, EOS], [8, EOS], [9, 10, 11, 12, 13, EOS]]


@fixture(scope="module", name="model")
def make_model() -> Transformer:
    """Its unused rows are the most probable ones."""
    model = make_random_model(WIDE, V)
    model.projection.weight[V:] *= 3.0
    return model


def test_samples_hold_no_unused_row(model: Transformer) -> None:
    config = DecodingConfig(sample=True, max_extra=20, temperature=5.0)
    found = search(model, pack(SOURCES), make_rules(config, 20))
    ids = {i for samples in found for sample in samples for i in sample.ids}
    assert len(ids) > V // 2 and max(ids) < V


@fixture(scope="module", name="config")
def prepare_config(module_path: Path) -> RunConfig:
    toy = prepare_toy(module_path)
    overrides = [
        f"model.vocab_rows={ROWS}",
        "model.attention_bias=true",
        "training.steps=6",
        "training.checkpoint_every=3",
        "training.checkpoint_minutes=null",
        "training.validate_every=6",
    ]
    return override_config(toy, overrides)


def test_a_run_continues_and_averages(config: RunConfig, tmp_path: Path) -> None:
    world = ALONE
    whole, two = [replace(config, out=str(tmp_path / name)) for name in ("whole", "two")]
    assert train(whole, whole, world, Listener(), Mirror()) == 0
    three = override_config(two, ["training.steps=3"])
    assert train(three, two, world, Listener(), Mirror()) == 0
    assert train(two, find_begun_run(two), world, Listener(), Mirror()) == 0
    folder = RunFolder(tmp_path / "whole")
    expected = (folder.checkpoint(6) / MODEL_FILE).read_bytes()
    assert (RunFolder(tmp_path / "two").checkpoint(6) / MODEL_FILE).read_bytes() == expected

    average_checkpoints([folder.checkpoint(3), folder.checkpoint(6)], tmp_path / "average")
    checkpoint = open_checkpoint(tmp_path / "average")
    model = Transformer(checkpoint.config.model, *checkpoint.vocab.sizes)
    load_weights(checkpoint, model)
    assert model.projection.weight.shape[0] == ROWS
    biases = [p for name, p in model.named_parameters() if name.endswith(("qkv.bias", "q.bias"))]
    assert len(biases) == 3 and all(bool(bias.abs().sum() > 0) for bias in biases)
    translator = make_translator(checkpoint, CPU, checkpoint.config.decoding)
    assert len(list(translator.translate(["A line."]))) == 1


def test_models_of_different_rows_translate_together(vocab: Vocab, tmp_path: Path) -> None:
    shapes = {"wide": replace(WIDE, vocab_rows=300), "plain": TINY, "middle": WIDE}
    paths = [make_checkpoint(tmp_path / name, vocab, shape) for name, shape in shapes.items()]
    first, *others = map(open_checkpoint, paths)
    config = DecodingConfig(beam=2, max_extra=3)
    translator = make_translator(first, CPU, config, others)
    backwards = make_translator(others[-1], CPU, config, [*others[:-1], first])
    lines = ["a small dog", "the house"]
    assert list(translator.translate(lines)) == list(backwards.translate(lines))


def test_too_few_rows_are_refused_by_name(vocab: Vocab, tmp_path: Path) -> None:
    with raises(UserError, match="model.vocab_rows is 79, but vocab.size is 80"):
        override_config(RunConfig(), ["vocab.size=80", "model.vocab_rows=79"])
    with raises(UserError, match="model.vocab_rows is 79, but the vocabulary has 80 pieces"):
        Transformer(replace(TINY, vocab_rows=79), V)
    folder = make_checkpoint(tmp_path / "checkpoint", vocab, WIDE)
    text = (folder / CONFIG_FILE).read_text()
    text = text.replace("size: 80", "size: 70").replace(f"vocab_rows: {ROWS}", "vocab_rows: 75")
    (folder / CONFIG_FILE).write_text(text)
    seal(folder)
    with raises(UserError, match="config.yaml: model.vocab_rows is 75, but the vocabulary"):
        open_checkpoint(folder)
