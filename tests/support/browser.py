"""Pages in a real browser: Chromium of this machine, driven by playwright.

What a page must never do is recorded while it is open: dialogs, requests beyond those allowed,
errors of its scripts and violations of its policy.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OpenPage:
    page: Any
    faults: list[str] = field(default_factory=list)


@contextmanager
def open_page(url: str, width: int = 1000, scheme: str = "light") -> Iterator[OpenPage]:
    """Open a page; `faults` lists what it did wrong so far. Requests go to its own address only."""
    from playwright.sync_api import sync_playwright

    own = url.split("#")[0] if url.startswith("file:") else "/".join(url.split("/")[:3])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(300_000)
        opened = OpenPage(context.new_page())
        note = opened.faults.append

        def refuse_dialog(dialog: Any) -> None:
            note(f"dialog: {dialog.message}")
            dialog.dismiss()

        def check_request(request: Any) -> None:
            if not request.url.startswith((own, "data:", "blob:")):
                note(f"request: {request.url}")

        opened.page.on("dialog", refuse_dialog)
        opened.page.on("request", check_request)
        opened.page.on("pageerror", lambda error: note(f"script: {error}"))
        opened.page.on(
            "console",
            lambda message: message.type == "error" and note(f"console: {message.text}"),
        )
        try:
            opened.page.goto(url)
            yield opened
        finally:
            browser.close()
