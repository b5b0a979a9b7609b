"""nmt-import: a model that fairseq or Hugging Face transformers trained, as a checkpoint folder of ours."""

import argparse
import sys
from collections.abc import Sequence

from nmt.commands.entry import guarded, make_parser

EXAMPLES = """\
  nmt-import models/marian-en-de --from huggingface -o imports/marian-en-de
  nmt-import checkpoint_best.pt --from fairseq --sentencepiece spm.model --dict dict.en.txt -o imports/en-de
  nmt-import checkpoint_best.pt --from fairseq --sentencepiece spm.model --dict dict.en.txt dict.de.txt -o imports/en-de
  nmt-eval imports/en-de --test-set wmt14/full data.src=en data.tgt=de

The folder is a checkpoint like an average: nmt-translate, nmt-eval and nmt-export take it. Nothing is approximated:
what this model cannot do exactly is refused in a line that names the setting. Where transformers is installed, a model
of Hugging Face is compared with it before the folder appears: each piece's log-probability must agree to 1e-4."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("nmt-import", "Make a checkpoint of a model that another toolkit trained.", EXAMPLES)
    parser.add_argument("source", metavar="SOURCE",
                        help="a folder with config.json (huggingface), or a checkpoint.pt (fairseq)")
    parser.add_argument("--from", dest="kind", required=True, choices=("huggingface", "fairseq"),
                        help="where it is from")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="where to; an earlier import is replaced")
    parser.add_argument("--sentencepiece", metavar="FILE", help="fairseq: the SentencePiece model that cut its text")
    parser.add_argument("--dict", nargs="+", metavar="FILE", help="fairseq: its dict.txt; or that of source and target")
    args = parser.parse_args(argv)
    return guarded(lambda: work(args), "nmt-import")


def work(args: argparse.Namespace) -> int:
    from pathlib import Path

    from nmt.process import settle

    settle()  # before torch comes in

    from nmt.errors import UserError
    from nmt.files import make_folder
    from nmt.progress import say
    from nmt.publish import fairseq, marian
    from nmt.publish.adoption import adopt

    source, out = Path(args.source), Path(args.output)
    dictionaries = [Path(name) for name in args.dict or ()]
    if args.kind == "huggingface":
        if args.sentencepiece or dictionaries:
            raise UserError("--sentencepiece and --dict go with --from fairseq; here they are in the folder")
        origin = marian.read(source)
    else:
        if not args.sentencepiece or len(dictionaries) not in (1, 2):
            raise UserError("--from fairseq needs --sentencepiece FILE and --dict FILE, or --dict SOURCE TARGET")
        origin = fairseq.read(source, Path(args.sentencepiece), dictionaries)
    make_folder(out.resolve().parent)
    agreement = adopt(origin, out)
    why = "transformers is not installed" if args.kind == "huggingface" else "there is no fairseq here"
    checked = f"compared with transformers: {agreement}" if agreement else f"not compared with its origin: {why}"
    shape = origin.shape
    say(f"{out}: {shape.n_layers} + {shape.n_layers} layers, d_model {shape.d_model}, {shape.norm}-norm, "
        f"{origin.vocab.size:,} pieces; {checked}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
