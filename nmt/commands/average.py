"""nmt-average: the mean of several checkpoints, which is what the paper evaluates."""

import math
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

from nmt.commands.cli import (
    Argv,
    CommandParser,
    check_options,
    parse_positive,
    start_command,
    write_card,
)
from nmt.system.errors import UserError
from nmt.system.extras import check_extra
from nmt.system.run_folder import RunFolder

EXAMPLES = """\
  nmt-average runs/base --last 5                        -> runs/base/average: the paper's mean for base
  nmt-average runs/big --last 20                        the same for big
  nmt-average runs/base --curve                         dev BLEU against N: which N is best for this run
  nmt-average runs/base/checkpoints/step-0090000 runs/base/checkpoints/step-0100000 -o runs/two

The result is a checkpoint folder without optimizer state, complete in itself: nmt-eval and nmt-translate take it. Its
README.md is a model card; once you have edited it, it is not overwritten."""

CONFLICTS = {"--best": "--every", "--curve": "-o"}  # --curve writes no average


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a number; if it is the run, put it before the options"
        ) from None
    if not 0 < minutes < math.inf:
        raise ArgumentTypeError(f"{text}: give a number of minutes above 0")
    return minutes


def build_parser() -> ArgumentParser:
    parser = CommandParser("nmt-average", "Average the weights of checkpoints.", EXAMPLES)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RUN|CHECKPOINT",
        help="a run folder, or checkpoint folders; with --curve, device=cpu may follow",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--last",
        type=parse_positive,
        metavar="N",
        help="the newest N checkpoints of a run folder; if training.checkpoint_every is set, only those that it "
        "planned and the last one count (default 5)",
    )
    choice.add_argument(
        "--best",
        type=parse_positive,
        metavar="N",
        help="the N consecutive validated checkpoints with the best mean dev score: BLEU, or the score that "
        "evaluation.best_by names",
    )
    choice.add_argument(
        "--curve",
        type=_parse_counts,
        nargs="?",
        const=(),
        metavar="N,N,...",
        help="average the last N for each N, decode the dev set (never the test set) and report which "
        "N is best; writes RUN/averaging.json (default 1,2,3,5,10,20, up to the number of checkpoints)",
    )
    parser.add_argument(
        "--every",
        type=_parse_minutes,
        metavar="MINUTES",
        help="choose from all checkpoints, planned or not, those at least MINUTES of training apart, "
        "counted back from the newest",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where to write the average (default RUN/average)"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the earlier average even if its README.md was edited",
    )
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    args.settings = [word for word in args.paths if word.startswith("device=")]
    args.paths = [word for word in args.paths if word not in args.settings]
    if not args.paths:
        parser.error("give a run folder, or checkpoint folders")
    check_options(parser, args, CONFLICTS, {})
    if args.settings and args.curve is None:
        parser.error(f"{args.settings[0]}: only --curve computes on another device; leave it out")
    return args


def _parse_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not a list of numbers such as 1,5,20; "
            "if it is the run or a setting, put it before the options"
        ) from None
    if min(counts) < 1:
        raise ArgumentTypeError(f"{text}: give numbers of at least 1")
    return counts


def check_is_run(args: Namespace, path: Path) -> None:
    """Refuse options that a list of checkpoints does not support."""
    from nmt.evaluate.results import find_run

    for name in ("last", "best", "curve", "every"):
        if vars(args)[name] is not None:
            run = find_run(path) or "it, not several nor a list of checkpoints"
            raise UserError(f"--{name} needs one run folder; give {run}")
    if not args.output:
        raise UserError("give -o DIR for the average of a list of checkpoints")


def average_run(args: Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.api import convert_published
    from nmt.average.mean import average_checkpoints
    from nmt.average.select import choose_checkpoints, list_doubts
    from nmt.checkpoint.run_checkpoints import list_steps
    from nmt.evaluate.results import find_run, read_results
    from nmt.system.errors import explain_missing
    from nmt.system.files import check_own_folder
    from nmt.system.progress import say

    paths = [convert_published(path) for path in args.paths]
    for path in paths:
        if not path.is_dir():
            raise explain_missing(path, "give a run folder or checkpoint folders")
    run = RunFolder(paths[0])
    is_run = len(paths) == 1 and run.checkpoints.is_dir()
    if not is_run:
        check_is_run(args, run.path)
    steps = list_steps(run)
    try:
        if args.curve is not None:
            check_extra("curve", "--curve")
            from nmt.config_files import parse_device
            from nmt.extras.curve import draw_curve

            print(draw_curve(run, args.curve, args.every, parse_device(args.settings)))
            return 0

        # choose
        if is_run:
            chosen = choose_checkpoints(run, args.last, args.best, args.every)
            paths = [run.checkpoint(candidate.step) for candidate in chosen]
            for candidate, path in zip(chosen, paths, strict=True):
                say(f"{path.name}: {candidate}")
            if doubts := list_doubts(run, chosen):
                say(
                    f"warning: this mean may be worse than its best member: {'; '.join(doubts)}; --curve "
                    "compares means on the dev set, --best N takes the N in a row that score best"
                )

        # average
        if args.output:
            out = Path(args.output)
        else:
            out = run.average
            check_own_folder(out, inside=run.path)
        names = average_checkpoints(paths, out, args.force)
    except UserError:
        if set(list_steps(run)).issuperset(steps):
            raise
        raise UserError(
            f"{run.checkpoints}: a checkpoint was removed meanwhile, as training does with its oldest; "
            "run the same command again"
        ) from None

    # describe
    scores = []
    try:
        if home := find_run(out):
            scores = read_results(home)
    except UserError as error:
        say(f"warning: {error}; the card is written without scores")
    write_card(out, scores)
    counted = "1 checkpoint" if len(names) == 1 else f"{len(names)} checkpoints"
    say(f"{out}: the mean of {counted} ({', '.join(names)})")
    say(f"next: nmt-eval {shlex.quote(str(out))}")
    return 0


main = partial(start_command, "nmt-average", parse_arguments, average_run)

if __name__ == "__main__":
    sys.exit(main())
