"""nmt-average: the mean of checkpoints, as the paper evaluates it."""

import argparse
import math
import sys
from collections.abc import Sequence

from nmt.commands.cli import guarded, make_parser
from nmt.system.run_folder import RunFolder

EXAMPLES = """\
  nmt-average runs/base --last 5                        -> runs/base/average (the paper: 5 for base, 20 for big)
  nmt-average runs/base --every 10                      five, at least ten minutes of training apart: the paper's clock
  nmt-average runs/base --curve                         dev BLEU against N: which N is worth it for this run
  nmt-average runs/base/checkpoints/step-0090000 runs/base/checkpoints/step-0100000 -o runs/two

The result is a checkpoint folder without optimizer state, complete in itself: nmt-eval and nmt-translate take it. Its
README.md is a model card, which is left alone once you have edited it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-average", "Average the weights of checkpoints, in fp32.", EXAMPLES)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RUN|CHECKPOINT",
        help="a run folder, or checkpoint folders; with --curve device=cpu may follow",
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="of a run folder, the newest N checkpoints (default 5; with --ema all)",
    )
    parser.add_argument(
        "--best", type=int, metavar="N", help="the N of highest dev BLEU (NLL where BLEU is off)"
    )
    parser.add_argument(
        "--every",
        type=_number,
        metavar="MINUTES",
        help="checkpoints at least so many minutes of training apart, counted back from the newest",
    )
    parser.add_argument(
        "--ema",
        type=_number,
        nargs="?",
        const=0.9,
        metavar="DECAY",
        help="the newest weighs most, each older one DECAY times the next (default 0.9): an "
        "exponential mean over the saved checkpoints, not over updates",
    )
    parser.add_argument(
        "--curve",
        type=_numbers,
        nargs="?",
        const=(),
        metavar="N,N,...",
        help="average the last N for each N, decode the dev set (never the test set) and tell which N "
        "is best; writes RUN/averaging.json (default 1,2,3,5,10,20 as far as there are so many)",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where to write the average (default RUN/average)"
    )
    args = parser.parse_intermixed_args(argv)
    args.settings = [word for word in args.paths if word.startswith("device=")]
    args.paths = [word for word in args.paths if word not in args.settings]
    if not args.paths:
        parser.error("give a run folder, or checkpoint folders")
    return guarded(lambda: work(args), "nmt-average")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number; if it is the run, put it first"
        ) from None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers such as 1,5,20; if it is the run or "
            "a setting, put it first"
        ) from None


def _mistake(args: argparse.Namespace, is_run: bool) -> str | None:
    """What cannot be asked for, or not together."""
    choices = [
        f"--{name}"
        for name in ("last", "best", "every", "ema", "curve")
        if vars(args)[name] is not None
    ]
    if args.settings and args.curve is None:
        return f"{args.settings[0]} goes with --curve; averages are made on the CPU"
    if not is_run:
        return (
            f"{choices[0]} goes with one run folder, not with a list of checkpoints"
            if choices
            else None
            if args.output
            else "give -o DIR for the average of a list of checkpoints"
        )
    if args.best is not None and len(choices) > 1:
        return (
            f"--best and {choices[1 - choices.index('--best')]} choose in two ways; leave one out"
        )
    if args.curve is not None and (args.last is not None or args.output):
        return f"--curve and {'--last' if args.last is not None else '-o'} do not go together; its numbers say how many"
    for name in ("last", "best"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            return f"--{name} {vars(args)[name]}: give a number of at least 1"
    if args.curve and min(args.curve) < 1:
        return f"--curve {','.join(map(str, args.curve))}: give numbers of at least 1"
    if args.every is not None and not 0 < args.every < math.inf:
        return f"--every {args.every:g}: give minutes, more than 0"
    if args.ema is not None and not 0.01 <= args.ema < 1:  # below it the newest is all there is
        return f"--ema {args.ema:g}: give a decay of at least 0.01 and below 1, such as 0.9"
    return None


def work(args: argparse.Namespace) -> int:
    from pathlib import Path

    from nmt.system.runtime import settle

    settle()  # before torch comes in

    from nmt.average.mean import average
    from nmt.average.select import choose
    from nmt.evaluate import results
    from nmt.evaluate.card import write_average_card
    from nmt.system.errors import UserError
    from nmt.system.progress import say

    paths = [Path(path) for path in args.paths]
    run = RunFolder(paths[0])
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; give a run folder or checkpoint folders")
    is_run = len(paths) == 1 and run.checkpoints.is_dir()
    if mistake := _mistake(args, is_run):
        raise UserError(mistake)
    weights, told = None, ""
    if is_run:
        if args.curve is not None:
            return draw(args, run)
        moments, told = choose(run, args.last, args.best, args.every, args.ema)
        paths, weights = (
            [run.checkpoint(moment.step) for moment in moments],
            [moment.weight for moment in moments],
        )
        for moment, path in zip(moments, paths, strict=True):
            say(f"{path.name}: {moment}, weight {moment.weight / sum(weights):.4f}")
    out = Path(args.output) if args.output else run.average
    names, scores = average(paths, out, weights), []
    try:
        scores = results.read(home) if (home := results.run_of(out)) else []
    except UserError as error:
        say(f"warning: {error}; the card is written without scores")
    write_average_card(out, scores)
    say(f"{out}: the mean of {len(names)} checkpoints ({', '.join(names)}){told and '; '}{told}")
    return 0


def draw(args: argparse.Namespace, run: RunFolder) -> int:
    """The curve."""
    from nmt.average import curve
    from nmt.average.select import last, spaced
    from nmt.config import parse_device

    moments = spaced(run, args.every)
    sizes = sorted(set(args.curve)) or [n for n in curve.SIZES if n <= len(moments)] or [1]
    last(moments, max(sizes), run, args.every)
    choice = "the last N" + ("" if args.every is None else f", {args.every:g} minutes apart")
    points = curve.curve(run, moments, sizes, args.ema, choice, parse_device(args.settings))
    decay = "" if args.ema is None else f", decay {args.ema:g}"
    print(f"{run.path}: dev BLEU of the mean of {choice}{decay}\n{curve.table(points)}")
    print(f"best: N = {curve.best(points).n}; {run.path / 'averaging.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
