"""What only some features need: packages, each in an extra of this one, and the folders of nmt/extras/."""

import importlib
import json
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nmt.system.errors import UserError
from nmt.system.progress import say_once

EXTRAS = {
    "numba": "cpu",
    "datasets": "hub",
    "huggingface_hub": "hub",
    "pyarrow": "hub",
    "s3fs": "mirror",
    "ctranslate2": "export",
    "transformers": "export",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "fastapi": "serve",
    "python_multipart": "serve",
    "uvicorn": "serve",
    "ray": "ray",
}


def name_remedy(package: str) -> str:
    """Return the command that installs a package, from where this copy of nmtkit came."""
    extra = EXTRAS[package]
    checkout = Path(__file__).parents[2]
    if (checkout / "setup.cfg").is_file():
        return f"pip install -e '{'.' if checkout.samefile('.') else checkout}[{extra}]'"
    record = distribution("nmtkit").read_text("direct_url.json")  # pip's, unless from an index
    source = f" @ {json.loads(record)['url']}" if record else ""
    return f"pip install 'nmtkit[{extra}]{source}'"


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def import_extra(package: str) -> Any:
    """Import a package, or raise UserError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:  # it is missing, or something that it needs
        raise UserError(f"{package} cannot be imported ({error}); {name_remedy(package)}") from None


def check_extra(name: str, asked: str) -> None:
    """Raise UserError if nmt/extras/NAME, which `asked` needs, is missing."""
    if not (is_installed("nmt.extras") and is_installed(f"nmt.extras.{name}")):
        raise UserError(f"{asked}: needs nmt/extras/{name}, which is missing; install nmt again")


def warn_uncompiled(error: Exception) -> None:
    """Say once that torch and numpy do what numba would have compiled for this processor, and why."""
    if isinstance(error, ModuleNotFoundError) and error.name == "numba":
        say_once(f"without numba, CPUs train and translate more slowly; {name_remedy('numba')}")
    else:
        say_once(
            f"warning: compiling for this processor fails ({type(error).__name__}: {error}), so CPUs train and "
            "translate more slowly"
        )
