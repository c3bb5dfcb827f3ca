"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;  // never HTML: names come from somebody's model
    if (className) element.className = className;
    return element;
  };
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (name) => escaped(name.length <= 34 ? name : `${name.slice(0, 16)}\u2026${name.slice(-17)}`);
  const drawn = new Set();

  // --- light and dark

  const root = document.documentElement;
  const isDark = () => root.dataset.theme === "dark";
  const colours = () => {
    const style = getComputedStyle(root);
    const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
    return { text, line };
  };
  const paint = (layout) => {
    const { text, line } = colours();
    const painted = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true };
    delete painted.width;
    painted.font = { ...(layout.font || {}), color: text };
    painted.title = undefined;  // the page has headings
    painted.modebar = { bgcolor: "rgba(0,0,0,0)", color: text, activecolor: text };
    painted.margin = { ...(layout.margin || {}), t: layout.xaxis?.side === "top" ? 56 : 30 };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      painted[key] = { ...layout[key], gridcolor: line, zerolinecolor: line, linecolor: line };
    }
    for (const key of ["xaxis", "yaxis"]) if (!painted[key]) painted[key] = { gridcolor: line, zerolinecolor: line };
    return painted;
  };
  const SETTINGS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const figures = {};
  const show = (id, traces, layout) => {
    figures[id] = { traces, layout };
    drawn.add(id);
    return Plotly.react(id, traces, paint(layout), SETTINGS);
  };
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    $("theme").textContent = theme === "dark" ? "light" : "dark";
    for (const id of drawn) Plotly.react(id, figures[id].traces, paint(figures[id].layout), SETTINGS);
  };

  // --- findings

  const when = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
  const finding = (told) => {
    const item = make("li", undefined, `finding ${told.severity}`);
    const head = make("h3");
    if (told.run) head.append(make("span", told.run, "run"), " ");
    head.append(make("span", told.severity, "level"), " ", told.rule);
    if (told.where) head.append(" in ", make("code", told.where));
    head.append(", ", when(told.first, told.last));
    item.append(head, make("p", told.cause), make("p", `\u2192 ${told.advice}`));
    if (told.evidence.length) item.append(make("p", told.evidence.map(([name, value]) => `${name} ${value}`).join(", "), "numbers"));
    if (told.signs.length) {
      const signs = told.signs.map((sign) => (sign.where ? `${sign.rule} in ${sign.where}` : sign.rule));
      item.append(make("p", `May come of it: ${signs.join(", ")}.`, "numbers"));
    }
    return item;
  };
  const tell = () => {
    const counts = ["error", "warning", "info"].map((level) => [
      data.findings.flatMap((told) => [told, ...told.signs]).filter((told) => told.severity === level).length,
      level,
    ]);
    const words = counts.filter(([count]) => count).map(([count, level]) => `${count} ${level}${count > 1 && level !== "info" ? "s" : ""}`);
    $("count").textContent = words.length ? `(${words.join(", ")})` : "";
    if (!data.findings.length) $("findings").append(make("li", "Nothing was found.", "healthy"));
    $("findings").append(...data.findings.map(finding));
    for (const [id, lines] of [["unseen", data.unseen], ["events", data.events]]) {
      $(id).hidden = !lines.length;
      $(id).querySelector("ul").append(...lines.map((line) => make("li", line)));
    }
    if (data.events.length) $("events").querySelector("summary").textContent = data.against ? "Spikes of both" : `Spikes: ${data.marks.length}`;
  };

  // --- the layers over the steps

  const { none: NONE, loud: LOUD, zero: ZERO, log: LOG, linear: LINEAR } = data.codes;
  const unpack = (text) => {
    const raw = atob(text);
    const codes = new Int16Array(raw.length / 2);
    for (let place = 0; place < codes.length; place += 1) {
      codes[place] = raw.charCodeAt(2 * place) | (raw.charCodeAt(2 * place + 1) << 8);
    }
    return codes;
  };
  const names = Object.keys(data.views);
  const sides = Object.keys(data.sides);  // of two runs: how far they are apart, and each of them
  const runs = sides.filter((key) => key !== "apart");
  let current = names[0];
  let side = sides[0];
  let column = 0;
  let aim = 0;  // the step that was asked for, of which a view may have only one nearby
  const opened = new Set();
  const cells = (view, key) => {
    const panel = view.sides[key];
    if (!panel.codes) {
      panel.codes = unpack(panel.cells);
      panel.blockCodes = panel.ofBlocks === null ? null : unpack(panel.ofBlocks);
    }
    return panel;
  };
  const rowsOf = (view, key) => {
    const panel = cells(view, key);
    const width = view.first.length;
    const row = (codes, place) => codes.subarray(place * width, (place + 1) * width);
    const layer = (place) => ({ name: view.names[place], codes: row(panel.codes, place) });
    if (view.blocks === null) return view.names.map((_, place) => layer(place));
    return view.blocks.flatMap(([name, places], number) => {
      if (opened.has(name) || places.length === 1) return places.map(layer);
      return [{ name: `${name} (${places.length})`, codes: row(panel.blockCodes, number) }];
    });
  };
  const value = (code, isLog) => (isLog ? (code === ZERO ? 0 : 10 ** (code / LOG)) : code / LINEAR);
  const words = (code, isLog) => {
    if (code === NONE) return "not measured";
    if (code === LOUD) return "NaN or infinite";
    return Number(value(code, isLog).toPrecision(4)).toString();
  };
  const span = (view, at) => when(view.first[at], view.last[at]);
  const shade = (code, isLog) => (code === NONE || code === LOUD || (isLog && code === ZERO) ? null : isLog ? code / LOG : code / LINEAR);
  const MOST_ROWS = 400;  // more of them at once take a browser many seconds
  const VIRIDIS = "Viridis", GREY = "#8a8f98", PINK = "#ff00c8", BLUE = "#0072b2", ORANGE = "#e69f00", SKY = "#56b4e9", RED = "#d55e00";

  const heat = () => {
    const view = data.views[current];
    const { log } = view.sides[side];
    const rows = rowsOf(view, side);
    const places = rows.map((_, place) => place);
    const known = rows.map((row) => Array.from(row.codes, (code) => shade(code, log)));
    const hover = rows.map((row) => Array.from(row.codes, (code, at) => `${escaped(row.name)}<br>${span(view, at)}: ${words(code, log)}`));
    const colorbar = { thickness: 14 };
    if (log) {
      let low = Infinity, high = -Infinity;
      for (const row of known) for (const cell of row) if (cell !== null) { low = Math.min(low, cell); high = Math.max(high, cell); }
      if (low <= high) {
        const [from, to] = [Math.floor(low), Math.ceil(high)];
        const step = Math.max(Math.floor((to - from) / 6), 1);
        colorbar.tickvals = [];
        for (let mark = from; mark <= to; mark += step) colorbar.tickvals.push(mark);
        colorbar.ticktext = colorbar.tickvals.map((mark) => `1e${mark}`);
      }
    }
    const middles = view.first.map((first, at) => (first + view.last[at]) / 2);  // of the cells, in which their steps lie
    const common = { type: "heatmap", x: middles, y: places, text: hover, hovertemplate: "%{text}<extra></extra>" };
    const traces = [{ ...common, z: known, colorscale: VIRIDIS, colorbar }];
    const paint_all = (wanted, colour, opacity) => {
      if (!rows.some((row) => row.codes.includes(wanted))) return;
      const cells = rows.map((row) => Array.from(row.codes, (code) => (code === wanted ? 1 : null)));
      traces.push({ ...common, z: cells, colorscale: [[0, colour], [1, colour]], showscale: false, opacity });
    };
    paint_all(LOUD, PINK, 1);
    if (side === "apart") paint_all(NONE, GREY, 0.35);
    if (data.marks.length) {
      traces.push({
        type: "scatter", mode: "markers", x: data.marks, y: data.marks.map(() => 1), yaxis: "y2", cliponaxis: false, showlegend: false,
        marker: { symbol: "triangle-down", size: 10, color: RED }, hovertemplate: `${data.mark} in step %{x}<extra></extra>`,
      });
    }
    const layout = {
      height: Math.max(300, 17 * rows.length + 90), margin: { l: 60, r: 10, b: 14 }, hovermode: "closest",
      xaxis: { title: { text: "step", standoff: 4 }, ticklabelstandoff: 6, side: "top", range: [view.first[0] - 0.5, view.last[view.last.length - 1] + 0.5] },
      yaxis: { tickvals: places, ticktext: rows.map((row) => short(row.name)), range: [rows.length - 0.5, -0.5], automargin: true },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
    if (side === "apart" && !known.some((row) => row.some((cell) => cell !== null))) {
      const text = "no difference in what both runs have of it";
      layout.annotations = [{ text, x: 0.5, y: 0.5, xref: "paper", yref: "paper", showarrow: false, font: { size: 15 } }];
    }
    show("heat", traces, layout);
    $("heat").removeAllListeners?.("plotly_click");
    $("heat").on("plotly_click", (event) => {
      const at = middles.indexOf(event.points[0].x);
      if (at >= 0) aimAt(at);
    });
  };

  const extent = (codes, isLog) => {
    let low = Infinity, high = -Infinity;
    for (const code of codes) if (shade(code, isLog) !== null) { const now = value(code, isLog); low = Math.min(low, now); high = Math.max(high, now); }
    return [low, high];
  };
  const depth = () => {
    const view = data.views[current];
    const { log, title } = view.sides[runs[0]];
    const ofRuns = runs.map((key) => rowsOf(view, key));
    const places = ofRuns[0].map((_, place) => place);
    const edges = ofRuns[0].map((row) => extent(row.codes, log));
    const traces = [];
    if (runs.length === 1) {
      const bands = { x: [], y: [] };
      edges.forEach(([low, high], place) => { if (low <= high) { bands.x.push(low, high, null); bands.y.push(place, place, null); } });
      traces.push({ type: "scatter", mode: "lines", ...bands, line: { color: SKY, width: 6 }, opacity: 0.45, name: "all steps", hoverinfo: "skip" });
    }
    ofRuns.forEach((rows, number) => {
      const known = rows.map((row) => (shade(row.codes[column], log) === null ? null : value(row.codes[column], log)));
      const colour = [BLUE, ORANGE][number];
      traces.push({
        type: "scatter", mode: "lines+markers", x: known, y: places, line: { color: colour, width: 1, dash: ["solid", "dash"][number] },
        marker: { size: 6, color: colour, symbol: ["circle", "diamond"][number] }, name: escaped(data.sides[runs[number]]) || span(view, column),
        text: rows.map((row) => escaped(row.name)), hovertemplate: "%{text}: %{x:.4g}<extra></extra>",
      });
    });
    const odd = places.filter((place) => ofRuns.some((rows) => rows[place].codes[column] === LOUD));
    if (odd.length) {
      const far = Math.max(...edges.map(([, high]) => high).filter(Number.isFinite), 1e-30);
      traces.push({ type: "scatter", mode: "markers", x: odd.map(() => far), y: odd, name: "NaN or infinite", marker: { symbol: "x", size: 10, color: PINK } });
    }
    show("depth", traces, {
      height: Math.max(300, 17 * places.length + 90), margin: { l: 60, r: 20, b: 44 }, hovermode: "closest",
      xaxis: { type: log ? "log" : "linear", exponentformat: "e", title: { text: title } },
      yaxis: { tickvals: places, ticktext: ofRuns[0].map((row) => short(row.name)), range: [places.length - 0.5, -0.5], automargin: true },
      legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, xanchor: "left" },
    });
  };
  const choose = (at) => {
    column = at;
    $("step").value = String(at);
    $("which").textContent = span(data.views[current], at);
    $("step").setAttribute("aria-valuetext", span(data.views[current], at));
    if (drawn.has("depth")) depth();
  };
  const check = (group, key) => {
    for (const button of $(group).children) {
      button.setAttribute("aria-checked", String(button.dataset.key === key));
      button.tabIndex = button.dataset.key === key ? 0 : -1;
    }
  };
  const aimed = () => {
    const { first, last } = data.views[current];
    const at = last.findIndex((step) => step >= aim);
    return at < 0 ? first.length - 1 : at;
  };
  const aimAt = (at) => {
    aim = data.views[current].first[at];
    choose(at);
  };
  const select = (name) => {
    current = name;
    const view = data.views[name];
    check("views", name);
    $("step").max = String(view.first.length - 1);
    heat();
    offer();
    choose(aimed());
  };
  const turn = (key) => {
    side = key;
    check("sides", key);
    heat();
  };
  const offer = () => {
    const view = data.views[current];
    $("blocks").hidden = view.blocks === null;
    if (view.blocks === null) return;
    const many = view.blocks.filter(([, places]) => places.length > 1);
    const titles = many.map(([name]) => name);
    const rows = rowsOf(view, side).length;
    const press = (text, chosen, isOpen) => {
      const button = make("button", text);
      button.type = "button";
      if (isOpen !== undefined) button.setAttribute("aria-pressed", String(isOpen));
      button.addEventListener("click", () => {
        chosen();
        redraw();
        [...$("open").children].find((other) => other.textContent === text || other.dataset.all)?.focus();
      });
      return button;
    };
    const isAll = titles.every((name) => opened.has(name));
    const all = press(isAll ? "close all" : "open all", () => titles.forEach((name) => (isAll ? opened.delete(name) : opened.add(name))));
    all.dataset.all = "true";
    all.disabled = !isAll && view.names.length > MOST_ROWS;
    if (all.disabled) all.title = `${view.names.length} layers at once are too many: open the blocks that you want to see`;
    const buttons = many.map(([name, places]) => {
      const isOpen = opened.has(name);
      const button = press(name, () => (isOpen ? opened.delete(name) : opened.add(name)), isOpen);
      button.disabled = !isOpen && rows + places.length > MOST_ROWS;
      return button;
    });
    $("open").replaceChildren(all, ...buttons);
  };
  const redraw = () => {
    heat();
    if (drawn.has("depth")) depth();
    offer();
  };
  const radios = (group, titles, chosen) => {
    const keys = Object.keys(titles);
    for (const key of keys) {
      const button = make("button", titles[key]);
      button.type = "button";
      button.dataset.key = key;
      button.setAttribute("role", "radio");
      button.addEventListener("click", () => chosen(key));
      $(group).append(button);
    }
    $(group).addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const next = keys[(keys.indexOf(document.activeElement.dataset.key) + move + keys.length) % keys.length];
      chosen(next);
      [...$(group).children].find((button) => button.dataset.key === next).focus();
    });
  };
  const chooser = () => {
    radios("views", Object.fromEntries(names.map((name) => [name, data.views[name].sides[runs[0]].title])), select);
    if (sides.length > 1) {
      radios("sides", data.sides, turn);
      check("sides", side);
    }
    $("step").addEventListener("input", () => aimAt(Number($("step").value)));
  };

  // --- the table

  const table = () => {
    const { columns, rows } = data.layers;
    let by = -1, falls = true;
    const head = $("table").tHead.insertRow();
    const draw = () => {
      const wanted = $("search").value.trim().toLowerCase();
      const found = rows.filter((row) => row[0].toLowerCase().includes(wanted));
      if (by >= 0) {
        const order = (a, b) => (a === null) - (b === null) || (typeof a === "string" ? a.localeCompare(b) : a - b) * (falls ? -1 : 1);
        found.sort((a, b) => order(a[by], b[by]));
      }
      const body = make("tbody");
      for (const row of found) {
        const line = body.insertRow();
        for (const cell of row) line.insertCell().textContent = cell === null ? "-" : String(cell);
      }
      $("table").tBodies[0].replaceWith(body);
      $("matches").textContent = `${found.length} of ${rows.length}`;
      [...head.cells].forEach((cell, place) => cell.setAttribute("aria-sort", place !== by ? "none" : falls ? "descending" : "ascending"));
    };
    columns.forEach((title, place) => {
      const cell = make("th");
      cell.scope = "col";
      const button = make("button", title);
      button.type = "button";
      button.addEventListener("click", () => {
        falls = by === place ? !falls : place !== 0;
        by = place;
        draw();
      });
      cell.append(button);
      head.append(cell);
    });
    $("search").addEventListener("input", draw);
    draw();
  };

  // --- all together; what is further down is drawn when it comes into sight

  const later = (id, section, draw) => {
    if (!draw) {
      $(section).hidden = true;
      return;
    }
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        seen.disconnect();
        draw();
      }
    }, { rootMargin: "300px" });
    seen.observe($(section));
  };
  const fixed = (id) => (data.figures[id] ? () => show(id, data.figures[id].data, data.figures[id].layout) : null);

  $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  $("theme").textContent = isDark() ? "light" : "dark";
  $("s-heat").hidden = !names.length;
  $("s-table").hidden = !data.layers.rows.length;
  tell();
  table();
  document.body.dataset.told = "true";

  const figuresOf = () => {
    if (names.length) {
      chooser();
      const told = data.against ? data.marks[0] : data.findings[0]?.first;
      aim = told ?? data.views[current].last.at(-1);
      column = aimed();
      select(current);
    }
    later("norm", "s-norm", fixed("norm"));
    later("depth", "s-depth", names.length ? depth : null);
    later("update", "s-update", fixed("update"));
    later("layers", "s-layers", fixed("layers"));
  };
  // plotly is the larger part of the page, which is why it is packed, and takes most of the time to open it: words come before pictures
  const unpacked = async (id) => {
    const raw = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const begin = async () => {
    await new Promise((seen) => setTimeout(seen));  // the words are in sight
    document.head.append(make("script", await unpacked("plotly")));
    figuresOf();
    document.body.dataset.ready = "true";
  };
  begin().catch((error) => {
    $("heat").textContent = `There are no figures: ${error}. They need a browser of 2023 or later (DecompressionStream).`;
    throw error;
  });
})();
