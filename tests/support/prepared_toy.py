"""A prepared toy for tests that train without a run folder."""

from pathlib import Path

from nmt.config import RunConfig
from nmt.config_files import load_config
from nmt.corpus.prepare import prepare
from support.toy_corpus import write_splits


def prepare_toy(root: Path) -> RunConfig:
    """Write a corpus and its store into `root`; the config of a run on it, on one layer."""
    write_splits(root, train=400, valid=20)
    overrides = [
        f"data.root={root}",
        f"data.store={root}/store",
        f"out={root}/run",
        "data.workers=1",
        "data.train=[{src: train.en, tgt: train.de}]",
        "data.valid={src: valid.en, tgt: valid.de}",
        "data.test=null",
        "vocab.size=80",
        "model.d_model=16",
        "model.d_ff=32",
        "model.n_heads=2",
        "model.n_layers=1",
        "training.src_tokens=300",
        "training.tgt_tokens=300",
        "training.micro_tokens=150",
        "training.precision=fp32",
        "training.validate_every=100",
    ]
    config = load_config("demo.yaml", overrides)
    prepare(config.data, config.vocab, config.seed)
    return config
