"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const drawing = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const cards = new Map();
  const marked = new Set();  // names, at most two, the first one first
  let by = null, falls = false;
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98"];
  const RANKS = { error: 3, warning: 2, "": 1, info: 0 };

  const number = (value, digits = 4) => (value === null || value === undefined ? "" : typeof value === "number" ? String(Number(value.toPrecision(digits))) : value);
  const ago = (seconds) => {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
    return `${Math.round(seconds)} s`;
  };
  const address = (name, hash = "") => withToken(`run?name=${encodeURIComponent(name)}${hash}`);

  // --- small charts; on a logarithmic scale where all losses are positive

  const finite = (points) => points.filter(([, loss]) => typeof loss === "number");
  const line = (points, width, height, [left, right, low, high], isLog) => {
    const scaled = (loss) => (isLog ? Math.log(loss) : loss);
    const [bottom, top] = [scaled(low), scaled(high)];
    const x = (step) => (right > left ? ((step - left) / (right - left)) * width : 0);
    const y = (loss) => (top > bottom ? height - ((scaled(loss) - bottom) / (top - bottom)) * height : height / 2);
    let isDown = false;
    return points.map(([step, loss]) => {
      if (typeof loss !== "number") { isDown = false; return ""; }  // NaN leaves a gap
      const mark = `${isDown ? "L" : "M"}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`;
      isDown = true;
      return mark;
    }).join("");
  };
  const extent = (all) => {
    const points = all.flatMap(finite);
    if (!points.length) return null;
    const [steps, losses] = [points.map(([step]) => step), points.map(([, loss]) => loss)];
    return [Math.min(...steps), Math.max(...steps), Math.min(...losses), Math.max(...losses)];
  };
  const spark = (card) => {
    const bounds = extent([card.losses]);
    if (bounds === null) return "";
    const chart = drawing("svg", { width: 110, height: 26, viewBox: "-1 -2 112 30", class: "spark", role: "img", "aria-label": `loss from ${number(card.first_loss)} to ${number(card.loss)}` });
    chart.append(drawing("path", { d: line(card.losses, 110, 26, bounds, bounds[2] > 0) }));
    return chart;
  };

  // --- the table

  const differing = () => {
    const all = [...cards.values()];
    const names = new Set(all.flatMap((card) => Object.keys(card.settings)));
    return [...names].filter((name) => new Set(all.map((card) => card.settings[name])).size > 1);
  };
  const finding = (card) => {
    const found = card.findings.filter(([level]) => level !== "info");
    const cell = make("span");
    const hints = card.findings.length - found.length;
    if (!found.length) cell.append(hints ? make("span", `${hints} info`, "level info") : card.is_diagnosed ? "none" : "");
    found.slice(0, 2).forEach(([level, rule, where], place) => cell.append(place ? ", " : "", make("span", rule, `level ${level}`), where ? ` in ${where}` : ""));
    if (found.length > 2) cell.append(` and ${found.length - 2} more`);
    return cell;
  };
  const opened = (card) => {
    const link = make("a", card.name);
    link.href = address(card.name);
    return link;
  };
  const state = (card) => {
    const words = make("span", card.state, `state ${card.state}`);
    words.title = card.status;
    return words;
  };
  const spikes = (card) => {
    if (!card.spikes) return "";
    const link = make("a", `${card.spikes}: step ${card.spike_step}${card.spike_where ? `, ${card.spike_where}` : ""}`);
    link.title = card.worst_spike;
    link.href = address(card.name, `#step=${card.spike_step}`);
    return link;
  };
  // title, what is shown, what it is sorted by, class
  const columns = () => [
    ["run", opened, (card) => card.name, "plain"],
    ["state", state, (card) => card.state, "plain"],
    ["step", (card) => (card.step === null ? "" : card.step.toLocaleString("en")), (card) => card.step, "number"],
    ["started", (card) => (card.began === null ? "" : `${ago(Date.now() / 1000 - card.began)} ago`), (card) => card.began, "number"],
    ["loss", (card) => number(card.loss), (card) => card.loss, "number"],
    ["", spark, null, "plain"],
    ["findings", finding, (card) => Math.max(-1, ...card.findings.map(([level]) => RANKS[level])), "note"],
    ["spikes", spikes, (card) => card.spikes, "note"],
    ["head-room used", (card) => number(card.headroom, 2), (card) => card.headroom, "number"],
    ["cost", (card) => (card.cost === null ? "" : `${number(100 * card.cost, 2)} %`), (card) => card.cost, "number"],
    ...differing().map((name) => [name, (card) => card.settings[name] ?? "", (card) => quantity(card.settings[name]), "number"]),
  ].filter(([title, shown]) => title === "findings" || [...cards.values()].some((card) => shown(card) !== ""));
  // settings are text: numbers among them are sorted as numbers
  const quantity = (text) => {
    const value = Number((text ?? "").replaceAll(",", ""));
    return text && Number.isFinite(value) ? value : text ?? null;
  };
  const compare = (a, b) => {
    const isOdd = (value) => value === null || (typeof value === "string" && ["NaN", "Infinity", "-Infinity"].includes(value));
    if (isOdd(a) || isOdd(b)) return isOdd(a) - isOdd(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return falls ? -order : order;
  };
  const words = (card) => `${card.name} ${card.state} ${card.findings.map((each) => each.join(" ")).join(" ")} ${Object.values(card.settings).join(" ")}`.toLowerCase();
  const chosen = () => {
    const wanted = $("search").value.trim().toLowerCase();
    const found = [...cards.values()].filter((card) => words(card).includes(wanted));
    const column = by === null ? null : columns().find(([title]) => title === by);
    if (column) found.sort((a, b) => compare(column[2](a), column[2](b)));
    else found.sort((a, b) => (b.began ?? 0) - (a.began ?? 0) || a.name.localeCompare(b.name));
    return found;
  };
  const mark = (name) => {
    if (!marked.delete(name)) marked.add(name);
    const [first] = marked;
    const isThird = marked.size > 2 && marked.delete(first);
    $("marks").textContent = isThird ? `two can be marked: ${first} no longer is` : "";
    draw();
  };
  const both = () => {
    if (marked.size === 2) location.href = withToken(`both?${[...marked].map((name, place) => `${["first", "second"][place]}=${encodeURIComponent(name)}`).join("&")}`);
  };
  const row = (card, all) => {
    const line = make("tr");
    line.dataset.run = card.name;
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked: marked.has(card.name) });
    box.setAttribute("aria-label", `mark ${card.name}`);
    box.addEventListener("change", () => mark(card.name));
    const first = make("td", undefined, "plain");
    first.append(box);
    line.append(first);
    for (const [title, shown, , className] of all) {
      const cell = make("td", undefined, className);
      const content = shown(card);
      if (content === "") cell.classList.add("empty");
      if (title) cell.dataset.title = title;
      cell.append(content);
      line.append(cell);
    }
    return line;
  };
  const head = (all) => {
    const line = make("tr");
    const marks = make("th");
    marks.append(make("span", "marked", "unseen"));
    line.append(marks);
    for (const [title, , key, className] of all) {
      const cell = make("th", undefined, className === "number" ? "number" : "");
      cell.scope = "col";
      if (key) {
        const button = make("button", title);
        button.type = "button";
        button.addEventListener("click", () => {
          [falls, by] = [by === title ? !falls : false, title];
          draw();
          [...$("runs").tHead.querySelectorAll("button")].find((other) => other.textContent === title)?.focus();
        });
        cell.append(button);
        cell.setAttribute("aria-sort", title !== by ? "none" : falls ? "descending" : "ascending");
      }
      line.append(cell);
    }
    return line;
  };
  const draw = () => {
    const active = document.activeElement?.closest?.("tr")?.dataset.run, kind = document.activeElement?.tagName;
    const all = columns(), found = chosen();
    $("runs").tHead.replaceChildren(head(all));
    $("runs").tBodies[0].replaceChildren(...found.map((card) => row(card, all)));
    if (active) [...$("runs").tBodies[0].rows].find((line) => line.dataset.run === active)?.querySelector(kind === "INPUT" ? "input" : "a")?.focus({ preventScroll: true });
    $("count").textContent = found.length === cards.size ? `(${cards.size})` : `(${found.length} of ${cards.size})`;
    $("empty").hidden = cards.size > 0;
    $("both").disabled = marked.size !== 2;
    multiples(found);
  };

  // --- losses side by side, on the same scales

  const multiples = (found) => {
    const known = ["run", "nothing, all in one", ...differing()];
    const chosenBy = known.includes($("by").value) ? $("by").value : (known[2] ?? known[1]);
    $("by").replaceChildren(...known.map((name) => new Option(name, name, false, name === chosenBy)));
    const groups = new Map();
    for (const card of found) {
      if (!finite(card.losses).length) continue;
      const key = chosenBy === "run" ? card.name : chosenBy === known[1] ? "" : card.settings[chosenBy] ?? "";
      groups.set(key, [...(groups.get(key) ?? []), card]);
    }
    const bounds = extent(found.map((card) => card.losses));
    $("s-losses").hidden = bounds === null;
    if (bounds === null) return;
    const isLog = bounds[2] > 0, width = 300, height = 150;
    const keys = [...groups.keys()].sort((a, b) => { const [x, y] = [quantity(a), quantity(b)]; return typeof x === "number" && typeof y === "number" ? x - y : String(a).localeCompare(String(b)); });
    $("losses").replaceChildren(...keys.map((key) => {
      const figure = make("figure"), some = groups.get(key);
      const chart = drawing("svg", { viewBox: `-6 -18 ${width + 12} ${height + 40}`, role: "img", "aria-label": `losses of ${some.map((card) => card.name).join(", ")}` });
      some.forEach((card, place) => {
        const link = drawing("a", { href: address(card.name) });
        const path = drawing("path", { d: line(card.losses, width, height, bounds, isLog), stroke: COLOURS[place % COLOURS.length] });
        const title = drawing("title", {});
        title.textContent = `${card.name}: ${number(card.loss)}`;
        path.append(title);
        link.append(path);
        chart.append(link);
      });
      chart.append(drawing("path", { d: `M0 0V${height}H${width}`, class: "axis" }));
      const scale = isLog ? "loss, logarithmic" : "loss";
      for (const [text, x, y, anchor] of [[number(bounds[3]), 0, -6, "start"], [scale, width, -6, "end"], [number(bounds[2]), 0, height + 16, "start"], [`step ${bounds[1]}`, width, height + 16, "end"]]) {
        const label = drawing("text", { x, y, "text-anchor": anchor });
        label.textContent = text;
        chart.append(label);
      }
      const names = make("p", undefined, "names");
      if (some.length > 1) some.slice(0, COLOURS.length).forEach((card, place) => {
        const name = make("a", card.name);
        [name.href, name.style.color] = [address(card.name), COLOURS[place]];
        names.append(name, " ");
      });
      if (some.length > COLOURS.length) names.append(`and ${some.length - COLOURS.length} more`);
      const title = chosenBy === "run" || !key ? key : `${chosenBy} ${key}`;
      figure.append(make("figcaption", some.length > 1 ? `${title}${title ? ": " : ""}${some.length} runs` : title || some[0].name), chart, names);
      return figure;
    }));
  };

  // --- keys, theme, and what is new

  addEventListener("keydown", (event) => {
    if (event.target.matches("input[type=search], select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const lines = [...$("runs").tBodies[0].rows];
    const at = lines.indexOf(document.activeElement?.closest?.("tr"));
    const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (move && lines.length) lines[Math.min(Math.max(at + move, 0), lines.length - 1)].querySelector("a").focus();
    else if (event.key === " " && at >= 0 && event.target.tagName === "A") mark(lines[at].dataset.run);
    else if (event.key === "c") both();
    else if (event.key === "/") $("search").focus();
    else return;
    event.preventDefault();
  });
  const root = document.documentElement;
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    $("theme").textContent = theme === "dark" ? "light" : "dark";
  };
  $("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("both").addEventListener("click", both);
  $("search").addEventListener("input", draw);
  $("by").addEventListener("change", draw);
  // drawn once a second at most, and not while a button of the mouse is down or a list is open: what is under it would be replaced
  let isDue = false, isHeld = false, last = 0;
  const drawSoon = () => {
    if (isHeld || document.activeElement === $("by")) { isDue = true; return; }
    const wait = Math.max(0, last + 1000 - performance.now());
    if (isDue && wait) return;
    isDue = true;
    setTimeout(() => {
      if (!isDue || isHeld || document.activeElement === $("by")) return;
      [isDue, last] = [false, performance.now()];
      draw();
      document.body.dataset.ready = "true";
    }, wait);
  };
  addEventListener("pointerdown", () => { isHeld = true; });
  for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => { isHeld = false; if (isDue) setTimeout(() => { isDue = false; drawSoon(); }); });
  $("by").addEventListener("blur", () => { if (isDue) { isDue = false; drawSoon(); } });
  listen("events", {
    cards: ({ cards: changed, gone, all }) => {
      if (all) cards.clear();  // a new stream: what was known may be gone
      for (const card of changed) cards.set(card.name, card);
      for (const name of gone) cards.delete(name);
      for (const name of [...marked]) if (!cards.has(name)) marked.delete(name);
      $("live").textContent = "";
      drawSoon();
    },
  }, () => { $("live").textContent = "the server does not answer; this page shows what it had"; });
})();
