"""What nmt-export does with its options: open the checkpoint, choose the lines to compare, and export it in
the format that is named.
"""

from argparse import Namespace
from itertools import islice
from pathlib import Path

from nmt.checkpoint.run_checkpoints import open_checkpoint
from nmt.corpus.text_files import TextFile, read_lines
from nmt.extras.export.argos import export_argos
from nmt.extras.export.export import FORMATS, export, make_lines
from nmt.extras.export.marian import convert_if_published
from nmt.system.files import check_exchangeable
from nmt.system.progress import say
from nmt.system.run_folder import dev_text_file

MAX_LINES = 1_000
N_DEV_LINES = 100


def export_by_name(args: Namespace) -> None:
    """Export as the options of nmt-export say, and say how well it agrees with the checkpoint."""
    checkpoint = open_checkpoint(convert_if_published(Path(args.checkpoint), None, False))
    out = Path(args.output)
    dev = Path(checkpoint.config.data.store) / dev_text_file("src")
    if args.check_lines is not None:
        lines = list(islice(read_lines(TextFile(Path(args.check_lines))), MAX_LINES))
    elif dev.is_file():
        lines = list(islice(read_lines(TextFile(dev)), N_DEV_LINES))
    else:
        lines = make_lines(checkpoint.vocab)
    check_exchangeable(out.resolve())
    quantization = args.quantization or FORMATS[args.to].quantizations[0]
    if args.to == "argos":
        agreement = export_argos(checkpoint, out, quantization, lines, args.force)
    else:
        agreement = export(checkpoint, args.to, out, quantization, lines, args.force)
    say(f"{out}: {args.to}, {quantization}; {agreement}")
