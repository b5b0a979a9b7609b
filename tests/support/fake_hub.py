"""A Hugging Face hub on this machine: its paths, headers, redirects and errors, and damage when told."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants
from pytest import MonkeyPatch

COMMIT = "b199e406369ec1b7634206d3ded5ba45de2fe696"
LARGE = (".parquet", ".safetensors")


class FakeHub(ThreadingHTTPServer):
    """Has one dataset, or another kind. What is large lies on a second host, as on the hub, which
    redirects there.
    """

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes], kind: str = "datasets") -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name, self.files = name, files
        self.listing = f"/api/{kind}/{name}"
        self.content = f"/{name}/resolve/" if kind == "models" else f"/{kind}/{name}/resolve/"
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.served: Counter[str] = Counter()  # bytes of each large file
        self.asked: list[str] = []
        self.tokens: list[str | None] = []  # that the second host was shown
        self.damaged: set[str] = set()  # files that arrive with one other bit
        self.refused: set[str] = set()
        self.stalling: set[str] = set()  # of which only half arrives, while nothing ends
        self.has_stalled = threading.Event()

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # of connections that ended


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if path.startswith("/cdn/"):
            self.send_large(path.removeprefix("/cdn/"))
        elif path.startswith(hub.content):
            revision, _, name = path.removeprefix(hub.content).partition("/")
            if self.check(revision):
                self.send_file(name)
        elif path.startswith(hub.listing):
            _, _, rest = path.removeprefix(hub.listing).partition("/")  # nothing, or KIND/REVISION
            what, _, revision = rest.partition("/")
            if self.check(revision or "main"):
                self.send_json(
                    self.list_files() if what == "tree" else {"id": hub.name, "sha": COMMIT}
                )
        else:
            self.refuse(401, "RepoNotFound")

    def check(self, revision: str) -> bool:
        if revision in ("main", COMMIT):
            return True
        self.refuse(404, "RevisionNotFound")
        return False

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def send(
        self, status: int, content: bytes, headers: dict[str, str], is_stalling: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if is_stalling:
            self.wfile.write(content[: len(content) // 2])
            self.server.has_stalled.set()
            self.rfile.read()  # until the other side is gone
        elif self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def list_files(self) -> list[dict[str, object]]:
        files = []
        for name, content in self.server.files.items():
            file: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
            file["oid"] = "0" * 40
            if name.endswith(LARGE):
                sha256 = self.server.digest(name)
                file["lfs"] = {"size": len(content), "oid": sha256, "pointerSize": 134}
            files.append(file)
        return files

    def send_file(self, name: str) -> None:
        hub = self.server
        if name not in hub.files:
            self.refuse(404, "EntryNotFound")
        elif name.endswith(LARGE):
            host = f"http://localhost:{hub.server_port}"
            headers = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{hub.digest(name)}"',
                "X-Linked-Size": str(len(hub.files[name])),
                "Location": f"{host}/cdn/{name}",
            }
            self.send(302, b"", headers)
        else:
            oid = hashlib.sha1(b"blob %d\0" % len(hub.files[name]) + hub.files[name]).hexdigest()
            self.send(200, hub.files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{oid}"'})

    def send_large(self, name: str) -> None:
        hub = self.server
        hub.tokens.append(self.headers["Authorization"])
        if name in hub.refused:
            self.refuse(500, "InternalError")
            return
        content = hub.files[name]
        if name in hub.damaged:
            content = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        hub.served[name] += len(content)
        self.send(200, content, {}, is_stalling=name in hub.stalling)


@contextmanager
def run_hub(name: str, files: dict[str, bytes], kind: str = "datasets") -> Iterator[FakeHub]:
    with FakeHub(name, files, kind) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def use_hub(monkeypatch: MonkeyPatch, endpoint: str, cache: Path) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE say when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
