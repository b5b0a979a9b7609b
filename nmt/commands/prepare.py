"""nmt-prepare: make the token store that training reads from the corpora that a config names, or show
what a store holds.

This module only handles the command line; `nmt.corpus.prepare` and `nmt.extras.inspection` do the
work. nmt-train prepares what is missing by itself, so this command is for preparing in advance or on
another machine, and for inspecting.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace
from functools import partial

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_config_arguments,
    add_offline,
    add_on,
    check_options,
    go_offline,
    open_executor,
    start_command,
)
from nmt.system.errors import UserError
from nmt.system.extras import check_extra

DESCRIPTION = """\
Read the corpora of a config, clean them, learn the joint BPE and write the token store.
It can be restarted: finished stages are kept, and a complete store is used as it is.
With --inspect, show what a store holds instead."""

EXAMPLES = """\
  nmt-prepare --config demo.yaml
  nmt-prepare --config multi30k.yaml data.root=corpora/multi30k data.store=stores/multi30k
  nmt-prepare --config base.yaml 'data.train=[{src: europarl.en.gz, tgt: europarl.de.gz}]' data.workers=16
  nmt-prepare --config base.yaml data.workers=64 --on ray
  nmt-prepare --config base.yaml --offline
  nmt-prepare --inspect data/wmt14-ende"""

CONFLICTS = {"--inspect": "--config --on"}


def build_parser() -> ArgumentParser:
    parser = CommandParser("nmt-prepare", DESCRIPTION, EXAMPLES)
    add_config_arguments(parser)
    parser.add_argument(
        "--inspect",
        metavar="STORE",
        help="instead of --config: show what this prepared store holds",
    )
    add_on(parser)
    add_offline(parser)
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    check_options(parser, args, CONFLICTS, {})
    if not args.config and not args.inspect:
        parser.error("give --config FILE, to prepare a store, or --inspect STORE, to look at one")
    return args


def prepare_corpus(args: Namespace) -> int:
    go_offline(args)
    if args.inspect is not None:
        return print_store(args)

    from nmt import api
    from nmt.system.progress import say

    config = api.load_config(args.config, args.overrides)
    # A batch system sends SIGTERM, which ends the work as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        with open_executor(args.on, config.data.workers, uses_gpu=False) as executor:
            is_new = api.prepare(config, executor)
    except KeyboardInterrupt:
        say("stopped; finished work is kept, and the same command continues from there")
        raise
    say(f"prepared: {config.data.store}" if is_new else f"already prepared: {config.data.store}")
    return 0


def print_store(args: Namespace) -> int:
    from pathlib import Path

    check_extra("inspection", "--inspect")
    from nmt.extras.inspection import describe_store

    if args.overrides:
        raise UserError(
            f"{args.overrides[0]}: --inspect shows the store as it was made and accepts no settings; leave it out"
        )
    print(describe_store(Path(args.inspect)))
    return 0


main = partial(start_command, "nmt-prepare", parse_arguments, prepare_corpus)

if __name__ == "__main__":
    sys.exit(main())
