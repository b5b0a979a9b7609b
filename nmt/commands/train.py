"""nmt-train: prepare what is missing, then train or continue a run."""

import json
import os
import shutil
import sys
import warnings
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_config_arguments,
    add_offline,
    check_options,
    go_offline,
    parse_positive,
    start_command,
)
from nmt.commands.init import parse_arguments as parse_init
from nmt.system.errors import UserError
from nmt.system.extras import check_extra

if TYPE_CHECKING:
    from nmt.config import DataConfig, RunConfig

EXAMPLES = """\
  nmt-train --config demo.yaml                          train on the embedded corpus; takes minutes on two cores
  nmt-train --src my.en --tgt my.de                     on your own text, with the config that nmt-init writes for it
  nmt-train --config base.yaml                          the paper's base model on WMT14 English-German
  nmt-train --config base.yaml training.steps=1000 out=runs/short
  nmt-train --config base.yaml --print-config           print every setting, then exit
  nmt-train --config base.yaml --explain                compare settings and rules with the paper's; count deviations
  nmt-train --config base.yaml --profile                show where the time of an update goes; takes half a minute
  nmt-train --config base.yaml --plan --price 3.50      estimate memory, hours and cost before starting the run
  nmt-train --config base.yaml --gpus 1                 train on one GPU; by default on all, through nmt-launch

Run the same command again to continue where it stopped. Results go to the run folder (out=DIR, by default runs/NAME):
config.yaml, vocab.model, metrics.jsonl, status.json, report.html and checkpoints/, with links `last` and `best`.
Ctrl-C (exit code 130), SIGTERM and SIGUSR1 (exit code 75) stop it after the current update and save a checkpoint; a
second one, at least 5 s later (Ctrl-C: half a second), stops it at once."""

CONFLICTS = {"--profile": "--plan"}
NEEDS = {"--src": "--tgt", "--tgt": "--src", "--price": "--plan"}


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-train", "Train a Transformer as in 'Attention Is All You Need'.", EXAMPLES
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--src",
        metavar="FILE",
        help="text to train on, with --tgt: short for data.train; without --config, nmt-init writes a config",
    )
    parser.add_argument("--tgt", metavar="FILE", help="its translation, line by line")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config as YAML and exit"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="compare each setting and rule with the paper and its authors' code, and exit",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="time updates for 30 s, print speed, memory and the operations that take longest, and exit",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="time the largest and some typical updates, estimate memory, time and cost of the whole run, and exit",
    )
    parser.add_argument(
        "--price", type=float, metavar="X", help="with --plan: the machine's price per hour"
    )
    parser.add_argument(
        "--gpus",
        type=parse_positive,
        metavar="N",
        help="how many GPUs of this machine to train on (default: all); nmt-launch starts more than one",
    )
    add_offline(parser)
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    check_options(parser, args, CONFLICTS, NEEDS)
    args.words = sys.argv[1:] if argv is None else None
    if args.src is not None:
        if any(override.startswith("data.train=") for override in args.overrides):
            parser.error("--src and --tgt are short for data.train; give only one of the two")
    elif args.config is None:
        parser.error("give --config, or --src and --tgt")
    if args.price is not None and not 0 <= args.price < 1e9:
        parser.error(f"--price {args.price}: must be at least 0 and below 1e9")
    return args


def train_model(args: Namespace) -> int:
    go_offline(args)

    from nmt import api
    from nmt.config_files import format_config
    from nmt.paper import explain

    if args.config is None:
        check_extra("init", "--src and --tgt without --config")
        from nmt.extras.init.first_config import find_config_for

        args.config = find_config_for(parse_init([f"--src={args.src}", f"--tgt={args.tgt}"]))
    elif args.src is not None:
        src, tgt = json.dumps(args.src), json.dumps(args.tgt)  # YAML reads JSON's strings
        args.overrides.append(f"data.train=[{{src: {src}, tgt: {tgt}}}]")
    config = api.load_config(args.config, args.overrides)
    if args.print_config:
        print(format_config(config), end="")
        return 0
    if args.explain:
        print(explain(config), end="")
        note_missing_corpus(config.data)
        return 0
    refuse_moved_run(args, config)
    use_gpus(args, config.device)
    if args.profile or args.plan:
        profile_or_plan(config, args)
        return 0
    mirror = config.training.mirror
    if args.offline and mirror is not None and not mirror.startswith("file://"):
        raise UserError(
            f"--offline, but training.mirror={mirror} needs the network; leave one of them out"
        )
    return api.train(config)


def refuse_moved_run(args: Namespace, config: "RunConfig") -> None:
    """Refuse the config that nmt wrote into a run which was moved or copied since: it names the old place."""
    from nmt.system.run_folder import CONFIG_FILE

    folder, file = os.path.split(os.path.realpath(args.config))
    is_of_run = file == CONFIG_FILE and os.path.isdir(os.path.join(folder, "checkpoints"))
    is_chosen = any(word.startswith(("out=", "name=")) for word in args.overrides)
    if is_of_run and not is_chosen and folder != os.path.realpath(config.folder):
        raise UserError(
            f"{args.config}: belongs to a run that was moved or copied, and would train in {config.folder}; "
            f"give out={os.path.dirname(args.config) or '.'} to continue this run, or another out=DIR"
        )


def use_gpus(args: Namespace, device: str) -> None:
    """If this machine has several GPUs, become nmt-launch, which starts a process for each."""
    n_started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
    if None not in (n_started, args.gpus) and n_started != str(args.gpus):
        raise UserError(f"--gpus {args.gpus}, but torchrun started {n_started}; leave out --gpus")
    if n_started is not None or os.environ.get("WORLD_SIZE", "1") != "1":
        return
    from nmt.system.progress import say
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported
    import torch

    with warnings.catch_warnings(action="ignore"):  # choose_device reports an old driver
        n_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if (args.gpus or 1) > max(n_gpus, 1):
        remedy = "use nmt-launch for ranks on a CPU" if device == "cpu" else "lower it"
        raise UserError(
            f"--gpus {args.gpus}, but only {n_gpus} can be used here; {remedy} or leave it out"
        )
    if n_gpus < 2 or args.gpus == 1:
        return
    # beside this command, which may be a link, or else beside Python
    folders = os.path.dirname(os.path.realpath(sys.argv[0])), os.path.dirname(sys.executable)
    launch = shutil.which("nmt-launch", path=os.pathsep.join((*folders, *os.get_exec_path())))
    # a call from Python must return there
    if args.words is None or args.plan or args.profile or not launch or not shutil.which("bash"):
        say(f"using 1 of the {n_gpus} GPUs here; nmt-launch uses all")
        return
    say(f"using {args.gpus or n_gpus} GPUs through nmt-launch; --gpus 1 uses one")
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(launch), *os.get_exec_path()))
    os.execv(launch, ["nmt-launch", "--", *args.words])


def note_missing_corpus(data: "DataConfig") -> None:
    """Mention a corpus file that is missing, for example because a language is misspelt: --explain
    itself works without data.
    """
    from nmt.corpus.reader import find_local_files
    from nmt.system.progress import say

    if os.path.isdir(data.store):  # prepared: no other file is needed
        return
    for corpus in data.corpora:
        if corpus.dataset is not None:
            continue
        try:
            find_local_files(corpus, data)
        except UserError as error:
            say(f"note: training could not start here: {error}")
            return


def profile_or_plan(config: "RunConfig", args: Namespace) -> None:
    """Time some updates for --profile or --plan. Nothing is kept except the prepared store."""
    from nmt.model.size import check_weights_fit
    from nmt.system.runtime import tune_process

    check_weights_fit(config.model, config.vocab)
    tune_process()  # before torch is imported

    from nmt import api

    check_extra("profile", "--profile" if args.profile else "--plan")
    from nmt.extras.profile.dry_run import open_dry_run
    from nmt.extras.profile.estimate import estimate_run
    from nmt.extras.profile.profile import profile_training
    from nmt.system.ranks import join_world
    from nmt.train.resolve import check_training_fits

    with join_world(config.device) as world:
        world.on_main(
            lambda: check_training_fits(config.model, config.vocab, config.training, world)
        )
        world.on_main(lambda: api.prepare(config))
        if args.profile:
            profile_training(open_dry_run(config, world))
        else:
            estimate_run(open_dry_run(config, world), price=args.price)


main = partial(start_command, "nmt-train", parse_arguments, train_model)

if __name__ == "__main__":
    sys.exit(main())
