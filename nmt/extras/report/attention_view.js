// Draws maps of attention (AttentionMap.to_json) as heat maps, each when a reader opens its line, or with
// nmtAttention.show(element, map).
//
// Columns are what is attended to, rows are what attends. Pieces are text that anybody may have
// written: they reach the page through textContent alone, and each is isolated, so that its direction
// of writing stays its own. No library, no network, and no style attribute, which a strict
// Content-Security-Policy refuses.
"use strict";

globalThis.nmtAttention = (() => {
  const KIND_NAMES = {
    memory: "translation → source",
    encoder: "encoder, source → source",
    decoder: "decoder, translation → translation",
  };
  const MEAN = "mean";
  const HEAT = [44, 122, 232]; // the colour of the highest weight; it suits light and dark pages
  const HINT = "Point at a cell, or focus the map and use the arrow keys.";
  const MOVES = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    Home: [0, -Infinity],
    End: [0, Infinity],
    PageUp: [-Infinity, 0],
    PageDown: [Infinity, 0],
  };
  // Control characters and marks that reverse the direction of writing.
  const OBEYED = /[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;

  function writeOut(piece) {
    const name = (c) => `<U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
    return String(piece).replace(OBEYED, name);
  }

  function append(parent, tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  // ---- the numbers ----------------------------------------------------------------------------

  function decodeWeights(base64, size) {
    const weights = Float32Array.from(atob(base64), (c) => c.charCodeAt(0) / 255);
    if (weights.length !== size) throw new Error("a head has the wrong number of weights");
    return weights;
  }

  // The kinds of attention that a map has: {name, rows, columns, layers}, layers of heads of weights.
  function readKinds(map) {
    const source = map.source.map(writeOut);
    const target = map.target.map(writeOut);
    const read = ["<s>", ...target.slice(0, -1)]; // by the decoder, when it predicts each piece
    const sides = { memory: [target, source], encoder: [source, source], decoder: [target, read] };
    const kinds = [];
    for (const [name, [rows, columns]] of Object.entries(sides)) {
      const layers = map.attention[name];
      if (!layers?.[0]?.length || !rows.length || !columns.length) continue;
      const decode = (head) => decodeWeights(head, rows.length * columns.length);
      kinds.push({ name, rows, columns, layers: layers.map((heads) => heads.map(decode)) });
    }
    return kinds;
  }

  function average(heads) {
    return heads[0].map((_, i) => heads.reduce((sum, head) => sum + head[i], 0) / heads.length);
  }

  function selectWeights(kind, layer, head) {
    const layers = layer === MEAN ? kind.layers : [kind.layers[layer]];
    return average(layers.flatMap((heads) => (head === MEAN ? heads : [heads[head]])));
  }

  // The layer that alignments are made from, as in nmt/extras/maps/alignment.py.
  function findAlignmentLayer(kind) {
    return Math.max(0, kind.layers.length - 2);
  }

  const formatWeight = (weight) => `${(100 * weight).toFixed(1)} %`;

  // ---- the view -------------------------------------------------------------------------------

  function appendSelect(parent, label, onChange) {
    const line = append(parent, "label", "", label);
    const select = append(line, "select");
    select.addEventListener("change", onChange);
    return select;
  }

  // A choice between one thing is none, and is hidden.
  function fillSelect(select, options, chosen) {
    select.replaceChildren();
    for (const [value, text] of options) append(select, "option", "", text).value = value;
    select.value = chosen;
    select.parentElement.hidden = options.length < 2;
  }

  function appendPieces(parent, pieces) {
    return pieces.map((piece) => {
      const place = append(parent, "span");
      append(place, "bdi", "", piece);
      return place;
    });
  }

  function show(element, map) {
    element.replaceChildren();
    const view = append(element, "div", "attention-view");
    view.dir = "ltr";
    view.style.setProperty("--heat", `rgb(${HEAT.join(" ")})`);
    let kinds = [];
    try {
      kinds = readKinds(map);
    } catch (error) {
      append(view, "p", "attention-readout", `This attention cannot be shown: ${error.message}.`);
      return;
    }
    if (!kinds.length) {
      append(view, "p", "attention-readout", "There is no attention to show.");
      return;
    }

    // what is on the page
    const controls = append(view, "div", "attention-controls");
    const kindSelect = appendSelect(controls, "Attention", chooseKind);
    const layerSelect = appendSelect(controls, "Layer", draw);
    const headSelect = appendSelect(controls, "Head", draw);
    const hardLabel = append(controls, "label", "", "Hard alignment");
    const hardBox = append(hardLabel, "input");
    hardBox.type = "checkbox";
    hardBox.addEventListener("change", draw);
    const readout = append(view, "p", "attention-readout");
    readout.setAttribute("aria-live", "polite");
    const box = append(view, "div", "attention-box");
    const grid = append(box, "div", "attention-map");
    grid.tabIndex = 0;
    grid.setAttribute("role", "group");
    grid.setAttribute("aria-roledescription", "heat map");
    append(grid, "div", "attention-corner");
    const columnLabels = append(grid, "div", "attention-columns");
    const rowLabels = append(grid, "div", "attention-rows");
    const plot = append(grid, "div", "attention-plot");
    const legend = append(view, "p", "attention-legend");
    const details = append(view, "details", "attention-table");
    append(details, "summary", "", "As a table");
    details.addEventListener("toggle", drawTable);

    // what is chosen
    let kind, weights, labels, cursor;
    let focused = null; // the cell of the keyboard, [row, column]

    fillSelect(kindSelect, kinds.map(({ name }) => [name, KIND_NAMES[name]]), kinds[0].name);
    chooseKind();

    function chooseKind() {
      kind = kinds.find(({ name }) => name === kindSelect.value);
      const aligned = kind.name === "memory" ? findAlignmentLayer(kind) : -1;
      const layers = kind.layers.map((_, i) => [i, i === aligned ? `${i + 1} (alignment)` : i + 1]);
      const heads = kind.layers[0].map((_, i) => [i, i + 1]);
      if (layers.length > 1) layers.push([MEAN, "mean of all"]);
      if (heads.length > 1) heads.unshift([MEAN, "mean of all"]);
      fillSelect(layerSelect, layers, Math.max(0, aligned));
      fillSelect(headSelect, heads, heads[0][0]);
      hardLabel.hidden = kind.name !== "memory";
      focused = null;
      draw();
    }

    function draw() {
      weights = selectWeights(kind, layerSelect.value, headSelect.value);
      const { rows, columns } = kind;
      view.style.setProperty("--rows", rows.length);
      view.style.setProperty("--columns", columns.length);
      const size = `${rows.length} rows, ${columns.length} columns`;
      grid.setAttribute("aria-label", `${KIND_NAMES[kind.name]}, ${size}. A table follows.`);
      columnLabels.replaceChildren();
      rowLabels.replaceChildren();
      plot.replaceChildren();
      labels = [appendPieces(rowLabels, rows), appendPieces(columnLabels, columns)];
      const highest = drawCells(append(plot, "canvas"));
      if (hardBox.checked && kind.name === "memory") drawLinks();
      cursor = append(plot, "div", "attention-cursor");
      legend.textContent = "0";
      append(legend, "span", "attention-scale");
      legend.append(formatWeight(highest));
      point(focused);
      drawTable();
    }

    // One pixel a cell: the style sheet makes it larger. Returns the highest weight.
    function drawCells(canvas) {
      canvas.width = kind.columns.length;
      canvas.height = kind.rows.length;
      const context = canvas.getContext("2d");
      const image = context.createImageData(canvas.width, canvas.height);
      const highest = weights.reduce((a, b) => Math.max(a, b), 0);
      weights.forEach((weight, i) => {
        image.data.set([...HEAT, highest ? (255 * weight) / highest : 0], 4 * i);
      });
      context.putImageData(image, 0, 0);
      return highest;
    }

    function drawLinks() {
      map.alignment.forEach((column, row) => place(append(plot, "div", "attention-link"), row, column));
    }

    function place(mark, row, column) {
      mark.style.setProperty("--row", row);
      mark.style.setProperty("--column", column);
    }

    // Say what a cell is, or nothing if it is null.
    function point(cell) {
      labels.flat().forEach((label) => label.classList.remove("attention-chosen"));
      cursor.hidden = cell === null;
      if (cell === null) {
        readout.textContent = HINT;
        return;
      }
      const [row, column] = cell;
      place(cursor, row, column);
      labels[0][row].classList.add("attention-chosen");
      labels[1][column].classList.add("attention-chosen");
      readout.replaceChildren();
      append(readout, "bdi", "", kind.rows[row]);
      readout.append(" → ");
      append(readout, "bdi", "", kind.columns[column]);
      append(readout, "b", "", formatWeight(weights[row * kind.columns.length + column]));
    }

    function drawTable() {
      details.querySelector("div")?.remove();
      if (!details.open) return;
      const table = append(append(details, "div", "attention-box"), "table");
      append(table, "caption", "", `${KIND_NAMES[kind.name]}, in per cent`);
      const head = append(append(table, "thead"), "tr");
      append(head, "td");
      kind.columns.forEach((piece) => appendHeader(head, "col", piece));
      const body = append(table, "tbody");
      kind.rows.forEach((piece, row) => {
        const line = append(body, "tr");
        appendHeader(line, "row", piece);
        kind.columns.forEach((_, column) => {
          const weight = weights[row * kind.columns.length + column];
          append(line, "td", "", (100 * weight).toFixed(1));
        });
      });
    }

    function appendHeader(line, scope, piece) {
      const header = append(line, "th");
      header.scope = scope;
      append(header, "bdi", "", piece);
    }

    // pointer and keyboard
    function findCell(event) {
      const area = plot.getBoundingClientRect();
      const row = Math.floor(((event.clientY - area.top) / area.height) * kind.rows.length);
      const column = Math.floor(((event.clientX - area.left) / area.width) * kind.columns.length);
      const isInside = kind.rows[row] !== undefined && kind.columns[column] !== undefined;
      return isInside ? [row, column] : focused;
    }
    plot.addEventListener("pointermove", (event) => point(findCell(event)));
    plot.addEventListener("pointerdown", (event) => point((focused = findCell(event))));
    plot.addEventListener("pointerleave", () => point(focused));
    grid.addEventListener("keydown", (event) => {
      const move = MOVES[event.key];
      if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const limit = (value, count) => Math.min(Math.max(value, 0), count - 1);
      const [row, column] = focused ?? [-move[0], -move[1]].map((n) => (Number.isFinite(n) ? n : 0));
      focused = [limit(row + move[0], kind.rows.length), limit(column + move[1], kind.columns.length)];
      point(focused);
      cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }

  for (const line of document.querySelectorAll("details.attention")) {
    const view = line.querySelector("div");
    const draw = () => {
      if (!line.open || view.hasChildNodes()) return;
      show(view, JSON.parse(line.querySelector("script").textContent));
    };
    line.addEventListener("toggle", draw);
    draw();
  }

  return { show };
})();
