"""nmt-score: how probable a model finds given translations, as one number for each pair.

The command parses, opens the model and the files, and at the end reports the figures of the whole
corpus. Mistakes in the options are reported before torch is imported.
"""

import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack, closing
from functools import partial

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_checkpoints,
    add_workers,
    check_options,
    do_chunks,
    open_lines_output,
    parse_checkpoints,
    start_command,
)
from nmt.system.errors import UserError

EXAMPLES = """\
  nmt-score runs/demo/average --src text.en --tgt text.de > scores       log p(target | source), a line for each pair
  nmt-score runs/demo/average --src text.en.gz --tgt text.de.gz --score mean -o scores --resume
  nmt-score runs/a/average runs/b/average --src text.en --tgt text.de    an ensemble: the mean of their probabilities
  nmt-score runs/demo/average --src text.en --tgt text.de --json         pieces and their log-probabilities

Each pair gives one line, in order. A pair that the model could not have produced gets -inf: a line that is too
long, or an empty source with a target. The last line on standard error has tokens, NLL per token and perplexity.
Exit codes: 0 done, 1 a failure, 2 a mistake in the input, 130 Ctrl-C. See docs/evaluation.md."""

NEEDS = {"--resume": "-o"}


def build_parser() -> ArgumentParser:
    parser = CommandParser("nmt-score", "Score given translations with a model.", EXAMPLES)
    add_checkpoints(parser, "score")
    parser.add_argument(
        "--src", required=True, metavar="FILE", help="the sources, one per line; may be compressed"
    )
    parser.add_argument(
        "--tgt", required=True, metavar="FILE", help="their translations, line by line"
    )
    parser.add_argument(
        "--score",
        choices=("sum", "mean", "search"),
        default="sum",
        help="sum: the log-probability (default); mean: per piece, including the end mark; search: "
        "divided by the length penalty of decoding, as in nmt-translate's scores",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write an object for each pair: line (from 1), score, pieces, log_probs",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to FILE, not to standard output"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue after the last whole chunk of 4,096 pairs in the output file",
    )
    add_workers(parser)
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parse_checkpoints(parser, argv)
    check_options(parser, args, {}, NEEDS)
    return args


def score_files(args: Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.agreement import check_sides
    from nmt.api import find_checkpoints
    from nmt.extras.pair_scores.score_stream import (
        PAIRS_AT_ONCE,
        ScoreTotals,
        read_pair_chunks,
        start_scoring,
    )
    from nmt.system.progress import say
    from nmt.translate.lines import open_input

    if args.output is None and sys.stdout is None:
        raise UserError("standard output is closed; give -o FILE")
    # open the models, and check that the files are in their languages
    start = partial(
        start_scoring,
        find_checkpoints(args.checkpoints),
        args.overrides,
        args.score,
        args.json,
        1 if args.on else args.workers,
    )
    here = start()
    what = f"{args.checkpoints[0]} translates"
    check_sides([args.src], [args.tgt], [], what, here.scorer.translator.direction)

    totals = ScoreTotals()
    with ExitStack() as stack:
        inputs = [stack.enter_context(open_input(path)) for path in (args.src, args.tgt)]
        handles = [reader.handle for reader in inputs]
        out, n_done, progress = open_lines_output(
            args, handles, stack, "scoring", "pairs", PAIRS_AT_ONCE
        )
        chunks = read_pair_chunks(args.src, args.tgt, n_done)
        done = do_chunks(args, start, here, chunks, out, progress)
        for chunk in stack.enter_context(closing(done)):
            totals.add(chunk)
    say(totals.describe())
    return 0


main = partial(start_command, "nmt-score", parse_arguments, score_files, extra="pair_scores")

if __name__ == "__main__":
    sys.exit(main())
