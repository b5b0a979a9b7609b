"""nmt-track: send the figures of a run to TensorBoard, W&B or a user's sink.

Training does this with `training.track`; the command is for a run that has ended, trains elsewhere,
or was started without it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.commands.cli import make_parser, start_command
from nmt.system.errors import Failure, UserError

if TYPE_CHECKING:
    from nmt.train.events import Event
    from nmt.train.tracking import MetricsTail

INTERVAL_S = 1.0  # between looks at the file, with --follow
EXAMPLES = """\
  nmt-track runs/base --to tensorboard             send all figures so far, to runs/base/tensorboard
  tensorboard --logdir runs                        show them, and those of other runs
  nmt-track runs/base --to wandb --follow          also send those to come; Ctrl-C ends it
  WANDB_MODE=offline nmt-track runs/base --to wandb"""


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "nmt-track", "Send the figures of a run to TensorBoard, W&B or another sink.", EXAMPLES
    )
    parser.add_argument("run", metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--to",
        required=True,
        metavar="SINK",
        help="tensorboard, wandb, or a sink that an installed package offers (docs/tracking.md)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="also send figures written from now on, until Ctrl-C"
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-track", parse_arguments, track_figures, argv)


def track_figures(args: argparse.Namespace) -> int:
    from nmt.config import OUR_SINKS, check_sinks
    from nmt.system.progress import say
    from nmt.system.run_folder import RunFolder
    from nmt.train.sinks import check_sinks_installed
    from nmt.train.tracking import MetricsTail, send_events

    check_sinks([args.to])
    check_sinks_installed([args.to])
    run = RunFolder(Path(args.run))
    if not run.metrics.exists():
        raise UserError(f"{run.metrics}: not found; give the folder of a run that has started")
    events = read_events_until_interrupted(MetricsTail(run.metrics), args.follow)
    try:
        n_lines = send_events(run.path, args.to, events)
    except Exception as error:
        # The author of a sink needs to see where it failed.
        if args.to not in OUR_SINKS or isinstance(error, UserError | OSError):
            raise
        raise Failure(f"{args.to}: {error}") from None
    say(f"{args.to} has {n_lines:,} lines of {run.metrics}")
    return 0


def read_events_until_interrupted(tail: "MetricsTail", is_followed: bool) -> Iterator["Event"]:
    """Yield the events so far and, if the file is followed, those to come until Ctrl-C."""
    yield from tail.read()
    while is_followed:
        try:
            time.sleep(INTERVAL_S)
        except KeyboardInterrupt:
            is_followed = False
        yield from tail.read()


if __name__ == "__main__":
    sys.exit(main())
