"""nmt-report: write one page about one or several runs: scores, curves, translations, recipe, data."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from nmt.commands.cli import Argv, CommandParser, start_command

EXAMPLES = """\
  nmt-report runs/base                                  writes runs/base/report.html, as training does when it ends
  nmt-report runs/base runs/big -o compare.html         several runs on one page: scores, curves, settings that differ
  nmt-report runs/seed* -o seeds.html

The page is one file that needs no network. docs/report.md says what is in it.
For other people's translations: nmt-eval --hypotheses FILE --ref FILE --report FILE.html"""


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-report", "Write one self-contained page about one or several runs.", EXAMPLES
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write the page (default RUN/report.html)"
    )
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and args.output is None:
        parser.error("several runs need -o FILE, because the page belongs to none of them alone")
    return args


def report(args: Namespace) -> int:
    from nmt.extras.report.page import report_runs

    report_runs(args.runs, args.output)
    return 0


main = partial(start_command, "nmt-report", parse_arguments, report, extra="report")

if __name__ == "__main__":
    sys.exit(main())
