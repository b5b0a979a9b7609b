"""nmt-translate: one line in, one line out, from a stream of any length or from a person at a
terminal; a line is a sentence or, with --text, a paragraph.

The command parses, opens the model, and gives it the lines of a file, a pipe or a prompt. Mistakes
in the options are reported before torch is imported.
"""

import json
import os
import sys
import zlib
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_checkpoints,
    add_engine,
    add_workers,
    check_options,
    do_chunks,
    open_lines_output,
    parse_checkpoints,
    parse_positive,
    start_command,
)
from nmt.system.extras import check_extra
from nmt.system.streams import STDOUT

if TYPE_CHECKING:
    from nmt.translate.stream import ChunkTranslator

EXAMPLES = """\
  nmt-translate runs/demo/average < text.en > text.de
  nmt-translate runs/demo/average -i text.en -o text.de --resume     continue where it stopped
  nmt-translate runs/a/average runs/b/average < text.en              an ensemble: the mean of their probabilities
  nmt-translate runs/demo/average --n-best 4 --json < text.en        the best four of each line, with scores
  nmt-translate runs/demo/average --text < letter.en                 split paragraphs into sentences first
  nmt-translate runs/demo/average --preset marian decoding.max_source=200 < text.en
  nmt-translate runs/demo/average                                    prompt for lines at a terminal

presets; |Y| is the length of an output, including its end mark:
  vaswani2017   beam 4, log p / ((5+|Y|)/6)^0.6, at most source + 50 pieces (the paper, section 6.1)
  fairseq       beam 5, log p / |Y|, at most 200 pieces
  marian        beam 6, log p / |Y|^0.6, at most 3 * source pieces
  hf            beam 4, log p / |Y|, at most 512 pieces

Each line gives one line, in order; an empty one stays empty; bytes that are not UTF-8 are reported and read as
U+FFFD. A line is a sentence, or whatever the model was trained on; with --text, it is a paragraph of sentences.
Exit codes: 0 done, 1 a failure, 2 a mistake in the input, 130 Ctrl-C. See docs/decoding.md."""

# The share of a chunk's lines in which the splitter may find one sentence too many. On news, captions and
# everyday sentences it does so in 1 to 4 % of all lines.
MAX_SHORTENED = 0.05
ATTENTION_SUFFIXES = (".html", ".json")
CONFLICTS = {
    "--attention": "--resume --workers --on --interactive",  # the maps of finished lines are not saved
    "--engine": "--attention --n-best --alignments --sample --prefix",
    "--interactive": "-i -o --prefix --workers --on",
    "--sample": "--beam",
    "--text": "--prefix --long-lines",
}
NEEDS = {"--resume": "-o"}


def build_parser() -> ArgumentParser:
    parser = CommandParser(
        "nmt-translate", "Translate standard input, line by line, to standard output.", EXAMPLES
    )
    add_checkpoints(parser, "translate")
    add_stream_arguments(parser)
    add_search_arguments(parser.add_argument_group("search"))
    add_output_arguments(parser.add_argument_group("output"))
    add_engine(parser)
    add_workers(parser)
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="prompt for lines, even if standard input is not a terminal",
    )
    return parser


def parse_arguments(argv: Argv) -> Namespace:
    parser = build_parser()
    args = parse_checkpoints(parser, argv)
    check_options(parser, args, CONFLICTS, NEEDS)
    if args.resume and args.n_best and not args.json:
        parser.error("--resume cannot count --n-best lines; give --json too, one line for each")
    if args.text and not args.json and (args.n_best or args.scores or args.alignments):
        parser.error(
            "--text writes candidates, scores and alignments of sentences as JSON only; give --json too"
        )
    if args.attention and Path(args.attention).suffix not in ATTENTION_SUFFIXES:
        parser.error(f"--attention {args.attention}: name it .html or .json")
    if args.attention and args.output:
        # opening the output would empty it
        if Path(args.attention).resolve() == Path(args.output).resolve():
            parser.error(f"--attention {args.attention}: is also -o; give another file")
    if args.engine == "ctranslate2" and len(args.checkpoints) > 1:
        parser.error("--engine ctranslate2 does not support several checkpoints; give one")
    return args


def add_stream_arguments(parser: ArgumentParser) -> None:
    """Add the options for where lines come from and where translations go."""
    parser.add_argument(
        "--text",
        action="store_true",
        help="each line is a paragraph: split it into sentences and translate each",
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
        help="continue after the last whole line of the output file, if it exists",
    )


def add_search_arguments(group: _ArgumentGroup) -> None:
    """Add shorthands for settings of `decoding`, and options that have no setting."""
    group.add_argument(
        "--preset",
        choices=("vaswani2017", "fairseq", "marian", "hf"),
        help="search as this toolkit does; see below",
    )
    group.add_argument(
        "--beam", type=parse_positive, metavar="N", help="hypotheses per sentence; 1 is greedy"
    )
    group.add_argument(
        "--sample",
        action="store_true",
        help="draw at random instead of searching; see decoding.temperature, top_k, top_p, seed",
    )
    group.add_argument(
        "--prefix",
        metavar="FILE",
        help="the beginnings of the translations: a line for each line of input",
    )
    group.add_argument(
        "--tag",
        metavar="SYMBOL",
        help="a tag of the training corpora to put in front of each line, such as the one that selects the "
        "target language of a multilingual model",
    )
    group.add_argument(
        "--long-lines",
        choices=("cut", "refuse"),
        help="what to do with a line of more than decoding.max_source pieces, besides reporting it",
    )


def add_output_arguments(group: _ArgumentGroup) -> None:
    """Add the options for what is written of each translation."""
    group.add_argument(
        "--n-best",
        type=parse_positive,
        metavar="K",
        help="write K lines for each line: its number, counted from 0 "
        "as in Marian and fairseq, TAB score TAB text",
    )
    group.add_argument(
        "--scores", action="store_true", help="write the score and a tab before the text"
    )
    group.add_argument(
        "--alignments",
        action="store_true",
        help="write a tab and source-target pairs of pieces after the text, counted from 0: 0-0 1-2 ...",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="write an object for each line: line (from 1), source, candidates",
    )
    group.add_argument(
        "--attention",
        metavar="FILE",
        help="also write what each translation attends to: FILE.html to look at, or FILE.json",
    )


def collect_overrides(args: Namespace) -> list[str]:
    """Return the options as settings, followed by the settings given as such, which take precedence."""
    from nmt.config import RUNNING_TEXT, USERS_TEXT

    options = {
        "preset": args.preset,
        "beam": args.beam,
        "sample": "true" if args.sample else None,
        "long_lines": args.long_lines,
        "tag": args.tag and json.dumps(args.tag),
    }
    overrides = [f"decoding.{key}={value}" for key, value in options.items() if value is not None]
    defaults = RUNNING_TEXT if args.text else USERS_TEXT
    return [*defaults, *overrides, *args.overrides]


def translate_text(args: Namespace) -> int:
    from nmt.system.runtime import tune_process

    tune_process()  # before torch is imported

    from nmt.agreement import check_sides, find_direction
    from nmt.api import open_model
    from nmt.corpus.reader import refuse_corpus_files
    from nmt.system.errors import UserError
    from nmt.system.progress import say
    from nmt.translate.formats import Layout
    from nmt.translate.stream import start_translating
    from nmt.translate.translator import warn_if_untagged

    if (args.input is None and sys.stdin is None) or (args.output is None and sys.stdout is None):
        raise UserError("standard input or output is closed; give -i FILE and -o FILE")

    # open the model
    layout = Layout(
        n_best=args.n_best,
        has_scores=args.scores,
        has_alignments=args.alignments,
        is_json=args.json,
        keeps_translations=args.attention is not None,
        is_text=args.text,
    )
    align = None
    if args.alignments:
        check_extra("maps", "--alignments")
        from nmt.extras.maps.alignment import add_alignments

        align = add_alignments
    load_model = partial(open_model, args.checkpoints, collect_overrides(args), args.engine)
    start = partial(start_translating, load_model, layout, align, 1 if args.on else args.workers)
    here = start()
    model = here.model
    decoding = model.config.decoding
    warn_if_untagged(model.config)
    if decoding.tag is None:  # it may choose a language
        what = f"{args.checkpoints[0]} translates"
        direction = find_direction(model.config.data)
        check_sides([args.input], [args.prefix], [args.output], what, direction)
    if args.output is not None:
        refuse_corpus_files([Path(args.output)], model.config.data)
    if args.engine == "ctranslate2":
        say(f"{model.translator.engine}: with its own search, see docs/decoding.md")
    if layout.n_candidates > decoding.beam and not decoding.sample:
        raise UserError(
            f"--n-best {args.n_best}: decoding.beam is {decoding.beam}; give --beam {args.n_best} "
            "or more, or --sample"
        )

    if args.attention and len(args.checkpoints) > 1:
        say(f"--attention: shows the attention of the first model, {args.checkpoints[0]}")

    # translate what a person types, or a stream
    names_files = args.input or args.output or args.prefix or args.attention
    is_alone = args.workers == 1 and not args.on
    # a person who gave no input would otherwise wait in vain
    is_at_terminal = not names_files and is_alone and sys.stdin.isatty()
    if args.interactive or is_at_terminal:
        check_extra("prompt", "the prompt")
        from nmt.extras.prompt import converse

        converse(here)
    else:
        translate_input(args, start, here)
    return 0


def translate_input(
    args: Namespace,
    start: "Callable[[], ChunkTranslator]",
    here: "ChunkTranslator",
) -> None:
    """Translate a file or standard input."""
    from nmt.system.progress import say
    from nmt.translate.lines import LARGEST_CHUNK, add_prefixes, open_input
    from nmt.translate.stream import check_not_among
    from nmt.translate.translator import warn_of_cut

    translator = here.model.translator

    with ExitStack() as stack:
        source = stack.enter_context(open_input(args.input))
        prefixes = stack.enter_context(open_input(args.prefix)) if args.prefix else None
        handles = [reader.handle for reader in (source, prefixes) if reader is not None]
        out, n_done, progress = open_lines_output(args, handles, stack, "translating", "lines")
        # so that --resume continues with nothing else
        record = f"{args.output}.nmt-resume"
        if os.path.isfile(args.output or ""):
            with suppress(OSError):  # in a folder that takes no other file
                source.record = os.open(record, os.O_RDWR | os.O_CREAT, 0o666)
                source.checksum = zlib.crc32(here.identity.encode())
                stack.callback(os.close, source.record)
        attention = None
        if args.attention:
            check_extra("report", "--attention")
            from nmt.extras.report.attention_file import open_attention_file

            written = out.fileno() if args.output else STDOUT
            if os.path.exists(args.attention):
                name = f"--attention {args.attention}"
                check_not_among(args.attention, name, [*handles, written])
            title = f"Attention of {args.checkpoints[0]}"
            attention = stack.enter_context(open_attention_file(Path(args.attention), title))

        # chunks of many batches
        chunks = source.read_chunks(n_done, max(LARGEST_CHUNK, translator.chunk_lines))
        if prefixes is not None:
            chunks = add_prefixes(chunks, prefixes, n_done)
        is_warned = False
        n_cut = n_loops = first_cut = 0
        done = do_chunks(args, start, here, chunks, out, progress)
        for result in stack.enter_context(closing(done)):
            if attention is not None:
                attention.add(translator, result.lines, result.translations)
            if result.cut and not n_cut:
                first_cut = min(result.cut)
            n_cut += len(result.cut)
            n_loops += sum(result.cut.values())
            if not is_warned and len(result.shortened) > MAX_SHORTENED * result.n_lines:
                is_warned = True
                say(
                    f"warning: {source.name}:{result.shortened[0]}: has several sentences, and its "
                    "translation has fewer; give --text to translate each sentence separately"
                )
    if source.record is not None:
        os.unlink(record)
    if n_cut:
        warn_of_cut(f"{source.name}:{first_cut}", n_cut, n_loops, progress.done - n_done)


main = partial(start_command, "nmt-translate", parse_arguments, translate_text)

if __name__ == "__main__":
    sys.exit(main())
