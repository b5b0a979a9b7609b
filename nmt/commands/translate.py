"""nmt-translate: one line in, one line out."""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import guarded, make_parser

EXAMPLES = """\
  nmt-translate runs/demo/average < text.en > text.de
  echo "The old man sees a dog ." | nmt-translate runs/demo/average --beam 1
  nmt-translate runs/demo/average                       at a terminal it asks for lines"""

CHUNK = 4096  # lines held at a time: enough to sort by length, little enough to see output soon


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-translate", "Translate standard input, line by line, to standard output.", EXAMPLES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, an average, or a run folder")
    parser.add_argument("--beam", type=int, metavar="N", help="hypotheses per sentence; 1 is greedy")
    args = parser.parse_args(argv)
    return guarded(lambda: work(args), "nmt-translate")


def work(args: argparse.Namespace) -> int:
    from itertools import islice
    from pathlib import Path

    from nmt.process import settle

    settle()  # before torch comes in

    from nmt.checkpoint import load
    from nmt.config import changed
    from nmt.data.text import decoded
    from nmt.decode.translator import make_translator
    from nmt.dist import device_of
    from nmt.errors import UserError
    from nmt.progress import say

    checkpoint = load(Path(args.checkpoint))
    config = changed(checkpoint.config, [] if args.beam is None else [f"decoding.beam={args.beam}"])
    translator = make_translator(checkpoint, device_of(), config.decoding)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say(f"{config.data.src} -> {config.data.tgt}; one sentence per line, Ctrl-D ends")
    lines = decoded(sys.stdin.buffer, "standard input")
    done, mistake = 0, None
    while mistake is None:
        chunk: list[str] = []
        try:
            chunk.extend(islice(lines, 1 if is_terminal else CHUNK))
        except UserError as error:  # what stands before the bad line is translated all the same
            mistake = error
        if not chunk:
            break
        for translation in translator.translate(chunk, first=done + 1):
            print(translation.text, flush=is_terminal)
        done += len(chunk)
    if mistake is not None:
        raise mistake
    return 0


if __name__ == "__main__":
    sys.exit(main())
