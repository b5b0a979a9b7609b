"""The JavaScript of charts is bundled once, and without it there are tables."""

import subprocess
from pathlib import Path

from pytest import MonkeyPatch, fixture
from support.capture import Capture, read_stderr

from nmt.extras.report import vega
from nmt.extras.report.facts import RunFacts
from nmt.extras.report.page import write_page
from nmt.extras.report.vega import read_chart_script


@fixture(name="cache")
def make_empty_cache(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """An empty cache beside a pretended vl-convert 1.2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vega, "is_installed", lambda _: True)
    monkeypatch.setattr(vega, "version", lambda _: "1.2")
    return tmp_path / "nmt"


def test_the_script_is_kept_in_the_users_cache(cache: Path, monkeypatch: MonkeyPatch) -> None:
    bundled = []

    def bundle(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        bundled.append(args)
        return subprocess.CompletedProcess([], 0, b"draw('</script><!--');")

    monkeypatch.setattr(vega.subprocess, "run", bundle)
    first, second = read_chart_script(), read_chart_script()
    assert first == second == r"draw('<\/script><\!--');"
    assert len(bundled) == 1
    assert [path.name for path in cache.iterdir()] == ["vega-1.2.js"]


def test_a_bundle_that_fails_leaves_tables(
    cache: Path,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
) -> None:
    """An engine of JavaScript that dies, hangs or finds a strange file takes nothing with it."""
    page = tmp_path / "page.html"
    monkeypatch.setattr(vega, "BUNDLE_S", 1)
    for program in ("import os; os.abort()", "import time; time.sleep(9)"):
        monkeypatch.setattr(vega, "BUNDLE_PROGRAM", program)
        write_page([RunFacts("one", {})], page)
        assert "has tables instead of charts" in read_stderr(capsys)
    (cache / "vega-1.2.js").symlink_to("/dev/zero")
    write_page([RunFacts("one", {})], page)
    assert "has tables instead of charts" in read_stderr(capsys)
    assert "<h1>one</h1>" in page.read_text()
