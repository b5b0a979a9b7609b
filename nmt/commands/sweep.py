"""nmt-sweep: train, average and score a set of runs, and compare them in one table."""

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.commands.cli import Argv, CommandParser, add_overrides, parse_positive, start_command

if TYPE_CHECKING:
    from nmt.extras.sweep.grid import PlannedRun, Sweep

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


def list_runs(sweep: "Sweep") -> None:
    from nmt.extras.sweep.result import read_result
    from nmt.model.size import count_weights

    for number, run in enumerate(sweep.runs, 1):
        config = run.config
        size = "? parameters (they depend on its vocabulary)"
        if config.vocab.model is None:
            n_weights = count_weights(config.model, config.vocab.sizes)
            size = f"{n_weights / 1e6:.2f}M parameters"
        state = ", finished" if read_result(sweep, run) else ""
        print(f"{number}  {run.label}  {size}, {config.training.steps:,} updates{state}")


def finish_sweep(sweep: "Sweep", n_jobs: int) -> int:
    """Do all runs that are not finished, and print the table."""
    import signal

    from nmt.extras.sweep.jobs import RunQueue
    from nmt.extras.sweep.result import read_result
    from nmt.extras.sweep.table import format_text, make_rows, write_tables
    from nmt.system.progress import say

    todo = [run for run in sweep.runs if read_result(sweep, run) is None]
    say(f"{sweep.folder}: {len(sweep.runs)} runs, of which {len(todo)} are to do")
    queue = RunQueue(sweep, todo, n_jobs)

    def report_end(run: "PlannedRun") -> None:
        say(f"{run.label}: {describe_end(sweep, run, queue.failures)}")
        write_tables(sweep, make_rows(sweep, queue.failures))

    stop_signal = queue.finish_runs(report_end)
    if stop_signal:
        say("stopped and saved; run the same command again to continue")
        return 130 if stop_signal == signal.SIGINT else 75
    rows = make_rows(sweep, queue.failures)
    write_tables(sweep, rows)
    print(format_text(sweep, rows))
    return 1 if queue.failures else 0


def describe_end(sweep: "Sweep", run: "PlannedRun", failures: dict[str, str]) -> str:
    from nmt.extras.sweep.result import read_result

    result = read_result(sweep, run)
    if run.label in failures or result is None:
        return f"failed: {failures.get(run.label, 'no result')}"
    scores = [f"{name} BLEU {score.bleu:.2f}" for name, score in result.scores.items()]
    return ", ".join([f"{result.updates:,} updates in {result.minutes:.1f} min", *scores])


main = partial(start_command, "nmt-sweep", parse_arguments, sweep_runs, extra="sweep")

if __name__ == "__main__":
    sys.exit(main())
