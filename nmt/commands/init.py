"""nmt-init: a first config for your own text, with a dev and a test set if there are none."""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.commands.cli import Argv, CommandParser, start_command
from nmt.system.errors import UserError

if TYPE_CHECKING:
    from nmt.config import DataConfig
    from nmt.extras.init.recipe import Start

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
    from nmt.agreement import find_direction
    from nmt.config import RANDOM_SEED
    from nmt.config_files import load_config
    from nmt.system.files import make_folder, refuse_run_file
    from nmt.system.progress import say
    from nmt.system.runtime import tune_process

    if not RANDOM_SEED.holds(args.seed):
        raise UserError(f"--seed {args.seed}: must {RANDOM_SEED.words}")
    if args.hours is not None and not 1 / 60 <= args.hours <= 1_000:
        raise UserError(f"--hours {args.hours}: must be between a minute and 1000")
    if not args.file and not (args.src and args.tgt):
        raise UserError("give your text as --src FILE --tgt FILE, or as --file FILE")
    tune_process()  # before torch is imported
    from nmt.extras.init.suggest import suggest_config

    data = name_corpora(args, Path(args.output or "SRC-TGT.yaml").absolute().parent)
    config = args.output or f"{data.src}-{data.tgt}.yaml"
    out = Path(config).absolute()
    refuse_run_file(out)
    make_folder(out.parent)
    start = None if args.start is None else open_start(args.start, out, args.force)
    trained = None if start is None else find_direction(start.config.data)
    if trained not in (None, find_direction(data)):
        say(f"note: {args.start} was trained for {trained}, and learns {find_direction(data)} now")
    suggest_config(out, data, args.seed, args.force, start, args.hours)
    if start is None and load_config(str(out)).model.positions == "rotary":
        say("nmt-export can give this model any form but Hugging Face's: see model.positions")
    say(f"next: nmt-train --config {config}; with --plan it estimates memory and time first")
    return 0


def open_start(name: str, config: Path, is_forced: bool) -> "Start":
    """Open the model of --from. A published one is converted first, to a folder beside the config."""
    from nmt.api import convert_published
    from nmt.checkpoint.run_checkpoints import open_checkpoint
    from nmt.extras.init.recipe import Start

    path = convert_published(name, config.with_name(f"{config.stem}.start"), is_forced)
    return Start(os.path.abspath(path), open_checkpoint(path).config)


def choose_languages(args: Namespace) -> tuple[str, str]:
    from nmt.extras.init.suggest import guess_languages

    if args.languages is None:
        names = [args.file] if args.file else [args.src, args.tgt]
        languages = guess_languages(names)
        if languages is None:
            raise UserError(
                f"{' and '.join(names)}: the names do not show the languages; give --languages "
                "SRC-TGT, such as --languages en-de"
            )
        return languages
    match = re.fullmatch(r"([A-Za-z_]+)-([A-Za-z_]+)", args.languages)
    if match is None or match[1] == match[2]:
        raise UserError(
            f"--languages {args.languages}: is not a pair of languages; write it as en-de"
        )
    return match[1], match[2]


def name_corpora(args: Namespace, root: Path) -> "DataConfig":
    """Return the corpora that the options name, with paths relative to `root`, and their languages."""
    from nmt.agreement import check_corpus
    from nmt.config import CorpusConfig, DataConfig
    from nmt.system.records import find_unusable_character

    def locate(path: str) -> str:
        if unusable := find_unusable_character(path):
            raise UserError(
                f"{path!r}: has {unusable} in its name, which a config cannot contain; rename it"
            )
        return os.path.abspath(path).removeprefix(os.path.join(root, ""))

    def make_corpus(prefix: str, archive: str | None = None) -> CorpusConfig | None:
        paths = [vars(args)[f"{prefix}{part}"] for part in ("src", "tgt", "file")]
        if not any(paths):
            return None
        if archive is None:  # otherwise these are members of it
            paths = [path and locate(path) for path in paths]
        src, tgt, file = paths
        corpus = CorpusConfig(src, tgt, archive and locate(archive), file)
        if problem := corpus.check():
            option = f"--{prefix}".replace("_", "-")
            raise UserError(f"{option}src, {option}tgt, {option}file: {problem}")
        return corpus

    train = make_corpus("", args.archive)
    assert train is not None  # of write_config and of nmt-train
    valid, test = make_corpus("valid_"), make_corpus("test_")
    src, tgt = choose_languages(args)
    data = DataConfig(src, tgt, root=str(root), train=(train,), valid=valid, test=test)
    check_corpus("--", train, data)
    check_corpus("--valid-", valid, data)
    check_corpus("--test-", test, data)
    return data


def find_config_for(src: str, tgt: str) -> str:
    """Return the name of the config that nmt-init writes for two files. One that it wrote earlier is
    kept, so that the same command continues the same run.
    """
    from nmt.config_files import load_config
    from nmt.system.progress import say
    from nmt.system.runtime import read_rank_variable

    args = parse_arguments([f"--src={src}", f"--tgt={tgt}"])
    data = name_corpora(args, Path.cwd())
    config = f"{data.src}-{data.tgt}.yaml"
    if os.path.exists(config):
        if load_config(config).data.train != data.train:
            raise UserError(
                f"{config}: is for text other than {src} and {tgt}; give --config FILE, or write a "
                f"config with nmt-init and -o FILE"
            )
        say(f"using {config}, which was written earlier")
    elif read_rank_variable("WORLD_SIZE", 1) > 1:
        raise UserError(
            f"{config}: does not exist yet; write it with nmt-init --src {src} --tgt {tgt} first, "
            "so that all ranks read the same choices"
        )
    else:
        write_config(args)
    return config


main = partial(start_command, "nmt-init", parse_arguments, write_config, extra="init")

if __name__ == "__main__":
    sys.exit(main())
