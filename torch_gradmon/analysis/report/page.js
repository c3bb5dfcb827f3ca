"use strict";
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;  // never HTML: names come from a user's model
    if (className) element.className = className;
    return element;
  };
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (name) => escaped(name.length <= 34 ? name : `${name.slice(0, 16)}\u2026${name.slice(-17)}`);
  const drawn = new Set();
  const ROW = 17, ABOVE = 34, BELOW = 14;  // pixels of a row of the map, and around all of them
  let names = Object.keys(data.views);
  const sides = Object.keys(data.sides);  // of two runs: how far they are apart, and each of them
  const runs = sides.filter((key) => key !== "apart");

  // --- light and dark

  const root = document.documentElement;
  const isDark = () => root.dataset.theme === "dark";
  const colours = () => {
    const style = getComputedStyle(root);
    const [text, line, accent] = ["--text", "--line", "--accent"].map((name) => style.getPropertyValue(name).trim());
    return { text, line, accent };
  };
  const paint = (layout) => {
    const { text, line, accent } = colours();
    const painted = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true };
    delete painted.width;
    painted.font = { ...(layout.font || {}), color: text };
    painted.title = undefined;  // the page has headings
    painted.modebar = { bgcolor: "rgba(0,0,0,0)", color: text, activecolor: accent };
    painted.margin = { ...(layout.margin || {}), t: layout.xaxis?.side === "top" ? ABOVE : 30 };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      painted[key] = { ...layout[key], gridcolor: line, zerolinecolor: line, linecolor: line };
    }
    for (const key of ["xaxis", "yaxis"]) if (!painted[key]) painted[key] = { gridcolor: line, zerolinecolor: line };
    return painted;
  };
  // all buttons that a chart has: what plotly adds besides, such as one that uploads the chart, is none of ours
  const named = (id) => `${data.title} ${id}`.replace(/[^\w.-]+/g, "-");
  const SVG = {
    name: "svg", title: "Download as SVG", icon: { width: 24, height: 24, path: "M4 3h11l5 5v13H4z M14 3v6h6 M8 14l4 4 4-4 M12 10v8" },
    click: (chart) => {
      const options = { format: "svg", filename: named(chart.id), width: chart.clientWidth, height: chart.clientHeight };
      const save = async (attempts) => {
        try {
          await Plotly.downloadImage(chart, options);
        } catch (error) {
          if (!attempts) throw error;
          setTimeout(save, 250, attempts - 1);  // plotly takes one picture at a time
        }
      };
      save(40);
    },
  };
  const BUTTONS = ["zoom2d", "pan2d", "resetScale2d", "toImage", SVG];
  const settings = (id) => ({
    responsive: true, displaylogo: false, displayModeBar: true, modeBarButtons: [BUTTONS], showSendToCloud: false, plotlyServerURL: "", displayNotifier: false,
    toImageButtonOptions: { filename: named(id) },
  });
  const figures = {};
  const show = (id, traces, layout) => {
    figures[id] = { traces, layout };
    drawn.add(id);
    $(id).style.minHeight = `${layout.height}px`;  // at a resize plotly takes the height of its box, which is otherwise that of nothing
    return Plotly.react(id, traces, paint(layout), settings(id));
  };
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    $("theme").textContent = theme === "dark" ? "light" : "dark";
    for (const id of drawn) Plotly.react(id, figures[id].traces, paint(figures[id].layout), settings(id));
    if (drawn.has("heat")) mark();  // in the colour of the theme
  };

  // --- findings

  const when = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
  // where a finding is: a link to its cells in the map of layers, if it is of a layer or of one step
  const place = (told, run) => {
    const leads = names.length && (told.where || told.first === told.last);
    const link = make(leads ? "a" : "span");
    if (told.where) link.append("in ", make("code", told.where), ", ");
    link.append(when(told.first, told.last));
    if (!leads) return link;
    link.href = "#h-heat";
    link.title = "show it in the map of layers over steps";
    link.addEventListener("click", (event) => {
      event.preventDefault();
      point(told.where, told.first, run);
    });
    return link;
  };
  const finding = (told) => {
    const item = make("li", undefined, `finding ${told.severity}`);
    const head = make("h3");
    if (told.run) head.append(make("span", told.run, "run"), " ");
    head.append(make("span", told.severity, "level"), " ", told.rule, told.where ? " " : ", ", place(told, told.run));
    item.append(head, make("p", told.cause), make("p", `\u2192 ${told.advice}`));
    if (told.evidence.length) item.append(make("p", told.evidence.map(([name, value]) => `${name} ${value}`).join(", "), "numbers"));
    if (told.signs.length) {
      const signs = told.signs.flatMap((sign, number) => [number ? ", " : "", sign.rule, sign.where ? " " : ", ", place(sign, told.run)]);
      const line = make("p", "Possible consequences: ", "numbers");
      line.append(...signs, ".");
      item.append(line);
    }
    return item;
  };
  const tell = () => {
    const counts = ["error", "warning", "info"].map((level) => [
      data.findings.flatMap((told) => [told, ...told.signs]).filter((told) => told.severity === level).length,
      level,
    ]);
    const words = counts.filter(([count]) => count).map(([count, level]) => `${count} ${level}${count > 1 && level !== "info" ? "s" : ""}`);
    const [causes, signs] = [data.findings.length, data.findings.reduce((sum, told) => sum + told.signs.length, 0)];
    const which = signs ? `: ${causes} cause${causes > 1 ? "s" : ""}, ${signs} consequence${signs > 1 ? "s" : ""}` : "";
    $("count").textContent = words.length ? `(${words.join(", ")}${which})` : "";
    $("findings").replaceChildren(...data.findings.map(finding));
    if (!data.findings.length) $("findings").append(make("li", "Nothing was found.", "healthy"));
    for (const [id, lines] of [["unseen", data.unseen], ["events", data.events]]) {
      $(id).hidden = !lines.length;
      $(id).querySelector("ul").replaceChildren(...lines.map((line) => make("li", line)));
    }
    if (data.events.length) $("events").querySelector("summary").textContent = data.against ? "Spikes of both" : `Spikes: ${data.spikes}`;
  };

  // --- the layers over the steps

  const { none: NONE, bare: BARE, loud: LOUD, zero: ZERO, log: LOG, linear: LINEAR, recent: RECENT } = data.codes;
  const unpack = (text) => {
    const raw = atob(text);
    const codes = new Int16Array(raw.length / 2);
    for (let place = 0; place < codes.length; place += 1) {
      codes[place] = raw.charCodeAt(2 * place) | (raw.charCodeAt(2 * place + 1) << 8);
    }
    return codes;
  };
  let current = names[0];
  let side = sides[0];
  let column = 0;
  let aim = 0;  // the step that was asked for, of which a view may have only one nearby
  let picked = null;  // the layer that was asked for, or a part of the model
  let wanted = null;  // what colours show: "relative" to medians, "recent" for those of the steps before, "values"; null for what suits the view
  const opened = new Set();
  const cells = (packed) => {
    if (!packed.codes) {
      packed.codes = unpack(packed.cells);
      packed.blockCodes = packed.ofBlocks === null ? null : unpack(packed.ofBlocks);
    }
    return packed;
  };
  // of ratios to the steps before, 1 is usual
  const rowsOf = (view, key, isRecent = false) => {
    const side = view.sides[key];
    const panel = cells(isRecent ? side.recent : side);
    const width = view.first.length;
    const row = (codes, place) => codes.subarray(place * width, (place + 1) * width);
    const layer = (place) => {
      const name = view.names[place];
      return { name, codes: row(panel.codes, place), median: isRecent ? 1 : side.medians[place], isPicked: holds(name) };
    };
    if (view.blocks === null) return view.names.map((_, place) => layer(place));
    return view.blocks.flatMap(([name, places], number) => {
      if (opened.has(name) || places.length === 1) return places.map(layer);
      const isPicked = picked === name || places.some((place) => holds(view.names[place]));
      return [{ name: `${name} (${places.length})`, block: name, codes: row(panel.blockCodes, number), median: isRecent ? 1 : side.mediansOfBlocks[number], isPicked }];
    });
  };
  const holds = (name) => picked !== null && (name === picked || name.startsWith(`${picked}.`));
  const label = (row) => (row.isPicked ? `<b>${short(row.name)}</b>` : short(row.name));
  const value = (code, isLog) => (isLog ? (code === ZERO ? 0 : 10 ** (code / LOG)) : code / LINEAR);
  const few = (number, digits) => Number(number.toPrecision(digits)).toString();
  const SPECIAL = new Map([[NONE, "not measured"], [BARE, "no gradient"], [LOUD, "NaN or infinite"]]);
  const words = (code, isLog, median, isRecent) => {
    if (isRecent && code === NONE) return `nothing was measured here, or in the ${RECENT} measured steps before`;
    if (SPECIAL.has(code)) return SPECIAL.get(code);
    const now = value(code, isLog);
    if (now === 0 && !(median > 0 && !isRecent)) return "exactly 0";
    if (isRecent) return `${few(now, 3)} times its median of the ${RECENT} measured steps before`;
    if (median === null) return few(now, 4);
    return `${few(now, 4)}, ${median > 0 ? `${few(now / median, 3)} times its` : "with a"} median of ${few(median, 3)}`;
  };
  const span = (view, at) => when(view.first[at], view.last[at]);
  const shade = (code, isLog) => (SPECIAL.has(code) || (isLog && code === ZERO) ? null : isLog ? code / LOG : code / LINEAR);
  // as torch_gradmon/analysis/plots/shading.py has it
  const FAR = 30;
  const departure = (code, isLog, median) => {
    if (shade(code, isLog) === null || median === null) return null;
    const now = value(code, isLog);
    if (!isLog) return now - median;
    return Math.max(Math.min(Math.log10(now / median), FAR), -FAR);
  };
  const scale = () => {
    const { relative, recent } = data.views[current].sides[side];
    if (relative === null) return "values";
    return wanted === null || (wanted === "recent" && recent === null) ? (relative ? "relative" : "values") : wanted;
  };
  const MOST_ROWS = 400;  // more of them at once take a browser many seconds
  const VIRIDIS = "Viridis", GREY = "#8a8f98", PINK = "#ff00c8", BROWN = "#6b3f12", BLUE = "#0072b2", ORANGE = "#e69f00", SKY = "#56b4e9", RED = "#d55e00";
  const AROUND = [[0, BLUE], [0.5, "#c9cdd3"], [1, RED]];  // as in torch_gradmon/analysis/plots/colours.py

  const heat = () => {
    const view = data.views[current];
    const { log, limit: limitOfRow, recent } = view.sides[side];
    const isRecent = scale() === "recent", relative = scale() !== "values";
    const limit = isRecent ? recent.limit : limitOfRow;
    const rows = rowsOf(view, side, isRecent);
    const places = rows.map((_, place) => place);
    const laid = (row, of, gap) => view.places.map((place) => (place === null ? gap : of(row.codes[place], place)));
    const shaded = (row) => (relative ? (code) => departure(code, log, row.median) : (code) => shade(code, log));
    const known = rows.map((row) => laid(row, shaded(row), null));
    const hover = rows.map((row) => laid(row, (code, at) => `${escaped(row.name)}<br>${span(view, at)}: ${words(code, log, relative ? row.median : null, isRecent)}`, "nothing was measured here"));
    const colorbar = { thickness: 14 };
    const scaled = relative ? { colorscale: AROUND, zmin: -limit, zmax: limit } : { colorscale: VIRIDIS };
    if (relative) {
      colorbar.tickvals = [-limit, 0, limit];
      const [less, more] = log ? [`1/${few(10 ** limit, 2)}`, `${few(10 ** limit, 2)}x`] : [`-${few(limit, 2)}`, `+${few(limit, 2)}`];
      colorbar.ticktext = [`\u2264 ${less}`, isRecent ? "usual" : "median", `\u2265 ${more}`];
    } else if (log) {
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
    const common = { type: "heatmap", x: view.edges, y: places, text: hover, hovertemplate: "%{text}<extra></extra>" };
    const traces = [{ ...common, z: known, ...scaled, colorbar }];
    // what the scale has no colour for; each colour is named below the map
    const entries = [];
    const paintAll = (special, colour, opacity = 1) => {
      const there = Object.keys(special).filter((name) => rows.some((row) => row.codes.includes(special[name])));
      if (!there.length) return;
      const chosen = there.map((name) => special[name]);
      const cells = rows.map((row) => laid(row, (code) => (chosen.includes(code) ? 1 : null), null));
      traces.push({ ...common, z: cells, colorscale: [[0, colour], [1, colour]], showscale: false, opacity });
      const [entry, square] = [make("span", undefined, "entry"), make("span", undefined, "square")];
      Object.assign(square.style, { background: colour, opacity });
      entry.append(square, there.join(" or "));
      entries.push(entry);
    };
    paintAll({ "NaN or infinite": LOUD }, PINK);
    paintAll({ "no gradient": BARE, ...(log && side !== "apart" ? { "exactly 0": ZERO } : {}) }, BROWN);  // runs that agree are blank
    if (side === "apart") paintAll({ "one of the runs has no value": NONE }, GREY, 0.35);
    $("legend").replaceChildren(...entries);
    if (data.marks.length) {
      traces.push({
        type: "scatter", mode: "markers", x: data.marks, y: data.marks.map(() => 1), yaxis: "y2", cliponaxis: false, showlegend: false,
        marker: { symbol: "triangle-down", size: 10, color: RED }, hovertemplate: `${data.mark} in step %{x}<extra></extra>`,
      });
    }
    const layout = {
      uirevision: `${current} ${side} ${rows.length}`, height: heightOf(rows), margin: { l: 60, r: 10, b: BELOW }, hovermode: "closest", shapes: rows.flatMap(frame),
      annotations: [{ text: "step", xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "right", yanchor: "bottom", xshift: -16, yshift: 13, showarrow: false }],
      xaxis: { ticklabelstandoff: 6, side: "top", showgrid: false, zeroline: false, range: [view.edges[0], view.edges.at(-1)] },
      yaxis: { showgrid: false, zeroline: false, tickvals: places, ticktext: rows.map(label), range: [rows.length - 0.5, -0.5], automargin: true },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
    if (side === "apart" && !known.some((row) => row.some((cell) => cell !== null))) {
      const text = "no difference in what both runs have of it";
      layout.annotations.push({ text, x: 0.5, y: 0.5, xref: "paper", yref: "paper", showarrow: false, font: { size: 15 } });
    }
    show("heat", traces, layout);
    $("heat").removeAllListeners?.("plotly_click");
    $("heat").on("plotly_click", (event) => {
      const [row, at] = event.points[0].pointNumber ?? [];
      const place = view.places[at] ?? null;  // none in a gap, or on a triangle
      if (place === null) return;
      picked = rows[row].block ?? rows[row].name;
      aimAt(place);
      bring("s-depth");
    });
  };
  const heightOf = (rows) => Math.max(300, ROW * rows.length + ABOVE + BELOW + 20);
  // a frame around the cell that was asked for, wide enough to be found
  const frame = (row, place) => {
    if (!row.isPicked) return [];
    const view = data.views[current];
    const at = view.places.indexOf(column);
    const middle = (view.edges[at] + view.edges[at + 1]) / 2;
    const line = { color: colours().text, width: 2 };
    return [{ type: "rect", xref: "x", yref: "y", xsizemode: "pixel", xanchor: middle, x0: -6, x1: 6, y0: place - 0.5, y1: place + 0.5, line }];
  };
  const mark = () => {
    const rows = rowsOf(data.views[current], side);
    const { layout } = figures.heat;
    layout.shapes = rows.flatMap(frame);
    layout.yaxis.ticktext = rows.map(label);
    Plotly.relayout("heat", { shapes: layout.shapes, "yaxis.ticktext": layout.yaxis.ticktext });  // what was zoomed into stays
  };
  const bring = (id) => $(id).scrollIntoView({ block: "start" });

  const extent = (codes, isLog) => {
    let low = Infinity, high = -Infinity;
    for (const code of codes) if (shade(code, isLog) !== null) { const now = value(code, isLog); low = Math.min(low, now); high = Math.max(high, now); }
    return [low, high];
  };
  // as torch_gradmon/analysis/plots/plotly.py has it
  const logTicks = (low, high) => (low > 0 && high / low < 10 ** 2.5 ? { dtick: "D2", tickformat: "~g" } : { dtick: 1 });
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
        marker: { size: rows.map((row) => (row.isPicked ? 12 : 6)), color: colour, symbol: ["circle", "diamond"][number] }, name: escaped(data.sides[runs[number]]) || span(view, column),
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
      xaxis: {
        type: log ? "log" : "linear", exponentformat: "e", title: { text: title },
        ...(log ? logTicks(Math.min(...edges.map(([low]) => low)), Math.max(...edges.map(([, high]) => high))) : {}),
      },
      yaxis: { tickvals: places, ticktext: ofRuns[0].map(label), range: [places.length - 0.5, -0.5], automargin: true },
      legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, xanchor: "left" },
    });
  };
  // show the cells of a part of the model, or only a step where that is not known
  const point = (where, step, run) => {
    picked = where || null;
    aim = step;
    const key = sides.find((other) => other !== "apart" && data.sides[other] === run);
    if (key !== undefined) turn(key);
    const has = (name) => data.views[name].names.some(holds) || (data.views[name].blocks ?? []).some(([block]) => block === where);
    select(has(current) ? current : names.find(has) ?? current);
    open();
    const rows = rowsOf(data.views[current], side);
    const row = Math.max(rows.findIndex((each) => each.isPicked), 0);
    bring("s-heat");
    $("h-heat").focus({ preventScroll: true });
    const { top, height } = $("heat").getBoundingClientRect();
    const below = top + ABOVE + ((row + 0.5) * (height - ABOVE - BELOW)) / rows.length - 0.9 * innerHeight;
    if (below > 0) scrollBy(0, below + 0.4 * innerHeight);
    remember();
  };
  // the block that holds what was asked for, where there is room for its layers
  const open = () => {
    const view = data.views[current];
    const some = (view.blocks ?? []).filter(([name, places]) => name !== picked && places.length > 1 && places.some((place) => holds(view.names[place])));
    if (some.length !== 1 || rowsOf(view, side).length + some[0][1].length > MOST_ROWS) return;
    opened.add(some[0][0]);
    redraw();
  };
  const choose = (at) => {
    column = at;
    $("step").value = String(at);
    $("which").textContent = span(data.views[current], at);
    $("step").setAttribute("aria-valuetext", span(data.views[current], at));
    mark();
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
    remember();
  };
  const select = (name) => {
    current = name;
    const view = data.views[name];
    check("views", name);
    $("step").max = String(view.first.length - 1);
    column = aimed();
    offer();
    draw();
    choose(column);
  };
  const turn = (key) => {
    side = key;
    check("sides", key);
    draw();
  };
  const draw = () => {
    $("scales").hidden = data.views[current].sides[side].relative === null;
    check("scales", scale());
    for (const button of $("scales").children) button.hidden = button.dataset.key === "recent" && !data.views[current].sides[side].recent;
    $("sparse").textContent = sparse(data.views[current]);
    heat();
  };
  // why most of a picture may be empty
  const sparse = ({ first, last, places }) => {
    const gaps = places.filter((place) => place === null).length;
    if (!gaps) return "";
    const one = first.length === 1 || !places.slice(places.indexOf(0), places.lastIndexOf(first.length - 1)).includes(null);
    return one ? `Measured in ${when(first[0], last.at(-1))} only; drag over them to see more of them.` : "Where it is empty, nothing was measured.";
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
    draw();
    if (drawn.has("depth")) depth();
    offer();
  };
  const radios = (group, titles, chosen) => {
    const keys = Object.keys(titles);
    $(group).replaceChildren(...keys.map((key) => {
      const button = make("button", titles[key]);
      button.type = "button";
      button.dataset.key = key;
      button.setAttribute("role", "radio");
      button.addEventListener("click", () => chosen(key));
      return button;
    }));
    $(group).onkeydown = (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const shown = [...$(group).children].filter((button) => !button.hidden);
      const next = shown[(shown.indexOf(document.activeElement) + move + shown.length) % shown.length];
      chosen(next.dataset.key);
      [...$(group).children].find((button) => button.dataset.key === next.dataset.key).focus();
    };
  };
  const offerViews = () => radios("views", Object.fromEntries(names.map((name) => [name, data.views[name].sides[runs[0]].title])), (name) => {
    select(name);
    remember();
  });
  const chooser = () => {
    offerViews();
    if (sides.length > 1) {
      radios("sides", data.sides, turn);
      check("sides", side);
    }
    const titles = { relative: "relative to the row's median", recent: `relative to the last ${RECENT} measured steps`, values: "values" };
    radios("scales", titles, (key) => {
      wanted = key;
      draw();
    });
    $("step").addEventListener("input", () => aimAt(Number($("step").value)));
  };

  // --- the table

  let by = -1, falls = true;
  const table = () => {
    const { columns } = data.layers;
    $("table").tHead.replaceChildren();
    const head = $("table").tHead.insertRow();
    const draw = () => {
      const { rows } = data.layers;
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
    $("search").oninput = draw;
    draw();
  };

  // --- all together; what is further down is drawn when it comes into sight

  const later = (section, draw) => {
    const seen = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        seen.disconnect();
        draw();
      }
    }, { rootMargin: "300px" });
    seen.observe($(section));
  };
  const FIXED = ["norm", "update", "layers"];
  const fixed = (id) => () => data.figures[id] && show(id, data.figures[id].data, data.figures[id].layout);
  const hide = () => {
    $("s-heat").hidden = $("s-depth").hidden = !names.length;
    $("s-table").hidden = !data.layers.rows.length;
    for (const id of FIXED) $(`s-${id}`).hidden = !data.figures[id];
  };

  const narrow = matchMedia("(max-width: 700px)");
  const fold = () => { $("about").open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  $("theme").textContent = isDark() ? "light" : "dark";
  hide();
  tell();
  table();
  document.body.dataset.told = "true";

  // the place that the address names, such as #view=update&layer=blocks.1&step=300, or else what is most worth a look
  const recall = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    const told = data.against ? undefined : data.findings.find(({ where }) => where) ?? data.findings[0];
    const step = Number.parseInt(asked.get("step"), 10);
    aim = Number.isFinite(step) ? step : (data.against ? data.marks[0] : told?.first) ?? data.views[current].last.at(-1);
    picked = asked.get("layer") || (asked.has("step") ? null : told?.where || null);
    if (names.includes(asked.get("view"))) current = asked.get("view");
  };
  const remember = () => {
    const asked = new URLSearchParams({ view: current, ...(picked ? { layer: picked } : {}), step: data.views[current].first[column] });
    history.replaceState(null, "", `#${asked}`);
  };
  const figuresOf = () => {
    current = names[0];
    if (names.length) {
      chooser();
      recall();
      select(current);
      if (location.hash) open();
      $("depth").style.minHeight = `${$("heat").clientHeight}px`;  // so that what is drawn later moves nothing that is in sight
    }
    for (const [id, { layout }] of Object.entries(data.figures)) $(id).style.minHeight = `${layout.height}px`;
    later("s-depth", () => names.length && depth());
    for (const id of FIXED) later(`s-${id}`, fixed(id));
    addEventListener("hashchange", () => {
      const asked = new URLSearchParams(location.hash.slice(1));
      if (!names.length || !["view", "layer", "step"].some((name) => asked.has(name))) return;  // a link within the page
      recall();
      select(current);
    });
  };
  // the same run some steps later: what was chosen stays, and who looks at the last step goes along
  const update = (fresh) => {
    const atEnd = drawn.has("heat") && column === data.views[current].first.length - 1;
    data = fresh;
    names = Object.keys(data.views);
    $("facts").replaceChildren(...data.facts.map(([name, text]) => {
      const fact = make("div");
      fact.append(make("dt", name), make("dd", text));
      return fact;
    }));
    hide();
    tell();
    table();
    if (!document.body.dataset.ready || !names.length) return;
    if (!names.includes(current)) current = names[0];
    if (!drawn.has("heat")) chooser();
    offerViews();
    if (atEnd || !drawn.has("heat")) aim = data.views[current].last.at(-1);
    select(current);
    for (const id of FIXED) if (drawn.has(id)) fixed(id)();
  };
  window.gradmon = { update, drawnTo: () => data.last };
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
