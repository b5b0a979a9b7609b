"""nmt-export: write a checkpoint for another engine, after comparing that engine with ours."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from nmt.commands.cli import Argv, CommandParser, start_command

EXAMPLES = """\
  nmt-export runs/base/average --to ctranslate2 -o exports/base-int8 --quantization int8
  nmt-export runs/base/average --to huggingface -o exports/base-hf
  nmt-export runs/base/average --to marian -o exports/base-marian
  nmt-export runs/base/average --to bergamot -o exports/base-browser
  nmt-export runs/base/average --to argos -o exports/en_de.argosmodel
  nmt-export runs/base --to safetensors -o exports/base --check-lines news.en

The export and the checkpoint translate the same lines and score the same translations. In float32
the log-probability of each piece must agree to 1e-4 and 99.9% of the lines must be the same; with
fewer bits the mean difference is bounded. If the check fails, nothing is written and the exit code is 1.
ctranslate2 and transformers come with the extra export."""

FORMAT_NAMES = ("ctranslate2", "huggingface", "marian", "bergamot", "safetensors", "argos")


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-export", "Write a checkpoint in the format of another engine, and check it.", EXAMPLES
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, an average, or a run folder"
    )
    parser.add_argument("--to", required=True, choices=FORMAT_NAMES, help="the format to write")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR",
        help="where to write it, --to argos as a file; an earlier export is replaced",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the earlier export even if its README.md was edited",
    )
    parser.add_argument(
        "--quantization",
        metavar="TYPE",
        help="float32 (default, and all that marian has), float16, bfloat16; ctranslate2 also int8, int8_float32, "
        "int8_float16, int8_bfloat16; bergamot int8 (default) or float32",
    )
    parser.add_argument(
        "--check-lines",
        metavar="FILE",
        help="source text for the comparison, which uses the first 1,000 lines; default: 100 of the run's dev set, "
        "or random pieces if its store is not here",
    )
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    return build_parser().parse_args(argv)


def export_model(args: Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported
    from nmt.extras.export.by_name import export_by_name

    export_by_name(args)
    return 0


main = partial(start_command, "nmt-export", parse_arguments, export_model, extra="export")

if __name__ == "__main__":
    sys.exit(main())
