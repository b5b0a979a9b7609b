"""The documentation as a site and on a code host: every link, anchor and image leads somewhere, every
page is in the navigation, and the built pages load nothing from elsewhere.

Zensical's strict mode finds broken links and anchors by itself, but neither missing images nor what
differs on a code host, so links are checked here too, without the tool.
"""

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

from pytest import mark
from support.browser import open_page
from support.checkout import ROOT
from support.needs import needs_chromium, needs_package
from test_architecture import LEVELS

import nmt
from nmt.system.strict_yaml import parse_yaml

# docs/results holds what studies published: tables that the pages link to.
PAGES = sorted(set(ROOT.glob("docs/**/*.md")) - set(ROOT.glob("docs/results/**/*.md")))
TEXTS = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted(ROOT.glob("examples/**/*.md"))]
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def read_prose(path: Path) -> str:
    """A page without its code."""
    text = FENCED.sub("", path.read_text())
    return re.sub(r"`[^`\n]*`", "", text)


def list_anchors(path: Path) -> list[str]:
    """The anchors of the headings of a page, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return [heading.replace(" ", "-") for heading in kept]


def find_broken_links(path: Path) -> list[str]:
    faults = []
    for link in LINK.findall(read_prose(path)):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.is_file():
            faults.append(f"{link}: no such file")
        elif path in PAGES and not target.resolve().is_relative_to(ROOT / "docs"):
            faults.append(f"{link}: leaves docs/, so the site would not have it")
        elif anchor and list_anchors(target).count(anchor) != 1:
            faults.append(f"{link}: {list_anchors(target).count(anchor)} headings have this anchor")
    return faults


@mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert find_broken_links(path) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](none.md) [b](#there) [c](#nowhere) ![d](none.png) [e](page.md#twice)"
    page.write_text(f"{links}\n# There\n# Twice\n# Twice\n")
    faults = [fault.partition(":")[0] for fault in find_broken_links(page)]
    assert faults == ["none.md", "#nowhere", "none.png", "page.md#twice"]


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    settings = (ROOT / "zensical.toml").read_text()
    named = re.findall(
        r'"([\w/-]+\.md)"', str(tomllib.loads(settings)["project"]["nav"]).replace("'", '"')
    )
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
    assert sorted(named) == sorted(pages)
    assert pages - {"index.md"} <= set(LINK.findall((ROOT / "docs" / "index.md").read_text()))


def test_the_map_of_packages_has_the_levels_that_are_checked() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", design, re.MULTILINE)
    shown = {
        name.removesuffix(".py").rstrip("/"): int(level)
        for level, names in rows
        for name in re.findall(r"`([\w./]+)`", names)
        if (ROOT / "nmt" / name).exists()
    }
    assert {room: shown.get(room) for room in LEVELS} == LEVELS


def test_the_citation_names_this_version_and_all_say_the_same_first() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    citation = parse_yaml((ROOT / "CITATION.cff").read_text(), "CITATION.cff").values
    assert str(citation["version"]) == nmt.__version__
    assert citation["license"] == setup["metadata"]["license"]
    sentence = setup["metadata"]["description"]
    assert citation["abstract"] == sentence
    for name in ("README.md", "docs/index.md", "docs/install.md", "zensical.toml"):
        assert sentence in (ROOT / name).read_text().replace("*", ""), name


class Resources(HTMLParser):
    """Collects what a browser would load with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source") or values.get("rel") == "stylesheet":
            self.places += [place for name in ("src", "href") if (place := values.get(name))]


@needs_package("zensical", "docs")
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    for path in PAGES:
        page = site / path.relative_to(ROOT / "docs").with_suffix(".html")
        resources = Resources()
        resources.feed(page.read_text())
        assert any(place.endswith(".js") for place in resources.places)
        for place in resources.places:
            assert (page.parent / place).is_file(), f"{page.name} loads {place}"

    # strict means strict
    (tmp_path / "docs" / "index.md").write_text("# nmt\n\n[a](data.md#nowhere)\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "anchor does not exist" in done.stdout + done.stderr


@needs_package("zensical", "docs")
@needs_chromium()
def test_pages_opened_as_files_can_be_searched_and_fit_a_narrow_screen(tmp_path: Path) -> None:
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    subprocess.run([sys.executable, "-m", "zensical", "build"], cwd=tmp_path, check=True)
    settings = tmp_path / "build" / "site" / "reference" / "settings.html"
    with open_page(settings.as_uri(), width=400) as opened:
        rows = opened.page.locator(".md-typeset td[data-heading=default]")
        assert rows.first.evaluate("cell => getComputedStyle(cell).display") == "block"
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400
    with open_page(settings.as_uri()) as opened:
        opened.page.locator(".md-search__button").first.click()
        opened.page.get_by_placeholder("Search").first.fill("checkpoint_minutes")
        opened.page.get_by_text(re.compile(r"^\d+ results?$")).wait_for()
        elsewhere = [fault for fault in opened.faults if not fault.startswith("request: file:")]
        assert elsewhere == []
