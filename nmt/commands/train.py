"""nmt-train: prepare what is missing, then train or continue a run."""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import add_config_arguments, add_offline, go_offline, guarded, make_parser

EXAMPLES = """\
  nmt-train --config demo.yaml                          the embedded corpus, minutes on two cores
  nmt-train --config base.yaml                          the paper's base model on WMT14 English-German
  nmt-train --config base.yaml training.steps=1000 out=runs/short
  nmt-train --config base.yaml --print-config           every setting, then leave
  torchrun --nproc-per-node 8 -m nmt.commands.train --config base.yaml

The same command again continues the run where it stood. Results go to the run folder (out=DIR, by default runs/NAME):
config.yaml, vocab.model, metrics.jsonl, report.html and checkpoints/, where `last` and `best` name two of them."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-train", "Train a Transformer as in 'Attention Is All You Need'.", EXAMPLES)
    add_config_arguments(parser)
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and leave")
    add_offline(parser)
    args = parser.parse_intermixed_args(argv)
    return guarded(lambda: work(args), "nmt-train")


def work(args: argparse.Namespace) -> int:
    go_offline(args)

    from nmt.config import dump, load_config
    from nmt.files import make_folder

    config = load_config(args.config, args.overrides)
    if args.print_config:
        print(dump(config), end="")
        return 0
    make_folder(config.folder)  # a folder that cannot be written is said now, not after an hour of preparation

    from nmt.process import settle

    settle()  # before torch comes in

    from nmt.data.prepare import prepare
    from nmt.dist import join

    with join() as world:
        world.on_main(lambda: prepare(config.data, config.vocab, config.seed))
        from nmt.train.trainer import train

        code = train(config, world)
        if world.is_main and config.folder.joinpath("metrics.jsonl").exists():
            from nmt.publish.report import write_report

            write_report(config.folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
