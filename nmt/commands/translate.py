"""nmt-translate: one line in, one line out, from a stream of any length or from a person at a terminal."""

import argparse
import re
import sys
from collections.abc import Sequence

from nmt.commands.cli import guarded, make_parser

EXAMPLES = """\
  nmt-translate runs/demo/average < text.en > text.de
  nmt-translate runs/demo/average -i text.en -o text.de --resume     goes on where it was stopped
  nmt-translate runs/a/average runs/b/average < text.en              an ensemble: the mean of their probabilities
  nmt-translate runs/demo/average --n-best 4 --json < text.en        the best four of each line, with scores
  nmt-translate runs/demo/average --preset marian decoding.max_source=200 decoding.long_lines=split < text.en
  nmt-translate runs/demo/average                                    at a terminal it asks for lines

presets; |Y| is the length of an output, its end mark included:
  vaswani2017   beam 4, log p / ((5+|Y|)/6)^0.6, at most source + 50 pieces (the paper, section 6.1)
  fairseq       beam 5, log p / |Y|, at most 200 pieces
  marian        beam 6, log p / |Y|^0.6, at most 3 * source pieces
  hf            beam 4, log p / |Y|, at most 512 pieces

Each line gives one line, in order; an empty one stays empty; what is not UTF-8 is named and read as U+FFFD.
Exit codes: 0 done, 1 a failure, 2 a mistake in the input, 130 Ctrl-C. All of it: docs/decoding.md"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "nmt-translate", "Translate standard input, line by line, to standard output.", EXAMPLES
    )
    parser.add_argument(
        "places",
        nargs="+",
        metavar="CHECKPOINT",
        help="a checkpoint folder, an average, or a run folder; several with one vocabulary translate "
        "together. Settings may follow: decoding.key=value, device=cpu",
    )
    parser.add_argument("-i", "--input", metavar="FILE", help="read FILE, not standard input")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to FILE as translations come, not to standard output",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on after the last whole line of the output file, if there is one",
    )
    search = parser.add_argument_group("search")
    search.add_argument(
        "--preset",
        choices=("vaswani2017", "fairseq", "marian", "hf"),
        help="search as that toolkit does; see below",
    )
    search.add_argument(
        "--beam", type=int, metavar="N", help="hypotheses per sentence; 1 is greedy"
    )
    search.add_argument(
        "--sample",
        action="store_true",
        help="draw at random instead of searching; see decoding.temperature, top_k, top_p",
    )
    search.add_argument(
        "--seed", type=int, metavar="N", help="of what is drawn; the same seed, the same lines"
    )
    search.add_argument(
        "--prefix",
        metavar="FILE",
        help="how translations must begin: a line for each line of input",
    )
    search.add_argument(
        "--long-lines",
        choices=("cut", "split", "refuse"),
        help="what becomes of lines of more than decoding.max_source pieces; all say so",
    )
    shown = parser.add_argument_group("what is written")
    shown.add_argument(
        "--n-best",
        type=int,
        metavar="K",
        help="K lines for each: number of the line, counted from 0 "
        "as in Marian and fairseq, TAB score TAB text",
    )
    shown.add_argument("--scores", action="store_true", help="the score before the text, and a tab")
    shown.add_argument(
        "--alignments",
        action="store_true",
        help="after a tab, pairs source-target of pieces, counted from 0: 0-0 1-2 ...",
    )
    shown.add_argument(
        "--json",
        action="store_true",
        help="an object for each line: line (from 1), source, candidates",
    )
    parser.add_argument(
        "--engine",
        choices=("nmt", "ctranslate2"),
        default="nmt",
        help="ctranslate2: CHECKPOINT is what nmt-export --to ctranslate2 wrote",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes, each with a copy of the model and its share of the cores",
    )
    parser.add_argument(
        "--interactive", action="store_true", help="ask for lines, even where no terminal is seen"
    )
    args = parser.parse_intermixed_args(argv)
    complaint = mismatch(args)
    if complaint is not None:
        parser.error(complaint)
    return guarded(lambda: work(args), "nmt-translate")


def mismatch(args: argparse.Namespace) -> str | None:
    """What of the options does not go together."""
    engine_lacks = {
        "--n-best": args.n_best,
        "--alignments": args.alignments,
        "--sample": args.sample,
        "--prefix": args.prefix,
        "several checkpoints": len(places(args)) > 1,
    }
    prompt_lacks = {
        "-i": args.input,
        "-o": args.output,
        "--prefix": args.prefix,
        "--workers": args.workers > 1,
    }
    for name, value in (
        ("--n-best", args.n_best),
        ("--workers", args.workers),
        ("--beam", args.beam),
    ):
        if value is not None and value < 1:
            return f"{name} {value}: must be at least 1"
    if not places(args):
        return "a checkpoint is missing; it comes before settings"
    if args.resume and not args.output:
        return "--resume needs -o FILE, the output to go on with"
    if args.resume and args.n_best and not args.json:
        return "--resume cannot count --n-best lines; give --json too, one line for each"
    if args.seed is not None and not args.sample:
        return "--seed is of --sample"
    if args.engine == "ctranslate2" and (
        lacking := [name for name, value in engine_lacks.items() if value]
    ):
        return f"--engine ctranslate2 has no {' and no '.join(lacking)}; leave one of them out"
    if args.interactive and (lacking := [name for name, value in prompt_lacks.items() if value]):
        return f"--interactive does not go with {' and '.join(lacking)}"
    return None


def places(args: argparse.Namespace) -> list[str]:
    return [text for text in args.places if not is_setting(text)]


def is_setting(text: str) -> bool:
    return re.match(r"([a-z_0-9]+(\.[a-z_0-9]+)+|device)=", text) is not None


def settings(args: argparse.Namespace) -> list[str]:
    """The options as overrides; those written out come last and win."""
    named = {
        "preset": args.preset,
        "beam": args.beam,
        "sample": "true" if args.sample else None,
        "seed": args.seed,
        "long_lines": args.long_lines,
    }
    return [
        *(f"decoding.{key}={value}" for key, value in named.items() if value is not None),
        *filter(is_setting, args.places),
    ]


def work(args: argparse.Namespace) -> int:
    from contextlib import ExitStack, closing
    from functools import partial

    from nmt.system.runtime import tune_process

    tune_process()  # before torch comes in

    from nmt.export.ctranslate2 import open_ctranslate2
    from nmt.system.errors import UserError
    from nmt.system.progress import Progress, say
    from nmt.translate.formats import Layout
    from nmt.translate.lines import LARGEST_CHUNK, add_prefixes, find_size, open_input
    from nmt.translate.stream import open_output, share_cores, translate_stream
    from nmt.translate.translator import open_translator

    if (args.input is None and sys.stdin is None) or (args.output is None and sys.stdout is None):
        raise UserError("standard input or output is closed; give -i FILE and -o FILE")
    layout = Layout(args.n_best, args.scores, args.alignments, args.json)
    opener = open_ctranslate2 if args.engine == "ctranslate2" else open_translator
    load_model = partial(opener, places(args), settings(args))
    share_cores(args.workers)
    model = load_model()
    translator, config = model.translator, model.config
    if args.engine == "ctranslate2":
        say(f"{translator.engine}: with its own search, see docs/decoding.md")
    if layout.request.n_best > config.decoding.beam and not config.decoding.sample:
        raise UserError(
            f"--n-best {args.n_best}: decoding.beam is {config.decoding.beam}; give --beam {args.n_best} "
            "or more, or --sample"
        )
    is_plain = not (args.input or args.output or args.prefix) and args.workers == 1
    if args.interactive or (is_plain and sys.stdin.isatty()):
        from nmt.commands.prompt import converse

        say(
            f"{config.data.src} -> {config.data.tgt}; one sentence per line, Ctrl-C drops it, Ctrl-D ends"
        )
        converse(
            lambda line: layout.lines(
                1, line, translator.find_candidates([line], layout.request)[0], translator
            )
        )
        return 0
    with ExitStack() as stack:
        source = stack.enter_context(open_input(args.input))
        begins = stack.enter_context(open_input(args.prefix)) if args.prefix else None
        inputs = [lines.handle for lines in (source, begins) if lines is not None]
        out, done = (
            stack.enter_context(open_output(args.output, args.resume, inputs))
            if args.output
            else (sys.stdout.buffer, 0)
        )
        if done:
            say(f"{args.output} has {done:,} lines; going on with line {done + 1:,}")
        chunks = source.read_chunks(
            done, max(LARGEST_CHUNK, translator.chunk_lines)
        )  # of many batches
        if begins is not None:
            chunks = add_prefixes(chunks, begins, done)
        is_shown = sys.stderr.isatty() and (args.output is not None or not sys.stdout.isatty())
        progress = stack.enter_context(
            closing(Progress("translating", None, "lines", done, is_shown))
        )
        size = find_size(source)
        for result in translate_stream(translator, layout, chunks, out, args.workers, load_model):
            progress.advance(result.n_lines)
            if size and result.n_source_bytes:
                progress.expect(round(progress.done * size / result.n_source_bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
