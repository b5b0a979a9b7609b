"""nmt-init: a first config for your own text, with a dev and a test set if there are none."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from nmt.commands.cli import Argv, CommandParser, start_command

EXAMPLES = """\
  nmt-init --src train.en --tgt train.de -o my.yaml
  nmt-init --src a.de.gz --tgt a.en.gz --valid-src dev.de --valid-tgt dev.en --test-src t.de --test-tgt t.en
  nmt-init --file pairs.tsv --languages en-sv
  nmt-init --from runs/base/average --src my.en --tgt my.de -o tuned.yaml       continues a model
  nmt-init --from hf:Helsinki-NLP/opus-mt-en-de --src my.en --tgt my.de         a model of the Hugging Face hub
  nmt-init --src train.en --tgt train.de --hours 0.5 -o my.yaml       what this machine can train in half an hour
  nmt-init --archive de-en.txt.zip --src Books.de-en.de --tgt Books.de-en.en

nmt-train --config my.yaml then trains without further edits. Your text is not changed. If you give no dev or
test set, one is drawn from your text, into files such as my.test.de beside the config; training skips its pairs."""


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-init",
        "Look at your own text and write a config that fits it, with a reason for each choice.",
        EXAMPLES,
    )
    for option, what in (
        ("--src", "the source text, one sentence per line"),
        ("--tgt", "its translation, line by line"),
        ("--archive", "the archive that contains --src and --tgt"),
        (
            "--file",
            "instead of --src and --tgt: one table with both sides, .tsv, .jsonl, .tmx or .parquet",
        ),
        ("--valid-src", "the dev set's source; by default a dev set is drawn from the text"),
        ("--valid-tgt", "its translation"),
        ("--valid-file", "the dev set as one table with both sides"),
        ("--test-src", "the test set's source; by default a test set is drawn from the text"),
        ("--test-tgt", "its translation"),
        ("--test-file", "the test set as one table with both sides"),
    ):
        parser.add_argument(option, metavar="FILE", help=what)
    parser.add_argument(
        "--from",
        dest="start",
        metavar="MODEL",
        help="continue this model: a run, an average, a checkpoint, the folder of a Hugging Face Marian "
        "model, or hf:OWNER/NAME",
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="how long training may take; chooses a smaller model if necessary, and as many updates as fit",
    )
    parser.add_argument(
        "--languages",
        metavar="SRC-TGT",
        help="such as en-de; default: taken from the names of the files",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the run and of the sets that are drawn (default 1)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write the config (default SRC-TGT.yaml)"
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    return build_parser().parse_args(argv)


def write_config(args: Namespace) -> int:
    from nmt.extras.init.first_config import write_first_config

    write_first_config(args)
    return 0


main = partial(start_command, "nmt-init", parse_arguments, write_config, extra="init")

if __name__ == "__main__":
    sys.exit(main())
