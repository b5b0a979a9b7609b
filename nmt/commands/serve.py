"""nmt-serve: translations over HTTP, for programs and for people in a browser.

The command parses, opens the models and the socket, and hands them to the server. Mistakes in the
options are reported before torch is imported.
"""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from functools import partial
from typing import TYPE_CHECKING

from nmt.commands.cli import (
    Argv,
    CommandParser,
    add_engine,
    parse_checkpoints,
    parse_positive,
    start_command,
)
from nmt.system.errors import UserError
from nmt.system.extras import import_extra

if TYPE_CHECKING:
    from nmt.extras.serve.models import ServedModel

KEYS_VARIABLE = "NMT_API_KEYS"
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
        help=f"API keys, one per line; a client must send one of them. The variable {KEYS_VARIABLE} also takes keys",
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
    from nmt.system.runtime import tune_process

    keys = read_keys(args.api_key_file)
    for package in ("fastapi", "python_multipart", "uvicorn"):
        import_extra(package)
    tune_process()  # before torch is imported

    from nmt.extras.serve.app import ServeLimits
    from nmt.extras.serve.models import check_directions
    from nmt.extras.serve.server import make_server, open_socket, run_server

    limits = ServeLimits(args.max_characters, args.max_waiting, args.timeout)
    with open_socket(args.host, args.port) as listener:
        models = [open_served(path, args) for path in args.checkpoints]
        check_directions(models)
        for model in models:
            model.translator.translate(["1"])  # the first time takes longer
        server = make_server(models, limits, keys)
        run_server(server, listener, [model.direction for model in models])
    return 0


def read_keys(path: str | None) -> frozenset[str]:
    """Read the keys, which are never on the command line: every user of the machine can see it."""
    variable = os.environ.get(KEYS_VARIABLE)
    lines = (variable or "").split(",")
    if (
        variable is not None and not "".join(lines).strip()
    ):  # otherwise the server would be open to everyone
        raise UserError(f"{KEYS_VARIABLE}: is set, but has no key; give one, or unset it")
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                lines += file.read().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
    keys = frozenset(line.strip() for line in lines if line.strip())
    if path is not None and not keys:
        raise UserError(f"{path}: has no key; write one per line")
    return keys


def open_served(path: str, args: Namespace) -> "ServedModel":
    """Open a checkpoint, or what another engine reads."""
    from nmt.api import open_model
    from nmt.config import RUNNING_TEXT
    from nmt.extras.serve.models import ServedModel
    from nmt.translate.translator import warn_if_untagged

    # A client would not see the warning that its line was cut.
    overrides = ["decoding.long_lines=refuse", *RUNNING_TEXT, *args.overrides]
    if args.engine == "ctranslate2":
        from nmt.extras.export.ctranslate2 import open_ctranslate2

        loaded = open_ctranslate2([path], overrides, is_served=True)
    else:
        # a server runs for long, so half a minute of compiling at its first start soon pays off
        loaded = open_model([path], ["decoding.compile=on", *overrides])
    warn_if_untagged(loaded.config)
    return ServedModel(loaded)


main = partial(start_command, "nmt-serve", parse_arguments, serve_models, extra="serve")

if __name__ == "__main__":
    sys.exit(main())
