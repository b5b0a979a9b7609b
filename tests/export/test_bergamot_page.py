"""The page of nmt-export --to bergamot: its policy, and, where the npm package and Chromium are installed, the
page itself, which goes on without its server.
"""

import base64
import hashlib
import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.browser import open_page
from support.marian_models import LINES, make_shaped
from support.needs import needs_chromium
from test_bergamot import translate_in_node

from nmt.extras.export import bergamot
from nmt.extras.export.export import export

PAGE = Path(bergamot.__file__).with_name("page") / "index.html"


def test_the_policy_allows_what_the_page_has_and_no_text_becomes_html() -> None:
    page = PAGE.read_text()
    contents = re.findall("<(?:style|script)>(.*?)</", page, re.DOTALL)
    digests = [hashlib.sha256(content.encode()).digest() for content in contents]
    expected = [base64.b64encode(digest).decode() for digest in digests]
    assert re.findall("(?:style|script)-src 'sha256-(.*?)'", page) == expected
    assert "HTML" not in page


def translate(page: Any, expected: list[Any]) -> None:
    """Translate line by line, because lines that the engine is given together have one limit of length."""
    for line, (text, _) in zip(LINES, expected, strict=True):
        page.fill("#source", line)
        page.get_by_text(text, exact=True).wait_for()


@needs_chromium()
def test_it_translates_and_goes_on_without_its_server(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(make_shaped("tied", tmp_path), "bergamot", out, "int8", LINES)
    expected = translate_in_node(out)
    handler = partial(SimpleHTTPRequestHandler, directory=str(out))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model = out / "model.bin"
    content = model.read_bytes()
    model.write_bytes(b"")
    with open_page(f"http://127.0.0.1:{server.server_port}/", width=390) as opened:
        page = opened.page
        page.get_by_text("model.bin is not as it was exported; export the model again.").wait_for()
        model.write_bytes(content)
        page.reload()
        page.get_by_text("run npm install in this folder").wait_for()
        (out / "node_modules").symlink_to(os.environ["NMT_NODE_MODULES"])
        opened.faults.clear()  # that the engine was not there
        page.reload()
        translate(page, expected)
        page.get_by_text("Ready, also without a network.").wait_for()
        assert page.inner_text("h1") == "English to German"
        assert page.get_by_text("words a second").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert opened.faults == []
        information = out / "model_info.json"
        information.write_text(information.read_text().replace("toy", "another"))
        os.utime(information, (0, 0))  # no news to a browser that has a newer one from this address
        page.reload()
        translate(page, expected)
        page.get_by_text("Ready, also without a network.").wait_for()
        assert page.inner_text("#model") == "Model: English-German another"
        server.shutdown()
        server.server_close()
        page.reload()
        translate(page, expected)


@needs_chromium()
def test_a_page_that_no_server_serves_names_the_command() -> None:
    with open_page(PAGE.as_uri()) as opened:
        opened.page.get_by_text(
            "in this folder, python3 -m http.server --bind 127.0.0.1"
        ).wait_for()
