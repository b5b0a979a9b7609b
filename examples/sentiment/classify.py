"""Classifies texts with a classifier that train.py made: those given, or the lines of standard input.

    python examples/sentiment/classify.py runs/sentiment "Not bad at all." "Hardly a masterpiece."
    python examples/sentiment/classify.py runs/sentiment --attention why.html "The plot is not bad at all."

Each line of output is the label, its probability, and the text. With --attention, a page shows what
each piece of the first text attends to, in every layer and head; an image, the mean of the last layer's.
"""

from nmt.system.runtime import choose_matmul_library, tune_process

if __name__ == "__main__":
    tune_process()  # before torch is imported

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from classifier import Classifier, compute_probabilities, encode_texts, load_classifier
from torch import Tensor

from nmt.commands.cli import CommandParser, start_command
from nmt.data.batch import pack
from nmt.data.vocab import Vocab
from nmt.extras.maps.attention_maps import AttentionMap
from nmt.extras.report.attention_view import render_attention_page
from nmt.system.files import check_writable, write_bytes
from nmt.translate.lines import LineReader

EXAMPLES = """\
  python examples/sentiment/classify.py runs/sentiment "It is not bad at all."
  python examples/sentiment/classify.py runs/sentiment < reviews.txt
  python examples/sentiment/classify.py runs/sentiment --attention why.html "It is not bad at all." """


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser("classify.py", "Classify texts.", EXAMPLES)
    parser.add_argument("model", type=Path, metavar="DIR", help="what train.py wrote")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: lines of standard input")
    parser.add_argument("--attention", type=Path, metavar="FILE", help="a .html")
    args = parser.parse_args(argv)
    if args.attention and args.attention.suffix != ".html":
        parser.error(f"--attention {args.attention}: name it .html")
    return args


def classify_texts(args: argparse.Namespace) -> int:
    choose_matmul_library()
    if args.attention:
        check_writable(args.attention)
    model, vocab, recipe = load_classifier(args.model)
    lines = LineReader(0, "standard input").read_chunks()
    texts = args.texts or (line for chunk in lines for line in chunk.lines)
    for number, text in enumerate(texts):
        ids = encode_texts(vocab, [text], recipe.max_pieces)
        probability, label = compute_probabilities(model, ids)[0].max(0)
        name = recipe.labels[int(label)]
        print(name, f"{probability:.3f}", text, sep="\t", flush=True)
        if args.attention and number == 0:
            draw_attention_of_text(args.attention, model, vocab, ids[0], name)
    return 0


@torch.inference_mode()
def draw_attention_of_text(
    path: Path, model: Classifier, vocab: Vocab, ids: list[int], label: str
) -> None:
    weights: list[Tensor] = []
    model(pack([ids]), weights)
    layers = torch.cat(weights).numpy()  # (layers, heads, L, L)
    pieces = vocab.pieces(ids)
    nothing = np.zeros((0, 0, 0, 0), np.float32)  # there is no decoder
    of_encoder = AttentionMap(pieces, [label, "</s>"], [], {"memory": nothing, "encoder": layers})
    title = f"{label}: what each piece attends to"
    write_bytes(path, render_attention_page([of_encoder], title).encode())


if __name__ == "__main__":
    sys.exit(start_command("classify.py", parse_arguments, classify_texts, None))
