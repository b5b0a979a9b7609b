"""nmt-score: how probable a model finds given translations, as one number for each pair.

The command parses, opens the model and the files, and at the end reports the figures of the whole
corpus. Mistakes in the options are reported before torch is imported.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nmt.commands.cli import (
    add_checkpoints,
    add_workers,
    check_options,
    do_chunks,
    make_parser,
    open_lines_output,
    parse_checkpoints,
    start_command,
)
from nmt.system.errors import UserError

if TYPE_CHECKING:
    from nmt.corpus.reader import Block
    from nmt.system.progress import Progress
    from nmt.translate.pair_scores import PairScorer

EXAMPLES = """\
  nmt-score runs/demo/average --src text.en --tgt text.de > scores       log p(target | source), a line for each pair
  nmt-score runs/demo/average --src text.en.gz --tgt text.de.gz --score mean -o scores --resume
  nmt-score runs/a/average runs/b/average --src text.en --tgt text.de    an ensemble: the mean of their probabilities
  nmt-score runs/demo/average --src text.en --tgt text.de --workers 64 --plan    first estimate hours and bytes
  nmt-score runs/demo/average --src text.en --tgt text.de --json         pieces and their log-probabilities
  nmt-score runs/b/average --n-best list.json --score search             the output of nmt-translate --n-best K --json
  nmt-score runs/b/average --n-best list --src text.en                   the same without --json
  nmt-score runs/de-en/average --n-best dev.json --tune dev.de           weights for reranking with a reverse model
  nmt-score runs/de-en/average --n-best test.json --rerank 0.5,0.05      the best candidate of each source
  nmt-score runs/en-de/average --dual runs/de-en/average --src text.en --tgt text.de -o scores    to filter a corpus

Each pair gives one line, in order. A pair that the model could not have produced gets -inf: a line that is too
long, or an empty source with a target. The last line on standard error has tokens, NLL per token and perplexity.
Exit codes: 0 done, 1 a failure, 2 a mistake in the input, 130 Ctrl-C. See docs/scoring.md."""

CONFLICTS = {
    "--n-best": "--tgt --dual --resume --plan",
    "--tune": "--json --score --rerank --workers --on",
    "--plan": "--resume",
    "--rerank": "--json --score --workers --on",
    "--dual": "--json --score",
}
NEEDS = {"--reverse": "--n-best", "--rerank": "--n-best", "--tune": "--n-best", "--resume": "-o"}


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser("nmt-score", "Score given translations with a model.", EXAMPLES)
    add_checkpoints(parser, "score")
    parser.add_argument(
        "--src", metavar="FILE", help="the sources, one per line; may be compressed"
    )
    parser.add_argument("--tgt", metavar="FILE", help="their translations, line by line")
    parser.add_argument(
        "--n-best",
        metavar="FILE",
        help="instead of --tgt: the output of nmt-translate --n-best; with --json it includes the sources, "
        "so --src is not needed",
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="with --n-best: score the source given each candidate, with a model that translates in the "
        "other direction",
    )
    parser.add_argument(
        "--score",
        choices=("sum", "mean", "search"),
        help="sum: the log-probability (default); mean: per piece, including the end mark; search: "
        "divided by the length penalty of decoding, as in nmt-translate's scores",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write an object for each pair: line (from 1), score, pieces, log_probs",
    )
    parser.add_argument(
        "--rerank",
        type=parse_weights,
        nargs="?",
        const=(DEFAULT_REVERSE_WEIGHT, 0.0),
        metavar="REVERSE,LENGTH",
        help="with --n-best and a model of the other direction: write the best candidate of each source by "
        "score + REVERSE * log p(source | candidate) / penalty + LENGTH * pieces "
        f"(default {DEFAULT_REVERSE_WEIGHT},0)",
    )
    parser.add_argument(
        "--tune",
        metavar="REFERENCES",
        help="with --n-best of a dev set: print the BLEU of many weights for --rerank, and the best weights",
    )
    parser.add_argument(
        "--dual",
        metavar="REVERSE",
        help="write the dual conditional cross-entropy with this model of the other direction, 0 to 1, "
        "by which nmt-prepare filters a corpus",
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


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    args = parse_checkpoints(parser, argv)
    if not args.n_best and not (args.src and args.tgt):
        parser.error("give --src FILE and --tgt FILE, or --n-best FILE")
    check_options(parser, args, CONFLICTS, NEEDS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-score", parse_arguments, score_files, argv)


DEFAULT_REVERSE_WEIGHT = 0.5


def parse_weights(text: str) -> tuple[float, float]:
    """Parse the value of --rerank."""
    try:
        reverse, length = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not REVERSE,LENGTH, such as 0.5,0.05; if it is a checkpoint, put it before --rerank"
        ) from None
    if not (0 <= reverse <= 1000 and abs(length) <= 1000):
        raise argparse.ArgumentTypeError(
            f"{text!r}: REVERSE must be between 0 and 1000, LENGTH between -1000 and 1000"
        )
    return reverse, length


def score_files(args: argparse.Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.agreement import check_agreement, check_sides, turn_round
    from nmt.api import convert_published
    from nmt.system.progress import say
    from nmt.translate.lines import open_input
    from nmt.translate.score_stream import PAIRS_AT_ONCE, ScoreTotals, start_scoring

    if args.output is None and sys.stdout is None:
        raise UserError("standard output is closed; give -o FILE")
    # open the models, and check that the files are in their languages
    start = partial(
        start_scoring,
        [str(convert_published(name)) for name in args.checkpoints],
        args.dual and str(convert_published(args.dual)),
        args.overrides,
        args.score or "sum",
        args.json,
        1 if args.on else args.workers,
    )
    here = start()
    scorer, reverse = here.scorer, here.reverse
    if reverse is not None:
        back = f"the reverse of {args.checkpoints[0]}", turn_round(scorer.translator.direction)
        remedy = "give a model of the other direction after --dual"
        check_agreement("direction", args.dual, reverse.translator.direction, *back, remedy)
    check_sides(args.src, args.tgt, *name_needed(args, scorer))

    totals = ScoreTotals()
    with ExitStack() as stack:
        paths = filter(None, (args.src, args.tgt, args.n_best, args.tune))
        inputs = [stack.enter_context(open_input(path)) for path in paths]
        handles = [reader.handle for reader in inputs]
        out, n_done, progress = open_lines_output(
            args, handles, stack, "scoring", "pairs", PAIRS_AT_ONCE
        )
        if args.tune or args.rerank is not None:
            rerank_candidates(args, scorer, out, progress)
            return 0
        chunks = read_chunks(args, scorer, n_done)
        size = sum(reader.size for reader in inputs)
        done = do_chunks(args, start, here, chunks, size, out, progress)
        for chunk in stack.enter_context(closing(done)):
            totals.extend(chunk.totals)
    if not args.plan:
        say(totals.describe())
    return 0


def rerank_candidates(
    args: argparse.Namespace, scorer: "PairScorer", out: IO[bytes], progress: "Progress"
) -> None:
    """Write the best candidates, or the BLEU that many weights give."""
    from nmt.corpus.text_files import TextFile, read_lines
    from nmt.translate.n_best import read_n_best
    from nmt.translate.rerank import (
        RerankWeights,
        format_weights,
        measure_weights,
        rate_candidates,
    )
    from nmt.translate.stream import write_uninterrupted

    lists = read_n_best(args.n_best, args.src, name_needed(args, scorer))
    if args.tune:
        references = list(read_lines(TextFile(Path(args.tune))))
        rated = []
        for one in rate_candidates(scorer, lists):
            rated.append(one)
            progress.advance(len(one.texts))
        if len(rated) != len(references):
            raise UserError(
                f"{args.tune}: has {len(references):,} lines for {len(rated):,} sources; give one "
                "reference for each"
            )
        table = format_weights(measure_weights(rated, references))
        write_uninterrupted(out, table.encode())
        return
    weights = RerankWeights(*args.rerank)
    for one in rate_candidates(scorer, lists):
        write_uninterrupted(out, f"{one.choose_best(weights)}\n".encode(errors="replace"))
        progress.advance(len(one.texts))


def name_needed(args: argparse.Namespace, scorer: "PairScorer") -> tuple[str, str | None]:
    """Return the direction that the texts must have, after a name for it: the model's, or the reverse if
    it scores sources given their translations.
    """
    from nmt.agreement import turn_round

    name, direction = args.checkpoints[0], scorer.translator.direction
    if args.reverse or args.tune or args.rerank is not None:
        return f"the reverse of {name}", turn_round(direction)
    return name, direction


def read_chunks(args: argparse.Namespace, scorer: "PairScorer", n_done: int) -> "Iterator[Block]":
    from nmt.translate.n_best import read_n_best
    from nmt.translate.score_stream import pair_candidates, read_pair_chunks

    if args.n_best:
        lists = read_n_best(args.n_best, args.src, name_needed(args, scorer))
        return pair_candidates(lists, args.reverse)
    return read_pair_chunks(args.src, args.tgt, n_done)


if __name__ == "__main__":
    sys.exit(main())
