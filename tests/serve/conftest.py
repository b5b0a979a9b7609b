"""The toy models and a server of them, which the tests of this folder share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.running_server import RunningServer

    from nmt.serve.models import ServedModels


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "ServedModels":
    from support.running_server import open_toy_models  # skips where FastAPI is not installed

    return open_toy_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(models: "ServedModels") -> "Iterator[RunningServer]":
    from support.running_server import run_in_thread

    with run_in_thread(models) as running:
        yield running
