"""nmt-serve: translations over HTTP, for programs and for people in a browser."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from functools import partial

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_engine,
    parse_checkpoints,
    parse_positive,
    start_command,
)

EXAMPLES = """\
  nmt-serve runs/demo/average                                    http://127.0.0.1:8000, for this machine only
  nmt-serve runs/en-de/average runs/de-en/average                two directions
  nmt-serve exports/en-de --engine ctranslate2 decoding.beam=2
  nmt-serve runs/demo/average --host 0.0.0.0 --api-key-file keys

POST /translate accepts what LibreTranslate's clients send. GET /openapi.json describes it, and GET / is a page to try
it. SIGTERM and Ctrl-C end the server once pending requests are answered, within 10 seconds. Exit codes: 0 ended by
SIGTERM, 1 a failure, 2 a mistake in the input, 130 Ctrl-C. See docs/serving.md."""


def build_parser() -> ArgumentParser:
    parser = CommandParser("nmt-serve", "Serve translations over HTTP.", EXAMPLES)
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CHECKPOINT",
        help="a checkpoint folder, an average, or a run folder; several if each translates another direction. "
        "Settings may follow: decoding.key=value, device=cpu",
    )
    add_engine(parser)
    add_network_arguments(parser.add_argument_group("network"))
    add_limit_arguments(parser.add_argument_group("limits"))
    return parser


def add_network_arguments(group: _ArgumentGroup) -> None:
    """Add the options for where the server listens, and to whom."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default 127.0.0.1, for this machine only; 0.0.0.0 is every network)",
    )
    group.add_argument(
        "--port",
        type=parse_port,
        default=8000,
        metavar="N",
        help="the port (default 8000); 0: any free one, which is printed",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys, one per line; a client must send one of them. The variable NMT_API_KEYS also takes keys",
    )


def add_limit_arguments(group: _ArgumentGroup) -> None:
    """Add the limits of one client, and of all together."""
    for name, value, text in (
        ("--max-characters", 100_000, "maximum number of characters in a request"),
        (
            "--max-waiting",
            1_024,
            "maximum number of sentences in the queue; when it is full, requests are refused with a time to retry",
        ),
        ("--timeout", 30, "maximum number of seconds from a request to its answer"),
    ):
        group.add_argument(
            name, type=parse_positive, default=value, metavar="N", help=f"{text} (default {value})"
        )


def parse_port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65_535:
        raise ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def parse_arguments(argv: Argv) -> Namespace:
    return parse_checkpoints(build_parser(), argv)


def serve_models(args: Namespace) -> int:
    from nmt.extras.serve.start import serve

    serve(args)
    return 0


main = partial(start_command, "nmt-serve", parse_arguments, serve_models, extra="serve")

if __name__ == "__main__":
    sys.exit(main())
