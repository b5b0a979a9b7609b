"""Draws charts with Vega-Lite, which vl-convert brings along: as specifications for the page, whose
JavaScript it bundles, and as a PNG, without a browser.

The specifications are plain dictionaries, so no other package is needed. The page compiles them with
Vega's interpreter of expressions, not with `new Function`, so that it can forbid `eval`
(docs/report.md). Without vl-convert everything else works: the page has tables instead.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from nmt.report.curves import Chart, ReferenceBand
from nmt.system.caches import find_cache_folder
from nmt.system.errors import Failure, UserError
from nmt.system.files import has_plain_file, read_bytes, write_bytes

HOW_TO_INSTALL = "pip install 'nmt[report]'"
# Colours of Okabe and Ito, which colour-blind readers can tell apart; report.css has those for dark.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#6b6a66",
)
DASHES = ([1, 0], [5, 3], [1, 2], [8, 3, 2, 3])
BUNDLE_S = 120  # it takes two seconds
BUNDLE_PROGRAM = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""
Spec = dict[str, Any]


# ---- the JavaScript ------------------------------------------------------------------------------


def read_chart_script() -> str | None:
    """Return the JavaScript that draws charts; None without vl-convert.

    It is the same for each version of vl-convert, and bundling it takes two seconds, so it is kept
    in the user's folder of caches.
    """
    if importlib.util.find_spec("vl_convert") is None:
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
    """Bundle it in a process of its own: an engine of JavaScript may end its process, for example
    where memory is limited, and a training must not end with it.
    """
    done = subprocess.run(
        [sys.executable, "-c", BUNDLE_PROGRAM], capture_output=True, timeout=BUNDLE_S, check=False
    )
    if done.returncode:
        raise Failure(
            f"vl-convert cannot bundle the JavaScript of charts (exit code {done.returncode}); "
            "reinstall vl-convert-python, or remove it for a report with tables"
        )
    # What would end the element that holds it stands only in strings and patterns.
    return done.stdout.decode().replace("</script", r"<\/script").replace("<!--", r"<\!--")


# ---- specifications ------------------------------------------------------------------------------


def make_spec(chart: Chart, n_runs: int) -> Spec:
    """Return the specification of a chart without its data, for the page; colours are its style's."""
    colours = [f"var(--c{i})" for i in range(len(COLOURS))]
    if chart.buckets:
        spec = _make_bars(chart, n_runs, colours)
    else:
        spec = _make_lines(chart, n_runs, colours)
        _add_zoom(spec)
    style = {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "rule": {"color": "var(--soft)"},
        "text": {"color": "var(--soft)", "fontSize": 12},
        "axis": {
            "labelColor": "var(--soft)",
            "titleColor": "var(--soft)",
            "gridColor": "var(--line)",
            "domainColor": "var(--line)",
            "tickColor": "var(--line)",
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": "var(--ink)", "labelFontSize": 13, "titleColor": "var(--soft)"},
    }
    size = {
        "width": "container",
        "height": 240,
        "autosize": {"type": "fit-x", "contains": "padding"},
    }
    return {**size, **spec, "data": {"name": "points"}, "config": style}


def render_png(charts: Sequence[Chart], names: Sequence[str]) -> bytes:
    """Draw charts side by side in one image, on white."""
    try:
        import vl_convert
    except ImportError:
        raise UserError(f"--png: needs vl-convert; {HOW_TO_INSTALL}") from None

    panels = []
    for chart in charts:
        spec = _make_lines(chart, len(names), list(COLOURS), names)
        spec |= {
            "title": {"text": chart.title, "anchor": "start", "frame": "group"},
            "width": 420,
            "height": 240,
        }
        panels.append(spec | {"data": {"values": list_rows(chart)}})
    spec = {
        "concat": panels,
        "columns": 2,
        "spacing": 30,
        "padding": 16,
        "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}},
        "config": {"background": "white", "view": {"stroke": None}, "font": "sans-serif"},
    }
    return bytes(vl_convert.vegalite_to_png(spec, scale=2))


def list_rows(chart: Chart) -> list[dict[str, Any]]:
    """Return the points of a chart as rows: x, y, the name of the series, the number of the run."""
    return [
        {"x": x, "y": round_figure(y), "s": series.name, "r": series.run}
        for series in chart.series
        for x, y in series.points
    ]


def round_figure(value: float) -> float:
    """Round to six digits: more cannot be seen, and would be most of the page."""
    return float(f"{value:.6g}")


def _make_lines(chart: Chart, n_runs: int, colours: list[str], names: Sequence[str] = ()) -> Spec:
    """One run: a colour for each series. Several: a colour for each run, dashes for its series.

    Names of runs make a legend in the image; the page has its own, because there may be 50.
    """
    series = list(dict.fromkeys(one.name for one in chart.series))
    encoding: Spec = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": chart.x,
            "axis": {"grid": False, "format": ",~r", "labelOverlap": True, "tickCount": 6},
            "scale": {"nice": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": chart.y,
            "axis": {"tickCount": 5},
            "scale": {"zero": chart.from_zero},
        },
    }
    colour_of_series = {
        "field": "s",
        "type": "nominal",
        "scale": {"domain": series, "range": _repeat(colours, len(series))},
        "legend": {"orient": "top", "title": None, "columns": 3} if len(series) > 1 else None,
    }
    if n_runs == 1:
        encoding["color"] = colour_of_series
    else:
        encoding["color"] = {
            "field": "r",
            "type": "nominal",
            "scale": {"domain": list(range(n_runs)), "range": _repeat(colours, n_runs)},
            "legend": None,
        }
        encoding["strokeDash"] = colour_of_series | {
            "scale": {"domain": series, "range": _repeat(list(DASHES), len(series))}
        }
        if names:
            labels = " : ".join(
                f"datum.value == {i} ? {_quote(name)}" for i, name in enumerate(names)
            )
            encoding["color"]["legend"] = {
                "orient": "top",
                "title": None,
                "columns": 3,
                "labelExpr": f"{labels} : ''",
            }
    mark = {"type": "line", "clip": True, "strokeWidth": 1.8, "strokeJoin": "round"}
    encoding["detail"] = {"field": "r"}
    layers: list[Spec] = [{"mark": mark, "encoding": encoding}]
    for i, reference in enumerate(chart.references):
        data = {"values": [{"name": reference.name}]}
        y = {"datum": round_figure(reference.value), "title": chart.y}
        layers += [
            {"data": data, "mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": {"y": y}},
            {
                "data": data,
                "mark": {"type": "text", "align": "right", "baseline": "bottom", "dy": -3 - 14 * i},
                "encoding": {"x": {"value": "width"}, "y": y, "text": {"field": "name"}},
            },
        ]
    layers += [_make_band(chart, band) for band in chart.bands]
    return {"layer": layers}


def _make_band(chart: Chart, band: ReferenceBand) -> Spec:
    """An area so pale that curves are seen through it."""
    rows = [
        {"x": x, "low": round_figure(low), "high": round_figure(high)}
        for x, low, high in band.points
    ]
    return {
        "data": {"values": rows},
        "mark": {"type": "area", "clip": True, "opacity": 0.18, "color": "gray"},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": chart.x},
            "y": {"field": "low", "type": "quantitative", "title": chart.y},
            "y2": {"field": "high"},
        },
    }


def _add_zoom(spec: Spec) -> None:
    """Let page.js choose the updates that are shown and hide runs; the axes fit what is left.

    It sets `from` and `to` to what the mouse has marked, for all charts of the page alike.
    """
    curves = spec["layer"][0]
    spec["params"] = [{"name": name, "value": 0} for name in ("from", "to")]
    spec["params"].append({"name": "hidden", "value": []})
    shown = "datum.x >= from && datum.x <= to && indexof(hidden, datum.r) < 0"
    curves["transform"] = [{"filter": shown}]
    curves["encoding"]["x"]["scale"] |= {"domainMin": {"expr": "from"}, "domainMax": {"expr": "to"}}
    marking = {"type": "interval", "encodings": ["x"], "clear": "pointerup"}
    curves["params"] = [{"name": "marked", "select": marking}]


def _make_bars(chart: Chart, n_runs: int, colours: list[str]) -> Spec:
    field = "s" if n_runs == 1 else "r"
    series = list(dict.fromkeys(one.name for one in chart.series))
    domain: list[Any] = series if n_runs == 1 else list(range(n_runs))
    colour = {
        "field": field,
        "type": "nominal",
        "scale": {"domain": domain, "range": _repeat(colours, len(domain))},
        "legend": {"orient": "top", "title": None} if n_runs == 1 and len(series) > 1 else None,
    }
    return {
        "mark": {"type": "bar", "cornerRadiusEnd": 2},
        "encoding": {
            "x": {
                "field": "b",
                "type": "nominal",
                "title": chart.x,
                "sort": list(chart.buckets),
                "axis": {"labelAngle": 0, "labelOverlap": True},
            },
            "xOffset": {"field": field, "type": "nominal", "sort": domain},
            "y": {"field": "y", "type": "quantitative", "title": chart.y, "axis": {"tickCount": 5}},
            "color": colour,
        },
    }


def _repeat(values: Sequence[Any], n: int) -> list[Any]:
    return [values[i % len(values)] for i in range(n)]


def _quote(text: str) -> str:
    """Write text as a string of a Vega expression."""
    return (
        "'"
        + "".join(c if c.isalnum() or c in " -_.,+" else "\N{REPLACEMENT CHARACTER}" for c in text)
        + "'"
    )
