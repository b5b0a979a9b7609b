// Draws the charts of a report with Vega, each when it first comes into view, and lets a reader look
// closer: marking a stretch of updates zooms all charts to it, a point under the mouse or chosen with
// the arrow keys is read out, runs can be hidden. All text is set as text, never as markup.
"use strict";
(() => {
  const { charts, runs } = JSON.parse(document.getElementById("report-charts").textContent);
  const options = { mode: "vega-lite", ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip: false };
  const ends = charts.flatMap((chart) => chart.series.flatMap((one) => [one.x[0], one.x.at(-1)]));
  const everything = { from: Math.min(...ends), to: Math.max(...ends) };
  const range = { ...everything };
  const hidden = new Set();
  const views = new Map(); // from the number of a chart to its view

  const listRows = (chart) => chart.series.flatMap(({ r, s, x, y }) =>
    x.map((at, i) => ({ x: at, y: y[i], r, s })));

  async function draw(figure) {
    const number = Number(figure.dataset.chart);
    const chart = charts[number];
    const values = { ...range, hidden: [...hidden] };
    const params = chart.spec.params.map((param) => ({ ...param, value: values[param.name] }));
    const spec = { ...chart.spec, params, data: { values: listRows(chart) } };
    const plot = figure.querySelector(".plot");
    const { view } = await vegaEmbed(plot, spec, options);
    views.set(number, view);
    followMarking(plot, view);
    followPointer(figure, plot, chart, view);
  }

  // ---- zoom ----

  function followMarking(plot, view) {
    let marked = null;
    view.addSignalListener("marked", (_, value) => { marked = value.x || marked; });
    plot.addEventListener("pointerdown", () => { marked = null; });
    plot.addEventListener("pointerup", () => {
      if (marked && marked[1] - marked[0] > (range.to - range.from) / 100) {
        show(marked[0], marked[1]);
      }
    });
    plot.addEventListener("dblclick", () => show(everything.from, everything.to));
  }

  const fields = ["from", "to"].map((name) => document.getElementById(`updates-${name}`));

  function show(from, to) {
    if (!(from < to)) {
      return;
    }
    Object.assign(range, { from: Math.max(Math.floor(from), everything.from), to: Math.min(Math.ceil(to), everything.to) });
    fields[0].value = range.from;
    fields[1].value = range.to;
    refresh();
  }

  function refresh() {
    for (const view of views.values()) {
      view.signal("from", range.from).signal("to", range.to).signal("hidden", [...hidden]).runAsync();
    }
  }

  document.getElementById("chart-controls").hidden = false;
  show(everything.from, everything.to);
  for (const field of fields) {
    field.addEventListener("change", () => show(Number(fields[0].value), Number(fields[1].value)));
  }
  document.getElementById("updates-all").addEventListener("click", () => show(everything.from, everything.to));
  for (const box of document.querySelectorAll("input[data-run]")) {
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
      refresh();
    });
  }

  // ---- what is under the mouse, or chosen with the arrow keys ----

  function followPointer(figure, plot, chart, view) {
    const rule = document.createElement("div");
    rule.className = "figure-rule";
    const readout = document.createElement("div");
    readout.className = "readout";
    readout.setAttribute("role", "status");
    rule.hidden = readout.hidden = true;
    figure.append(rule, readout);
    let chosen = null; // an update

    function hide() {
      rule.hidden = readout.hidden = true;
    }

    function readOut(at, height) {
      const found = findNearest(chart, at, height);
      if (!found.length) {
        return hide();
      }
      chosen = found[0].x;
      const head = document.createElement("p");
      head.textContent = `update ${found[0].x.toLocaleString("en")}`;
      readout.replaceChildren(head, ...found.slice(0, 8).map(describe));
      rule.hidden = readout.hidden = false;
      const left = plot.offsetLeft + view.padding().left + view.origin()[0] + view.scale("x")(chosen);
      const top = plot.offsetTop + view.padding().top + view.origin()[1];
      Object.assign(rule.style, { left: `${left}px`, top: `${top}px`, height: `${view.height()}px` });
      const room = figure.clientWidth - readout.offsetWidth;
      const beside = left + 12 > room ? left - 12 - readout.offsetWidth : left + 12;
      Object.assign(readout.style, { left: `${Math.max(0, Math.min(beside, room))}px`, top: `${top + 6}px` });
    }

    function describe({ x, y, r, s }) {
      const line = document.createElement("p");
      const key = document.createElement("span");
      const names = [...new Set(chart.series.map((one) => one.s))];
      const colour = runs.length > 1 ? r : names.indexOf(s);
      key.className = `key c${colour % 8}`;
      const parts = [runs.length > 1 ? runs[r] : null, names.length > 1 ? s : null];
      const name = parts.filter(Boolean).join(", ");
      const elsewhere = x === chosen ? "" : ` at ${x.toLocaleString("en")}`;
      line.append(key, `${name ? `${name}: ` : ""}${Number(y.toPrecision(5))}${elsewhere}`);
      return line;
    }

    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const across = event.clientX - box.left - view.padding().left - view.origin()[0];
      const down = event.clientY - box.top - view.padding().top - view.origin()[1];
      if (across < 0 || across > view.width()) {
        return hide();
      }
      readOut(view.scale("x").invert(across), view.scale("y").invert(down));
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") {
        hide();
      } else if (step) {
        const points = [...new Set(chart.series.flatMap((one) => one.x))].sort((a, b) => a - b)
          .filter((x) => x >= range.from && x <= range.to);
        const now = chosen === null ? (step > 0 ? -1 : points.length) : points.indexOf(chosen);
        const next = points[Math.max(0, Math.min(points.length - 1, now + step))];
        readOut(next, null);
        event.preventDefault();
      }
    });
  }

  // The point of each curve that is nearest to this update: the closest curves first.
  function findNearest(chart, at, height) {
    const found = [];
    for (const { r, s, x, y } of chart.series) {
      if (hidden.has(r)) {
        continue;
      }
      let low = 0;
      let high = x.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (x[middle] < at) low = middle + 1; else high = middle;
      }
      const i = low > 0 && at - x[low - 1] < x[low] - at ? low - 1 : low;
      const spacing = (x.at(-1) - x[0]) / Math.max(1, x.length - 1);
      const isNear = Math.abs(x[i] - at) <= Math.max(spacing, (range.to - range.from) / 50);
      if (isNear && x[i] >= range.from && x[i] <= range.to) {
        found.push({ x: x[i], y: y[i], r, s });
      }
    }
    const across = (point) => Math.abs(point.x - at);
    const down = (point) => height === null ? 0 : Math.abs(point.y - height);
    const nearest = Math.min(...found.map(across));
    const isFirst = (point) => across(point) === nearest;
    return found.sort((a, b) => isFirst(b) - isFirst(a) || down(a) - down(b));
  }

  // ---- when ----

  const figures = document.querySelectorAll("figure[data-chart]");
  let drawing = Promise.resolve(); // one after the other, so that the first is there soon
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) {
        watcher.unobserve(target);
        drawing = drawing.then(() => draw(target));
      }
    }
  }, { rootMargin: "200px" });
  figures.forEach((figure) => watcher.observe(figure));
  window.addEventListener("beforeprint", () => {
    watcher.disconnect();
    figures.forEach((figure) => figure.querySelector("svg") || draw(figure));
  });
})();
