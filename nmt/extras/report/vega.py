"""Draws charts with Vega-Lite: makes its specifications, and bundles its JavaScript, which comes with
vl-convert.

`charts.json` holds the looks of all charts as templates; here they are filled with values. page.css has
the colours, light and dark. The page compiles specifications with Vega's interpreter of expressions,
not with `new Function`, so that it can forbid `eval` (docs/report.md). Without vl-convert everything
else works: the page has tables instead.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from nmt.extras.report.curves import Chart
from nmt.extras.report.markup import read_page_file
from nmt.system.caches import find_cache_folder
from nmt.system.errors import Failure
from nmt.system.extras import is_installed
from nmt.system.files import has_plain_file, read_bytes, write_bytes

BUNDLE_S = 120  # it takes two seconds
BUNDLE_PROGRAM = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""
Spec = dict[str, Any]
TEMPLATES: Spec = json.loads(read_page_file("charts.json"))
COLOURS = [f"var(--c{i})" for i in range(8)]  # of page.css


# ---- the JavaScript ------------------------------------------------------------------------------


def read_chart_script() -> str | None:
    """Return the JavaScript that draws charts; None without vl-convert.

    It is the same for each version of vl-convert, and bundling it takes two seconds, so it is kept
    in the user's folder of caches.
    """
    if not is_installed("vl_convert"):
        return None
    folder = find_cache_folder()
    if folder is None:
        return _bundle_script()
    path = folder / f"vega-{version('vl-convert-python')}.js"
    if has_plain_file(path):
        return read_bytes(path).decode()
    script = _bundle_script()
    write_bytes(path, script.encode())
    return script


def _bundle_script() -> str:
    """Bundle it in a separate process: a JavaScript engine may crash, for example if memory is
    limited, and training must survive that.
    """
    done = subprocess.run(
        [sys.executable, "-c", BUNDLE_PROGRAM], capture_output=True, timeout=BUNDLE_S, check=False
    )
    if done.returncode:
        raise Failure(
            f"vl-convert cannot bundle the JavaScript of charts (exit code {done.returncode}); "
            "reinstall vl-convert-python, or remove it for a report with tables"
        )
    # What would end the element that holds it occurs only in strings and patterns.
    return done.stdout.decode().replace("</script", r"<\/script").replace("<!--", r"<\!--")


# ---- specifications ------------------------------------------------------------------------------


def fill(template: Any, values: Spec) -> Any:
    """Return a template of charts.json with each "$key" in it replaced by values["key"]."""
    if isinstance(template, dict):
        return {key: fill(inner, values) for key, inner in template.items()}
    if isinstance(template, list):
        return [fill(inner, values) for inner in template]
    if isinstance(template, str) and template.startswith("$"):
        return values[template[1:]]
    return template


def make_spec(chart: Chart, n_runs: int) -> Spec:
    """Return the specification of a chart without its data; colours are the page's.

    One run: a colour for each series. Several: a colour for each run, dashes for its series.
    """
    titles = {"y": chart.y}
    colour = _scale_series(chart, COLOURS)
    if n_runs > 1:
        colour = _scale("r", list(range(n_runs)), COLOURS)
    curves = fill(TEMPLATES["curves"], titles | {"from_zero": chart.from_zero, "colour": colour})
    if n_runs > 1:
        curves["encoding"]["strokeDash"] = _scale_series(chart, TEMPLATES["dashes"])

    layers = [curves]
    for i, reference in enumerate(chart.references):
        value = round_figure(reference.value)
        values = titles | {"name": reference.name, "value": value, "shift": -3 - 14 * i}
        layers += [fill(TEMPLATES[name], values) for name in ("reference_rule", "reference_name")]
    return {**TEMPLATES["page"], "layer": layers}


def round_figure(value: float) -> float:
    """Round to six digits: more cannot be seen, and would be most of the page."""
    return float(f"{value:.6g}")


def _scale_series(chart: Chart, values: Sequence[Any]) -> Spec:
    """Give each series a colour or dashes, and a legend if there are several."""
    names = list(dict.fromkeys(curve.name for curve in chart.series))
    scale = _scale("s", names, values)
    return scale | {"legend": TEMPLATES["legend"]} if len(names) > 1 else scale


def _scale(field: str, domain: list[Any], values: Sequence[Any]) -> Spec:
    """Give each value of a field one of the colours or dashes, which repeat if they are too few."""
    chosen = [values[i % len(values)] for i in range(len(domain))]
    scale = {"domain": domain, "range": chosen}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}
