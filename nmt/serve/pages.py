"""The files that the server hands to browsers: a fixed table, read when the server starts.

No path of a request reaches the file system. The policy lets the page load nothing but these files
and connect only to this server.
"""

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
# the name under /page/, and the package that holds the file
PAGE_FILES = {
    "index.html": "nmt.serve",
    "page.js": "nmt.serve",
    "server.js": "nmt.serve",
    "words.js": "nmt.serve",
    "page.css": "nmt.serve",
    "attention_view.js": "nmt.report",
    "attention_view.css": "nmt.report",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Changes with the content, so that a browser asks for what it has in vain."""
        return f'"{sha256(self.content).hexdigest()[:16]}"'


def read_page_files() -> dict[str, PageFile]:
    found = {}
    for name, package in PAGE_FILES.items():
        folder = files(package) / "page" if package == "nmt.serve" else files(package)
        place = folder / name
        if place.is_file():
            suffix = name.rpartition(".")[2]
            found[name] = PageFile(place.read_bytes(), f"{TYPES[suffix]}; charset=utf-8")
    return found
