"""nmt-report: write one page about one or several runs: scores, curves, translations, recipe, data."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nmt.commands.cli import make_parser, start_command

if TYPE_CHECKING:
    from nmt.report.facts import RunFacts

EXAMPLES = """\
  nmt-report runs/base                                  writes runs/base/report.html, as training does when it ends
  nmt-report runs/base runs/big -o compare.html         several runs on one page: curves, scores, most changed lines
  nmt-report runs/base --png curves.png                 also the main curves as an image, for a paper or a chat
  nmt-report runs/seed* -o seeds.html
  nmt-report runs/base --attention 3 --attention 17     with the attention of two lines of the test set

The page is one file that needs no network. docs/report.md says what is in it.
For other people's translations: nmt-eval --hypotheses FILE --ref FILE --report FILE.html"""


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "nmt-report", "Write one self-contained page about one or several runs.", EXAMPLES
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write the page (default RUN/report.html)"
    )
    parser.add_argument(
        "--png", metavar="FILE", help="also write the main curves to FILE as an image"
    )
    parser.add_argument(
        "--attention",
        type=int,
        action="append",
        default=[],
        metavar="LINE",
        help="show what the model attends to in this line of the test set, which nmt-eval must have "
        "translated; may be given several times",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and args.output is None:
        parser.error("several runs need -o FILE, because the page belongs to none of them alone")
    if len(args.runs) > 1 and args.attention:
        parser.error("--attention needs exactly one RUN, because its line belongs to one model")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-report", parse_arguments, report, argv)


def report(args: argparse.Namespace) -> int:
    from pathlib import Path

    from nmt.report.facts import read_run
    from nmt.report.page import check_report_output, write_page, write_png
    from nmt.system.progress import say
    from nmt.system.run_folder import RunFolder

    own = [RunFolder(Path(name)).report for name in args.runs]
    output = own[0] if args.output is None else Path(args.output)
    check_report_output(output, own)
    png = None if args.png is None else Path(args.png)
    if png is not None:
        check_report_output(png, own)

    runs = [read_run(Path(name)) for name in args.runs]
    if args.attention:
        runs = [add_test_lines(runs[0], args.attention)]
    write_page(runs, output)
    say(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    if png is not None:
        write_png(runs, png)
        say(f"{png}: {png.stat().st_size / 1e6:.1f} MB")
    return 0


def add_test_lines(run: "RunFacts", numbers: list[int]) -> "RunFacts":
    """Return the facts with the attention of these lines."""
    from dataclasses import replace
    from pathlib import Path

    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.report.attention_lines import map_test_lines

    lines = map_test_lines(Path(run.place), run, numbers)
    return replace(run, attention=(*lines, *run.attention))


if __name__ == "__main__":
    sys.exit(main())
