"""nmt-prepare: from the corpora that a config names to the token store that training reads.

Only the command line is known here; the work is `nmt.data.prepare`'s. nmt-train prepares what is missing by itself,
so this command is for doing it beforehand, on another machine, or for looking at the ledger.
"""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import add_config_arguments, guarded, make_parser

DESCRIPTION = """\
Read the corpora of a config, clean them, learn the joint BPE and write the token store.
Restartable: finished stages are kept, a complete store is recognised."""

EXAMPLES = """\
  nmt-prepare --config demo.yaml
  nmt-prepare --config multi30k.yaml data.root=corpora/multi30k data.store=stores/multi30k
  nmt-prepare --config base.yaml 'data.train=[{src: europarl.en.gz, tgt: europarl.de.gz}]' data.workers=16"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-prepare", DESCRIPTION, EXAMPLES)
    add_config_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    return guarded(lambda: work(args), "nmt-prepare")


def work(args: argparse.Namespace) -> int:
    from nmt.config import load_config
    from nmt.data.prepare import prepare
    from nmt.progress import say
    config = load_config(args.config, args.overrides)
    is_new = prepare(config.data, config.vocab, config.seed)
    say(f"prepared: {config.data.store}" if is_new else f"already prepared: {config.data.store}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
