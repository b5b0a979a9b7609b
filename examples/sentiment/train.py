"""Trains a classifier of reviews; without --data on reviews made here, in which negation decides.

    python examples/sentiment/train.py
    python examples/sentiment/train.py --data aclImdb --out runs/imdb

The loop is the plain one: shuffle, pack, cross entropy, Adam. Equal seeds give equal classifiers.
"""

from nmt.model.backend import use_backend
from nmt.system.runtime import choose_matmul_library, tune_process
from nmt.train.engine import choose_training_engine

if __name__ == "__main__":
    tune_process()  # before torch is imported

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from classifier import (
    BagOfWords,
    Classifier,
    Recipe,
    check_output,
    compute_probabilities,
    encode_texts,
    save_classifier,
)
from reviews import Corpus, Review, read_corpus
from torch import Tensor, nn

from nmt.commands.cli import CommandParser, parse_positive, start_command
from nmt.config import ModelConfig, OptimizerConfig, VocabConfig
from nmt.corpus.learn_bpe import tally_words, train_bpe, write_word_counts
from nmt.data.batch import pack
from nmt.data.vocab import Vocab
from nmt.system.errors import UserError
from nmt.system.progress import Progress, say
from nmt.system.records import RecordReader
from nmt.system.tables import Table
from nmt.train.optimizer import learning_rate, make_optimizer, set_learning_rate

N_HEADS = 4
WARMUP = 100  # updates
EXAMPLES = """\
  python examples/sentiment/train.py                            on reviews made here: half a minute
  python examples/sentiment/train.py --bag-of-words             the same without the order of words
  python examples/sentiment/train.py --data reviews.tsv         lines of label, tab, text
  python examples/sentiment/train.py --data aclImdb             film reviews, {train,test}/{pos,neg}/*.txt"""


class Encoded(NamedTuple):
    ids: list[list[int]]
    labels: Tensor  # (reviews,)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("train.py", "Train a classifier of reviews.", EXAMPLES)
    add = parser.add_argument
    add("--data", metavar="PLACE", help="a .tsv, or a folder")
    add("-o", "--out", type=Path, default=Path("runs/sentiment"), metavar="DIR", help="the model")
    add("--epochs", type=parse_positive, default=4, metavar="N")
    add("--batch", type=parse_positive, default=32, metavar="N", help="reviews in an update")
    add("--layers", type=parse_positive, default=2, metavar="N", help="encoder layers")
    add(
        "--d-model",
        type=parse_positive,
        default=64,
        metavar="N",
        help=f"width of the model, of {N_HEADS} heads",
    )
    add("--pieces", type=parse_positive, metavar="N", help="size of the vocabulary")
    add(
        "--max-pieces",
        type=parse_positive,
        default=512,
        metavar="N",
        help="longest review; the rest is cut off",
    )
    add("--dropout", type=float, default=0.0, metavar="P", help="0.1 or more for real reviews")
    add("--peak-lr", type=float, default=0.002, metavar="RATE", help="peak learning rate")
    add("--seed", type=int, default=1, metavar="N")
    add("--bag-of-words", action="store_true", help="a baseline, which is not saved")
    args = parser.parse_args(argv)
    if args.d_model % (2 * N_HEADS):
        parser.error(f"--d-model {args.d_model}: must be divisible by {2 * N_HEADS}")
    return args


def run_training(args: argparse.Namespace) -> int:
    # checks the options by the rules of the config
    options = RecordReader(lambda key: f"--{key.replace('_', '-')}")
    model_options = {"d_model": args.d_model, "n_layers": args.layers, "dropout": args.dropout}
    sizes = {"d_ff": 2 * args.d_model, "n_heads": N_HEADS}
    config = options.read(ModelConfig, model_options | sizes)
    rates = {"schedule": "cosine", "warmup_steps": WARMUP, "peak_lr": args.peak_lr}
    schedule = options.read(OptimizerConfig, rates)
    choose_matmul_library()
    if not args.bag_of_words:
        check_output(args.out)
    corpus = read_corpus(args.data, args.seed)
    labels = list_labels(corpus)
    say(f"{len(corpus.train):,} reviews to train on, {len(corpus.test):,} to test with")
    vocab = learn_vocab(corpus.train, args.pieces or (8_000 if args.data else 250))
    recipe = Recipe(tuple(labels), args.max_pieces, config)

    torch.manual_seed(args.seed)
    make_model = BagOfWords if args.bag_of_words else Classifier
    model = make_model(recipe, vocab.size)
    use_backend(model, choose_training_engine(torch.device("cpu")).backend)
    train_set = encode_reviews(vocab, recipe, corpus.train)
    test_set = encode_reviews(vocab, recipe, corpus.test)
    confusion = train_classifier(model, recipe, train_set, test_set, schedule, args)
    print(format_confusion(labels, confusion))
    if isinstance(model, Classifier):
        save_classifier(args.out, model, vocab, recipe)
        say(f"try it: python examples/sentiment/classify.py {args.out} 'It is not bad at all.'")
    return 0


def list_labels(corpus: Corpus) -> list[str]:
    labels = sorted({review.label for review in corpus.train})
    unknown = sorted({review.label for review in corpus.test} - {*labels})
    if not labels or not corpus.test:
        raise UserError("there are too few reviews to train and to test; give more")
    if len(labels) < 2:
        raise UserError(f"all reviews to train on have the label {labels[0]!r}; give two labels")
    if unknown:
        raise UserError(f"no review to train on has the label {unknown[0]!r} of the test set")
    return labels


def learn_vocab(reviews: Sequence[Review], size: int) -> Vocab:
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "words"
        write_word_counts(words, tally_words([review.text.encode() for review in reviews]))
        return Vocab(train_bpe(words, VocabConfig(size=size), size_key="--pieces"))


def train_classifier(
    model: nn.Module,
    recipe: Recipe,
    train_set: Encoded,
    test_set: Encoded,
    schedule: OptimizerConfig,
    args: argparse.Namespace,
) -> Tensor:
    """Train the model; return its confusion matrix on the test set: rows are true labels, columns
    predicted ones.
    """
    n = len(train_set.ids)
    n_steps = args.epochs * math.ceil(n / args.batch)
    optimizer = make_optimizer(model, schedule)
    rng = random.Random(args.seed)
    step = 0
    with Progress("training", n_steps, "updates") as progress:
        for epoch in range(1, args.epochs + 1):
            model.train()
            order = rng.sample(range(n), n)
            for first in range(0, n, args.batch):
                # the next update
                chosen = order[first : first + args.batch]
                batch = pack([train_set.ids[i] for i in chosen])
                step += 1
                # learning_rate needs more updates than the warm-up has
                rate = learning_rate(step, recipe.model.d_model, max(n_steps, WARMUP + 1), schedule)
                set_learning_rate(optimizer, rate)

                # forward, backward, one step
                loss = F.cross_entropy(model(batch), train_set.labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.advance(postfix=f"loss {loss:.3f}")

            # how good it is by now
            confusion = count_confusion(model, test_set, len(recipe.labels))
            accuracy = compute_accuracy(confusion)
            say(f"epoch {epoch}/{args.epochs}: loss {loss:.3f}, test accuracy {accuracy:.1%}")
    return confusion


def count_confusion(model: nn.Module, test_set: Encoded, n_labels: int) -> Tensor:
    predicted = compute_probabilities(model, test_set.ids).argmax(-1)
    pairs = test_set.labels * n_labels + predicted  # true and predicted label as one number
    return pairs.bincount(minlength=n_labels**2).view(n_labels, n_labels)


def compute_accuracy(confusion: Tensor) -> float:
    return float(confusion.trace() / confusion.sum())


def encode_reviews(vocab: Vocab, recipe: Recipe, reviews: Sequence[Review]) -> Encoded:
    ids = encode_texts(vocab, [review.text for review in reviews], recipe.max_pieces)
    labels = [recipe.labels.index(review.label) for review in reviews]
    return Encoded(ids, torch.tensor(labels))


def format_confusion(labels: Sequence[str], confusion: Tensor) -> str:
    """Format a row for each true label, with a column for each predicted one, and the accuracy."""
    rows = [[label, *counts] for label, counts in zip(labels, confusion.tolist(), strict=True)]
    table = "\n".join(Table(["", *labels], rows).to_lines())
    return f"{table}\naccuracy {compute_accuracy(confusion):.1%} of {confusion.sum():,}"


if __name__ == "__main__":
    sys.exit(start_command("train.py", parse_arguments, run_training, None))
