"""A prepared toy for tests that train without a run folder."""

from pathlib import Path

from nmt.config import RunConfig
from nmt.config_files import load_config
from nmt.corpus.prepare import prepare
from support.toy_corpus import write_splits, write_toy_config


def prepare_toy(root: Path) -> RunConfig:
    """Write a corpus and its store into `root`; the config of a run on it, on one layer."""
    write_splits(root, train=400, valid=20)
    config = load_config(str(write_toy_config(root, root)), ["data.test=null"])
    prepare(config.data, config.vocab, config.seed)
    return config
