"""The start of nmt-serve: reads the keys, opens the models and the socket, and hands them to the server.
Mistakes in the options are reported before torch is imported.
"""

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from nmt.config import RUNNING_TEXT
from nmt.system.errors import UserError
from nmt.system.extras import import_extra
from nmt.system.runtime import tune_process

if TYPE_CHECKING:
    from nmt.extras.serve.models import ServedModel

KEYS_VARIABLE = "NMT_API_KEYS"


def serve(args: Namespace) -> None:
    """Serve as the options of nmt-serve say, until a signal ends it."""
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
