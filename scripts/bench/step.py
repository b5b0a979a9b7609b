"""How fast is one update? The median over a few, through the very code that nmt-train runs.

    python scripts/bench/step.py --config multi30k.yaml data.root=corpora/multi30k
    OMP_WAIT_POLICY=ACTIVE python scripts/bench/step.py --config demo.yaml --updates 30

Two settings are compared by running this in turn, A B A B, in one sitting: machines drift more than
code does.
"""

import argparse
import json
import resource
import statistics
import sys

from machine import measure_products

from nmt.commands.cli import add_config_arguments, run_command

WARM_UP = 7  # updates that still ask the system for memory


def work(args: argparse.Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()

    import torch

    from nmt.config_files import load_config
    from nmt.corpus.prepare import prepare
    from nmt.extras.profile.dry_run import DryRun
    from nmt.system.ranks import join_world
    from nmt.train.resolve import resolve
    from nmt.train.setup import open_setup

    config = load_config(args.config, args.overrides)
    prepare(config.data, config.vocab, config.seed)
    with join_world() as world:
        config = resolve(config, config, world)
        run = DryRun(open_setup(config, world))
        tokens, seconds, products = [], [], []
        with run.updates() as updates:
            run.run(updates, WARM_UP, "warming up")
            for _ in range(args.updates):
                timing = run.run(updates, 1, "timing")
                tokens.append(timing.n_tgt)
                seconds += timing.seconds
                if args.products:
                    products.append(measure_products(torch.get_num_threads(), n_times=2))
        rates = [n / took for n, took in zip(tokens, seconds, strict=True)]
        if args.json:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                json.dumps(
                    {
                        "tgt_tokens": tokens,
                        "seconds": seconds,
                        "products": products,
                        "peak_rss_mb": round(peak, 1),
                        "precision": config.training.precision,
                        "versions": {"torch": torch.__version__},
                    }
                )
            )
            return 0
        print(
            f"{statistics.median(rates):,.0f} target tokens/s, median of {len(rates)} updates ({min(rates):,.0f} - "
            f"{max(rates):,.0f}); {config.training.precision}, {torch.get_num_threads()} threads"
        )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_config_arguments(parser)
    parser.add_argument("--updates", type=int, default=20, metavar="N", help="updates to time (20)")
    parser.add_argument(
        "--json", action="store_true", help="each update's tokens and seconds, as JSON"
    )
    parser.add_argument(
        "--products", action="store_true", help="time a plain product after each update (in JSON)"
    )
    arguments = parser.parse_intermixed_args()
    sys.exit(run_command(lambda: work(arguments), "bench_step"))
