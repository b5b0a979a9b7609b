"""A recipe in the words of cards and reports, whole: tests/golden/recipes.txt has those of base.yaml, and
of each option what differs. `python tests/cards/test_description.py` writes it; read the difference.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

from support.untrained import list_shapes, make_vocab

from nmt.config import DecodingConfig, OptimizerConfig, RunConfig
from nmt.config_files import load_config
from nmt.data.vocab import VocabPair, Vocabulary
from nmt.extras.cards.description import (
    describe_model,
    describe_search,
    describe_training,
    describe_training_text,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.txt"
PRESETS = get_args(get_type_hints(DecodingConfig)["preset"])
SCHEDULES = {*get_args(get_type_hints(OptimizerConfig)["schedule"])} - {"paper"}
OPTIONS = (
    "data.train=[]",
    "data.train=[{src: a.en, tgt: a.de}, {demo: train}]",
    "model.tied=decoder",
    "model.tied=embeddings",
    "model.scale_embeddings=none",
    "model.attention_dropout=0.1; model.ffn_dropout=0.2",
    "optimizer.scale=2",
    "optimizer.weight_decay=0.01",
    "training.ema=0.9999",
    "decoding.penalty=length",
    "decoding.penalty=none",
    "decoding.max_ratio=1.5; decoding.max_extra=10",
    *(f"decoding.preset={preset}" for preset in PRESETS),
    *(f"optimizer.schedule={name}; optimizer.peak_lr=0.001" for name in sorted(SCHEDULES)),
)


def describe(config: RunConfig, vocab: Vocabulary) -> dict[str, str]:
    return {
        "training text": describe_training_text(config.data),
        **describe_model(config.model, vocab),
        "search": describe_search(config.decoding),
        **describe_training(config.training, config.optimizer, config.model, config.seed),
    }


def describe_recipes() -> str:
    with TemporaryDirectory() as folder:
        vocab, other = (make_vocab(Path(folder), size) for size in (80, 90))
    base = load_config("base.yaml")
    usual = describe(base, vocab)
    recipes = {"two vocabularies": describe(base, VocabPair(vocab, other))}
    for name, shape in list_shapes(64).items():
        recipes[f"a small model: {name}"] = describe(replace(base, model=shape), vocab)
    for option in OPTIONS:
        recipes[option] = describe(load_config("base.yaml", option.split("; ")), vocab)
    lines = ["base.yaml", *(f"  {key}: {words}" for key, words in usual.items())]
    for name, rows in recipes.items():
        differing = rows.items() - usual.items()
        lines += [name, *(f"  {key}: {words}" for key, words in sorted(differing))]
    return "\n".join([*lines, ""])


def test_the_words_of_every_option() -> None:
    assert describe_recipes() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.write_text(describe_recipes(), encoding="utf-8")
