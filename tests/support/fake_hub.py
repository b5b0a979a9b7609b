"""A Hugging Face hub on this machine: its paths, headers, redirects and errors, and damage when told."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "b199e406369ec1b7634206d3ded5ba45de2fe696"


class FakeHub(ThreadingHTTPServer):
    """Has one dataset. What is large lies on a second host, as on the hub, which redirects there."""

    daemon_threads = True

    def __init__(self, dataset: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.dataset, self.files = dataset, files
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.served: Counter[str] = Counter()  # bytes of each large file
        self.asked: list[str] = []
        self.tokens: list[str | None] = []  # that the second host was shown
        self.damaged: set[str] = set()  # files that arrive with one other bit
        self.refused: set[str] = set()

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
        kind, _, rest = path.lstrip("/").partition("/")
        if kind == "cdn":
            self.send_large(rest)
        elif path == f"/api/datasets/{hub.dataset}":
            self.send_listing()
        elif path.startswith(f"/api/datasets/{hub.dataset}/revision/"):
            self.send_listing() if self.check(path.rsplit("/", 1)[1]) else None
        elif path.startswith(f"/datasets/{hub.dataset}/resolve/"):
            revision, _, name = path.partition("/resolve/")[2].partition("/")
            if self.check(revision):
                self.send_file(name)
        else:
            self.refuse(401, "RepoNotFound")

    def check(self, revision: str) -> bool:
        if revision in ("main", COMMIT):
            return True
        self.refuse(404, "RevisionNotFound")
        return False

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_listing(self) -> None:
        siblings = []
        for name, content in self.server.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if name.endswith(".parquet"):
                sha256 = self.server.digest(name)
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        listing = {"id": self.server.dataset, "sha": COMMIT, "siblings": siblings}
        self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str) -> None:
        hub = self.server
        if name not in hub.files:
            self.refuse(404, "EntryNotFound")
        elif name.endswith(".parquet"):
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
        self.send(200, content, {})


@contextmanager
def run_hub(dataset: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(dataset, files) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
