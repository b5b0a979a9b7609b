"""Packages that only some features need. Each comes with an extra of this package: `pip install 'nmtkit[serve]'`."""

import importlib
from importlib.util import find_spec
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
    "vl_convert": "report",
    "fastapi": "serve",
    "python_multipart": "serve",
    "uvicorn": "serve",
    "ray": "ray",
}


def name_remedy(package: str) -> str:
    """Return the command that installs a package."""
    return f"pip install 'nmtkit[{EXTRAS[package]}]'"


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def import_extra(package: str) -> Any:
    """Import a package, or raise UserError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:  # it is missing, or something that it needs
        raise UserError(f"{package} cannot be imported ({error}); {name_remedy(package)}") from None


def warn_uncompiled(error: Exception) -> None:
    """Say once that torch and numpy do what numba would have compiled for this processor, and why."""
    if isinstance(error, ModuleNotFoundError) and error.name == "numba":
        say_once(f"without numba, CPUs train and translate more slowly; {name_remedy('numba')}")
    else:
        reason = f"{type(error).__name__}: {error}"
        say_once(
            f"warning: compiling for this processor fails ({reason}), so CPUs train and translate more slowly"
        )
