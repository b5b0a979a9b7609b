"""nmt-train: prepare what is missing, then train or continue a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nmt.commands.cli import add_config_arguments, add_offline, go_offline, make_parser, run_command

EXAMPLES = """\
  nmt-train --config demo.yaml                          the embedded corpus, minutes on two cores
  nmt-train --config base.yaml                          the paper's base model on WMT14 English-German
  nmt-train --config base.yaml training.steps=1000 out=runs/short
  nmt-train --config base.yaml --print-config           every setting, then exit
  nmt-train --config base.yaml --explain                each setting and rule beside the paper's, with deviations counted
  nmt-train --config base.yaml --profile                where the time of an update goes, after half a minute
  nmt-train --config base.yaml --plan --price 3.50      memory, hours and cost of the recipe, before it starts
  torchrun --nproc-per-node 8 -m nmt.commands.train --config base.yaml

The same command again continues the run where it stopped. Results go to the run folder (out=DIR, by default runs/NAME):
config.yaml, vocab.model, metrics.jsonl, status.json, report.html and checkpoints/, with links `last` and `best`.
Ctrl-C, SIGTERM and SIGUSR1 stop it after the current update, with a checkpoint (exit codes 130, 75, 75); a second
signal stops it at once."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "nmt-train", "Train a Transformer as in 'Attention Is All You Need'.", EXAMPLES
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config as YAML and exit"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print each setting and rule beside the paper's and its released code's, and exit",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="time updates for 30 s, print speed, memory and the share of each part, and exit",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="with --profile: also write a trace for chrome://tracing"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="run the worst and some typical updates, print what the whole recipe will take, and exit",
    )
    parser.add_argument(
        "--price", type=float, metavar="X", help="with --plan: the price of an hour of the machine"
    )
    add_offline(parser)
    args = parser.parse_intermixed_args(argv)
    if args.profile and args.plan:
        parser.error("--profile and --plan: one at a time")
    if (args.trace and not args.profile) or (args.price is not None and not args.plan):
        parser.error("--trace goes with --profile, --price with --plan")
    if args.price is not None and not 0 <= args.price < 1e9:
        parser.error(f"--price {args.price}: give a price of at least 0")
    return run_command(lambda: work(args), "nmt-train")


def work(args: argparse.Namespace) -> int:
    go_offline(args)

    from nmt.config import format_config, load_config
    from nmt.paper import explain
    from nmt.system.files import make_folder

    config = load_config(args.config, args.overrides)
    if args.print_config or args.explain:
        print(format_config(config) if args.print_config else explain(config), end="")
        return 0
    is_dry_run = args.profile or args.plan  # it leaves nothing behind
    if not is_dry_run:
        # A folder that cannot be written is reported now, not after an hour of preparation.
        make_folder(config.folder)

    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.corpus.prepare import prepare
    from nmt.system.ranks import join_world

    with join_world(config.device) as world:
        world.on_main(lambda: prepare(config.data, config.vocab, config.seed))
        if is_dry_run:
            from nmt.profile.estimate import estimate_run
            from nmt.profile.profile import profile_training

            if args.profile:
                profile_training(config, world, trace=args.trace and Path(args.trace))
            else:
                estimate_run(config, world, price=args.price)
            return 0
        from nmt.train.trainer import train

        code = train(config, world)
        # All ranks wait: torchrun ends the others as soon as one has left with an exit code.
        world.on_main(lambda: write_page(config.folder))
        return code


def write_page(folder: Path) -> None:
    """Write the page of the run, also of one that was stopped; training is not lost where that fails."""
    from nmt.report.page import write_report
    from nmt.system.errors import UserError
    from nmt.system.progress import say

    try:
        write_report(folder)
    except (OSError, UserError) as error:
        say(f"warning: no report: {error}")


if __name__ == "__main__":
    sys.exit(main())
