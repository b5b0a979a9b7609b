"""The files that the server hands to browsers: a fixed table, read when the server starts.

No path of a request reaches the file system. The policy lets the page load only these files and
speak only to this server.
"""

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
OWN_FILES = ("index.html", "page.js", "server.js", "words.js", "page.css")
FILES_OF_REPORTS = ("attention_view.js", "attention_view.css")


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Changes with the content, so that a browser does not load what it has."""
        return f'"{sha256(self.content).hexdigest()[:16]}"'


def read_page_files() -> dict[str, PageFile]:
    """Return the files by their name under /page/."""
    places = {name: files("nmt.serve") / "page" / name for name in OWN_FILES}
    places |= {name: files("nmt.report") / name for name in FILES_OF_REPORTS}
    found = {}
    for name, place in places.items():
        media_type = f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        found[name] = PageFile(place.read_bytes(), media_type)
    return found
