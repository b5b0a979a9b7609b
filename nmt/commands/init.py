"""nmt-init: a first config for somebody's own text, with a dev and a test set if there are none."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nmt.commands.cli import make_parser, start_command
from nmt.system.errors import UserError

if TYPE_CHECKING:
    from nmt.config import CorpusConfig

EXAMPLES = """\
  nmt-init --src train.en --tgt train.de -o my.yaml
  nmt-init --src a.de.gz --tgt a.en.gz --valid-src dev.de --valid-tgt dev.en --test-src t.de --test-tgt t.en
  nmt-init --file pairs.tsv --languages en-sv
  nmt-init --archive de-en.txt.zip --src Books.de-en.de --tgt Books.de-en.en

Then nmt-train --config my.yaml trains, without an edit. The text stays as it is. A set that is not given
is drawn: files such as my.test.de beside the config, whose pairs training leaves out."""


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "nmt-init",
        "Look at your own text and write a config that fits it, with a reason for each choice.",
        EXAMPLES,
    )
    for option, what in (
        ("--src", "the source text, one sentence per line"),
        ("--tgt", "its translation, line by line"),
        ("--archive", "the archive of which --src and --tgt are members"),
        ("--file", "instead: one table with both sides, .tsv, .jsonl, .tmx or .parquet"),
        ("--valid-src", "the dev set; by default one is drawn"),
        ("--valid-tgt", "its translation"),
        ("--valid-file", "or one table with both sides"),
        ("--test-src", "the test set; by default one is drawn"),
        ("--test-tgt", "its translation"),
        ("--test-file", "or one table with both sides"),
    ):
        parser.add_argument(option, metavar="FILE", help=what)
    parser.add_argument(
        "--languages", metavar="SRC-TGT", help="such as en-de; default: as the files are named"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of the run and of what is drawn (1)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the config; default: SRC-TGT.yaml")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-init", parse_arguments, write_config, argv)


def write_config(args: argparse.Namespace) -> int:
    from pathlib import Path

    from nmt.config import RANDOM_SEED, DataConfig
    from nmt.corpus.first_config import guess_languages, write_first_config
    from nmt.system.files import check_not_ours, make_folder
    from nmt.system.progress import say

    if not RANDOM_SEED.holds(args.seed):
        raise UserError(f"--seed {args.seed}: must {RANDOM_SEED.words}")
    names = [args.file] if args.file else [args.src, args.tgt]
    if None in names:
        raise UserError("give your text as --src FILE --tgt FILE, or as --file FILE")
    if args.file is None and args.src == args.tgt:
        raise UserError(f"--src and --tgt are both {args.src}; give two different files")
    if args.languages is None:
        languages = guess_languages(names)
        if languages is None:
            raise UserError(
                f"{' and '.join(names)}: the names do not tell the languages; give --languages "
                "SRC-TGT, such as --languages en-de"
            )
    else:
        found = re.fullmatch(r"([A-Za-z_]+)-([A-Za-z_]+)", args.languages)
        if found is None or found[1] == found[2]:
            raise UserError(
                f"--languages {args.languages}: is not a pair of languages; write it as en-de"
            )
        languages = (found[1], found[2])

    config = args.output or f"{'-'.join(languages)}.yaml"
    out = Path(config).absolute()
    check_not_ours(out)
    make_folder(out.parent)
    root = str(out.parent)
    train = _name_corpus(root, "", args.src, args.tgt, args.file, args.archive)
    assert train is not None
    data = DataConfig(
        *languages,
        root=root,
        train=(train,),
        valid=_name_corpus(root, "valid-", args.valid_src, args.valid_tgt, args.valid_file),
        test=_name_corpus(root, "test-", args.test_src, args.test_tgt, args.test_file),
    )
    write_first_config(out, data, args.seed, args.force)
    say(f"next: nmt-train --config {config}; with --plan it estimates memory and time first")
    return 0


def _name_corpus(
    root: str,
    prefix: str,
    src: str | None,
    tgt: str | None,
    file: str | None,
    archive: str | None = None,
) -> "CorpusConfig | None":
    """The corpus that the options with this prefix name, with paths that start from `root`."""
    from nmt.config import CorpusConfig

    if src is None and tgt is None and file is None and archive is None:
        return None
    corpus = CorpusConfig(src, tgt, archive, file)
    if problem := corpus.check():
        raise UserError(f"--{prefix}src, --{prefix}tgt, --{prefix}file: {problem}")

    def locate(path: str | None) -> str | None:
        if path is None:
            return None
        path = os.path.abspath(path)
        return path.removeprefix(os.path.join(root, ""))

    if archive is not None:
        return CorpusConfig(src, tgt, locate(archive), file)
    return CorpusConfig(locate(src), locate(tgt), file=locate(file))


if __name__ == "__main__":
    sys.exit(main())
