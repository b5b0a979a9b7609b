"""nmt-average: the mean of checkpoints, as the paper evaluates it."""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import guarded, make_parser

EXAMPLES = """\
  nmt-average runs/base --last 5                        -> runs/base/average (the paper: 5 for base, 20 for big)
  nmt-average runs/base/checkpoints/step-0090000 runs/base/checkpoints/step-0100000 -o runs/two

The result is a checkpoint folder without optimizer state, complete in itself: nmt-eval and nmt-translate take it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-average", "Average the weights of checkpoints, in fp32.", EXAMPLES)
    parser.add_argument("paths", nargs="+", metavar="RUN|CHECKPOINT", help="a run folder, or checkpoint folders")
    parser.add_argument("--last", type=int, metavar="N", help="of a run folder, the newest N checkpoints (default 5)")
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write the average (default RUN/average)")
    args = parser.parse_args(argv)
    return guarded(lambda: work(args), "nmt-average")


def work(args: argparse.Namespace) -> int:
    from pathlib import Path

    from nmt.checkpoint import average, steps
    from nmt.errors import UserError
    from nmt.files import RunFolder, make_folder
    from nmt.progress import say

    paths = [Path(path) for path in args.paths]
    run = RunFolder(paths[0])
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; give a run folder or checkpoint folders")
    is_run = len(paths) == 1 and run.checkpoints.is_dir()
    if is_run:
        n = 5 if args.last is None else args.last
        found = steps(run)
        if n < 1:
            raise UserError(f"--last {n}: give a number of at least 1")
        if len(found) < n:
            raise UserError(f"--last {n}: {run.path} has {len(found)} checkpoints; lower it, or write them more often")
        paths = [run.checkpoint(step) for step in found[-n:]]
    elif args.last is not None:
        raise UserError("--last goes with one run folder, not with a list of checkpoints")
    elif args.output is None:
        raise UserError("give -o DIR for the average of a list of checkpoints")
    out = Path(args.output) if args.output else run.average
    make_folder(out.resolve().parent)
    average(paths, out)
    say(f"{out}: the mean of {len(paths)} checkpoints ({', '.join(path.name for path in paths)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
