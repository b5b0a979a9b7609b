"""The JavaScript of charts is bundled once, and charts become an image without a browser."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.needs import needs_package

from nmt.report import vega
from nmt.report.curves import Chart, ReferenceLine, Series
from nmt.report.facts import RunFacts
from nmt.report.page import write_page
from nmt.report.vega import read_chart_script, render_png
from nmt.system.errors import UserError

CURVES = (Series(0, "training", [(1, 3.0), (2, 2.0)]), Series(1, "training", [(1, 2.5), (3, 1.0)]))
CHART = Chart("Loss", "nats", "updates", CURVES, (ReferenceLine("the paper's", 1.5),))


@pytest.fixture(name="cache")
def make_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache beside a pretended vl-convert 1.2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vega, "is_installed", lambda _: True)
    monkeypatch.setattr(vega, "version", lambda _: "1.2")
    return tmp_path / "nmt"


def test_the_script_is_kept_in_the_users_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = []

    def bundle(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        bundled.append(args)
        return subprocess.CompletedProcess([], 0, b"draw('</script><!--');")

    monkeypatch.setattr(vega.subprocess, "run", bundle)
    first, second = read_chart_script(), read_chart_script()
    assert first == second == r"draw('<\/script><\!--');"
    assert len(bundled) == 1
    assert [path.name for path in cache.iterdir()] == ["vega-1.2.js"]


@needs_package("vl_convert", "report")
def test_curves_of_two_runs_become_one_image() -> None:
    image = render_png([CHART], ["base", 'it\'s \\ "big" <b>'])
    assert image.startswith(b"\x89PNG") and len(image) > 5_000
    banded = replace(CHART, bands=(((1, 2.0, 4.0), (2, 1.5, 3.0), (3, 1.0, 2.0)),))
    names = ["base", "it"]
    assert render_png([banded], names) != render_png([CHART], names)


def test_without_vl_convert_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vega.sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"nmtkit\[report\]"):
        render_png([CHART], ["one"])
    assert read_chart_script() is None


def test_a_bundle_that_fails_leaves_tables(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine of JavaScript that dies, hangs or finds a strange file takes nothing with it."""
    page = tmp_path / "page.html"
    monkeypatch.setattr(vega, "BUNDLE_S", 1)
    for program in ("import os; os.abort()", "import time; time.sleep(9)"):
        monkeypatch.setattr(vega, "BUNDLE_PROGRAM", program)
        write_page([RunFacts("one", "one", {})], page)
        assert "has tables instead of charts" in capsys.readouterr().err
    (cache / "vega-1.2.js").symlink_to("/dev/zero")
    write_page([RunFacts("one", "one", {})], page)
    assert "has tables instead of charts" in capsys.readouterr().err
    assert "<h1>one</h1>" in page.read_text()
