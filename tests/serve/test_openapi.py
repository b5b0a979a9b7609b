"""The OpenAPI document: it names all routes, and the server answers as it says, whatever is asked."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_server import DEFAULTS, RunningServer, open_toy_models, run_in_thread
from support.soaking import IS_SOAK, counted

from nmt.serve.app import Service, list_routes
from nmt.serve.batcher import Batcher
from nmt.serve.metrics import ServerMetrics
from nmt.serve.openapi import make_openapi

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module", name="server")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_in_thread(open_toy_models(tmp_path_factory.mktemp("models"))) as server:
        yield server


def test_the_document_names_all_routes(server: RunningServer) -> None:
    document = make_openapi(server.models, DEFAULTS)
    assert server.ask("GET", "/openapi.json").json == document
    described = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
        if method != "parameters"
    }
    service = Service(server.models, Batcher(1, 1), DEFAULTS, frozenset(), ServerMetrics(), {})
    served = set()
    for route in list_routes(service):
        served |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    assert described == served
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert names == set(document["components"]["schemas"])


@pytest.mark.skipif(not IS_SOAK, reason="takes minutes; NMT_SOAK=1 runs it")
@pytest.mark.timeout(3_600)
def test_no_question_breaks_the_server(server: RunningServer, tmp_path: Path) -> None:
    st = shutil.which("st") or str(Path(sys.executable).with_name("st"))
    if not os.path.exists(st):
        pytest.skip("schemathesis is not installed; pip install '.[dev]'")
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    # 4 of the operations have parameters; the others are asked a few times
    options = ["--max-examples", str(counted(25, 2_600)), "--phases", "coverage,fuzzing"]
    done = subprocess.run(
        [st, "run", url, "--checks", ",".join(CHECKS), "--seed", "1", "--no-color", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-5_000:]
    n_cases = int(re.search(r"([\d,]+) generated", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    assert n_cases > counted(100, 10_000)
