"""nmt-sweep: train, average and score a set of runs, and compare them in one table."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from nmt.commands.cli import Argv, CommandParser, add_overrides, parse_positive, start_command

EXAMPLES = """\
  nmt-sweep grid.yaml --out sweeps/depth                train, average and score each run, and print a table
  nmt-sweep grid.yaml --out sweeps/depth --dry-run      list the runs, then exit
  nmt-sweep grid.yaml --out sweeps/depth --jobs 4       four runs at a time
  nmt-sweep grid.yaml --out sweeps/depth data.root=/corpora/multi30k
  nmt-sweep grid.yaml --out sweeps/depth --only 2       do only the second run, as a task of a job array does

Run the same command again to continue where it stopped. Each run is a run folder as nmt-train makes it,
DIR/NAME-seedN. DIR also gets table.md and table.csv. docs/sweeps.md explains GRID.yaml."""


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-sweep", "Train, average and score a set of runs, and compare them.", EXAMPLES
    )
    parser.add_argument(
        "grid",
        metavar="FILE",
        help="a GRID.yaml, which lists the runs, or the name of a shipped one (docs/sweeps.md)",
    )
    add_overrides(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the sweep")
    parser.add_argument(
        "--jobs",
        type=parse_positive,
        default=1,
        metavar="N",
        help="how many runs to train at a time, sharing the cores (default 1)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--only",
        type=parse_positive,
        metavar="INDEX",
        help="do only the run with this number in the list of --dry-run, without the table",
    )
    modes.add_argument(
        "--dry-run", action="store_true", help="list the runs with their sizes, and exit"
    )
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    return build_parser().parse_intermixed_args(argv)


def sweep_runs(args: Namespace) -> int:
    from nmt.extras.sweep.grid import OUTPUTS, read_grid
    from nmt.extras.sweep.run_all import finish_sweep, list_runs
    from nmt.extras.sweep.run_one import run_process
    from nmt.system.errors import UserError
    from nmt.system.files import lock, make_folder
    from nmt.system.output_folder import check_replaceable_file

    sweep = read_grid(args.grid, Path(args.out), args.overrides)
    if args.only is not None and args.only > len(sweep.runs):
        raise UserError(
            f"--only {args.only}: the grid has only {len(sweep.runs)} runs; give one of their numbers"
        )
    if args.dry_run:
        list_runs(sweep)
        return 0
    make_folder(sweep.folder)
    for name, mark in OUTPUTS.items():
        check_replaceable_file(sweep.folder / name, "nmt-sweep's own", [mark])
    if args.only is not None:
        return run_process(sweep, sweep.runs[args.only - 1])
    with lock(sweep.folder, "nmt-sweep"):
        return finish_sweep(sweep, args.jobs)


main = partial(start_command, "nmt-sweep", parse_arguments, sweep_runs, extra="sweep")

if __name__ == "__main__":
    sys.exit(main())
