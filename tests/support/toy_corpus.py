"""A toy corpus and the config of a toy run, which the tests of whole commands use."""

from pathlib import Path
from random import Random

from support.text_lines import join_lines
from support.toy_words import WORDS


def sentences(n: int, seed: int) -> list[tuple[str, str]]:
    """Random words and their word-by-word translations."""
    rng = Random(seed)
    drawn = [[rng.choice(list(WORDS)) for _ in range(rng.randint(2, 9))] for _ in range(n)]
    return [(" ".join(words), " ".join(WORDS[word] for word in words)) for words in drawn]


def write_toy_corpus(folder: Path) -> Path:
    """Write {train,valid,test}.{en,de} into a new folder `corpus`, and return it."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_splits(corpus, train=400, valid=20, test=20)
    return corpus


def write_splits(folder: Path, **sizes: int) -> None:
    """Write so many pairs of each split."""
    for seed, (split, n) in enumerate(sizes.items()):
        for language, lines in zip(
            ("en", "de"), zip(*sentences(n, seed), strict=True), strict=True
        ):
            text = join_lines(lines)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def write_toy_config(corpus: Path, folder: Path) -> Path:
    """Write the config of a run that takes seconds; dropout is on."""
    path = folder / "toy.yaml"
    path.write_text(
        f"""
name: toy
seed: 3
out: {folder}/run
data:
  root: {corpus}
  store: {folder}/store
  workers: 1
  train: [{{src: train.en, tgt: train.de}}]
  valid: {{src: valid.en, tgt: valid.de}}
  test: {{src: test.en, tgt: test.de}}
vocab: {{size: 80}}
model: {{d_model: 16, d_ff: 32, n_heads: 2, n_layers: 1, dropout: 0.2}}
optimizer: {{warmup_steps: 20}}
training:
  steps: 20
  src_tokens: 300
  tgt_tokens: 300
  micro_tokens: 150
  precision: fp32
  log_every: 1
  validate_every: 100
  checkpoint_minutes: null
decoding: {{max_extra: 5}}
""",
        encoding="utf-8",
    )
    return path


def write_toy(folder: Path) -> Path:
    """Write a toy corpus and the config of a run on it, and return the config."""
    return write_toy_config(write_toy_corpus(folder), folder)
