"""nmt-sweep: train, average and score a set of runs, and compare them in one table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.commands.cli import add_overrides, make_parser, parse_positive, start_command

if TYPE_CHECKING:
    from nmt.sweep.grid import PlannedRun, Sweep

EXAMPLES = """\
  nmt-sweep grid.yaml --out sweeps/depth                trains, averages and scores each run, and prints a table
  nmt-sweep grid.yaml --out sweeps/depth --dry-run      lists the runs, then exits
  nmt-sweep grid.yaml --out sweeps/depth --jobs 4       four runs at a time
  nmt-sweep grid.yaml --out sweeps/depth data.root=/corpora/multi30k

Run the same command again to continue where it stopped. Each run is a run folder as of nmt-train, FOLDER/NAME-seedN.
FOLDER also gets table.md and table.csv. docs/sweeps.md says what a GRID.yaml is."""


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "nmt-sweep", "Train, average and score a set of runs, and compare them.", EXAMPLES
    )
    parser.add_argument("grid", metavar="FILE", help="a GRID.yaml, which lists the runs")
    add_overrides(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the sweep")
    parser.add_argument(
        "--jobs",
        type=parse_positive,
        default=1,
        metavar="N",
        help="how many runs to train side by side; they share the cores (default 1)",
    )
    parser.add_argument(
        "--only", type=parse_positive, metavar="INDEX", help="do this run alone, without the table"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs with their sizes, and exit"
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-sweep", parse_arguments, sweep_runs, argv)


def sweep_runs(args: argparse.Namespace) -> int:
    from nmt.sweep.grid import read_grid
    from nmt.sweep.single import run_process
    from nmt.system.errors import UserError
    from nmt.system.files import lock, make_folder

    sweep = read_grid(args.grid, Path(args.out), args.overrides)
    if args.only is not None and args.only > len(sweep.runs):
        raise UserError(f"--only {args.only}: the grid has {len(sweep.runs)} runs")
    if args.dry_run:
        list_runs(sweep)
        return 0
    make_folder(sweep.folder)
    if args.only is not None:
        return run_process(sweep, sweep.runs[args.only - 1])
    with lock(sweep.folder, "nmt-sweep"):
        return finish_sweep(sweep, args.jobs)


def list_runs(sweep: "Sweep") -> None:
    from nmt.model.size import count_weights
    from nmt.sweep.figures import read_figures

    for run in sweep.runs:
        config = run.config
        size = "? parameters, those of its vocabulary"
        if config.vocab.model is None:
            n_weights = count_weights(config.model, config.vocab.sizes)
            size = f"{n_weights / 1e6:.2f}M parameters"
        state = ", finished" if read_figures(sweep, run) else ""
        print(f"{run.index}  {run.label}  {size}, {config.training.steps:,} updates{state}")


def finish_sweep(sweep: "Sweep", n_jobs: int) -> int:
    """Do all runs that are not finished, and print the table."""
    import signal

    from nmt.sweep.figures import read_figures
    from nmt.sweep.jobs import SideBySide
    from nmt.sweep.table import format_text, make_rows, write_tables
    from nmt.system.progress import say

    todo = [run for run in sweep.runs if read_figures(sweep, run) is None]
    n_done = len(sweep.runs) - len(todo)
    say(f"{sweep.folder}: {len(sweep.runs)} runs, of which {n_done} are finished")
    jobs = SideBySide(sweep, n_jobs)

    def tell(run: "PlannedRun") -> None:
        nonlocal n_done
        n_done += 1
        say(f"[{n_done}/{len(sweep.runs)}] {run.label}: {describe_end(sweep, run, jobs.failures)}")
        write_tables(sweep, make_rows(sweep, jobs.failures))

    jobs.run(todo, tell)
    if jobs.signal:
        say("stopped, and saved; run the same command again to continue")
        return 130 if jobs.signal == signal.SIGINT else 75
    rows = make_rows(sweep, jobs.failures)
    write_tables(sweep, rows)
    print(format_text(sweep, rows))
    return 1 if jobs.failures else 0


def describe_end(sweep: "Sweep", run: "PlannedRun", failures: dict[str, str]) -> str:
    from nmt.sweep.figures import read_figures

    figures = read_figures(sweep, run)
    if run.label in failures or figures is None:
        return f"failed: {failures.get(run.label, 'no figures')}"
    scores = [f"{score.set} BLEU {score.bleu:.2f}" for score in figures.scores]
    nll = [] if figures.nll is None else [f"dev NLL {figures.nll:.4f}"]
    return f"{figures.updates:,} updates in {figures.minutes:.1f} min, {', '.join(nll + scores)}"


if __name__ == "__main__":
    sys.exit(main())
