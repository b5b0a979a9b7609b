"""A server for tests: a toy model behind real sockets, in a thread of this process."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest import TempPathFactory, fixture, importorskip

from nmt.api import open_model
from support.toy_corpus import sentences
from support.untrained import DATA, make_checkpoint, make_vocab
from support.waiting import until

for package in ("fastapi", "uvicorn", "python_multipart"):
    importorskip(package, reason=f"{package} is not installed; pip install '.[serve]'")

from nmt.extras.serve.app import ServeLimits  # noqa: E402
from nmt.extras.serve.models import ServedModel  # noqa: E402
from nmt.extras.serve.server import TranslationServer, make_server, open_socket  # noqa: E402

DEFAULTS = ServeLimits()
LINES = [source for source, _ in sentences(200, seed=5)]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class RunningServer:
    server: TranslationServer
    models: list[ServedModel]
    port: int

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body or None, headers or {})
            response = connection.getresponse()
            found = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, found, response.read().decode())
        finally:
            connection.close()

    def post(self, path: str, question: object, headers: dict[str, str] | None = None) -> Answer:
        body = json.dumps(question).encode()
        kind = {"Content-Type": "application/json"}
        return self.ask("POST", path, body, {**kind, **(headers or {})})


def open_toy_models(folder: Path, settings: Sequence[str] = ()) -> list[ServedModel]:
    """Models of two directions, which translate otherwise."""
    vocab = make_vocab(folder)
    models = []
    for tgt, seed in (("de", 2), ("fr", 3)):
        data = replace(DATA, tgt=tgt)
        checkpoint = make_checkpoint(folder / f"en-{tgt}", vocab, seed=seed, data=data)
        overrides = ["decoding.long_lines=refuse", "device=cpu", *settings]
        models.append(ServedModel(open_model([str(checkpoint)], overrides)))
    return models


@contextmanager
def run_in_thread(
    models: list[ServedModel],
    limits: ServeLimits = DEFAULTS,
    keys: frozenset[str] = frozenset(),
) -> Iterator[RunningServer]:
    server = make_server(models, limits, keys)
    with open_socket("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=[[listener]])
        thread.start()
        until(lambda: server.started)
        try:
            yield RunningServer(server, models, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@fixture(scope="module", name="models")
def share_models(tmp_path_factory: TempPathFactory) -> list[ServedModel]:
    return open_toy_models(tmp_path_factory.mktemp("models"))


@fixture(scope="module", name="server")
def share_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    with run_in_thread(models) as server:
        yield server
