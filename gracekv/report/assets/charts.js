// Figures above the text: accounting, heads, resolution, auction.

const FIGURES = [
  ["budget", "Budget, context entries", count],
  ["spent", "Kept context entries", count],
  ["floor_spent", "of them the floor's", count],
  ["recent", "Recent window, tokens per head", count],
  ["budget_bytes", "Budget, bytes of context entries", count],
  ["spent_bytes", "Kept bytes of context entries", count],
  ["bytes", "Keys and values, bytes", count],
  ["full_bytes", "Full cache, bytes", count],
  ["metadata_bytes", "Metadata, bytes", count],
  ["backend_bytes", "Backend's copies, bytes", count],
  ["utility", "Utility of the bought operations", short],
  ["bound", "Upper bound of the utility", short],
  ["certified_ratio", "Share of the bound reached", (x) => percent(x, 2)],
];

function drawSummary(report) {
  const context = report.contextEnd - report.contextStart;
  const full = context * report.units;
  byId("title").textContent = report.columns.map((x) => x.label).join(report.columns.length > 2 ? ", " : " beside ");
  byId("facts").textContent =
    `${report.model} · ${count(report.length)} prompt tokens, ${count(context)} of them context · ` +
    `${report.layers} layers × ${report.heads} KV heads`;
  byId("footer").textContent = `Written by gracekv ${report.version}. This file loads nothing from the network.`;
  for (const column of report.columns) {
    const kept = column.accounting;
    const bar = el("div", { class: "bar", "aria-hidden": "true" });
    const floor = el("i", { class: "floor" });
    const rest = el("i", {});
    floor.style.width = percent(kept.floor_spent / full, 3);
    rest.style.width = percent((kept.spent - kept.floor_spent) / full, 3);
    bar.append(floor, rest);
    byId("cards").append(
      el(
        "article",
        { class: "card" },
        el("h3", {}, column.label),
        el("p", { class: "big" }, percent(kept.spent / full), el("small", {}, " of the context's entries")),
        bar,
        el("p", {}, `${count(kept.spent)} of ${count(full)} entries` +
          (kept.floor_spent ? `, ${count(kept.floor_spent)} of them bought by the floor (dark)` : "")),
        el("p", {}, `${bytes(kept.bytes)} of keys and values, the full cache takes ${bytes(kept.full_bytes)}` + (kept.full_in_16_bits ? " in 16 bits" : "")),
        column.answer === null ? null : el("blockquote", {}, el("span", { class: "said" }, "Answer"), column.answer),
      ),
    );
  }
  const rows = FIGURES.filter(([key]) => report.columns.some((x) => x.accounting[key] !== null));
  const settings = [...new Set(report.columns.flatMap((x) => x.pipeline.map(([stage]) => stage)))];
  const seconds = Object.keys(report.columns[0].timings);
  byId("accounting").append(
    el("thead", {}, el("tr", {}, el("td", {}), ...report.columns.map((x) => el("th", { scope: "col" }, x.label)))),
    el(
      "tbody",
      {},
      ...rows.map(([key, name, format]) =>
        line(name, report.columns, (x) => {
          const value = x.accounting[key];
          return el("td", { class: "number", "data-field": key, "data-value": value }, value === null ? "–" : format(value));
        }),
      ),
    ),
    group("Seconds", report, seconds, (x, stage) => el("td", { class: "number" }, x.timings[stage].toFixed(2))),
    group("Pipeline", report, settings, (x, stage) => el("td", {}, (x.pipeline.find(([s]) => s === stage) ?? ["", "–"])[1])),
  );
}

function line(name, columns, cell) {
  return el("tr", {}, el("th", { scope: "row" }, name), ...columns.map(cell));
}

function group(name, report, rows, cell) {
  const head = el("th", { scope: "rowgroup", colspan: report.columns.length + 1 }, name);
  return el("tbody", {}, el("tr", { class: "group" }, head), ...rows.map((row) => line(row, report.columns, (x) => cell(x, row))));
}

/** One grid of buttons per column; choose(layer, head) is called for a chosen cell. */
function drawMaps(report, choose) {
  const all = report.columns.flatMap((x) => x.accounting.entries.flat());
  const low = Math.log(Math.max(1, Math.min(...all)));
  const high = Math.max(low + 1e-9, Math.log(Math.max(1, ...all)));
  const context = report.contextEnd - report.contextStart;
  byId("maps").replaceChildren();
  for (const column of report.columns) {
    const grid = el("div", { class: "grid", role: "grid", "aria-label": `Entries kept by ${column.label}` });
    grid.style.setProperty("--layers", report.layers);
    for (let head = 0; head < report.heads; head++) {
      const row = el("div", { role: "row" }, el("span", { role: "rowheader" }, `head ${head}`));
      for (let layer = 0; layer < report.layers; layer++) {
        const entries = column.accounting.entries[layer][head];
        const name = `layer ${report.layerName(layer)}, head ${head}: ${count(entries)} entries, ${percent(entries / context)} of the context`;
        const cell = el("button", {
          role: "gridcell", type: "button", tabindex: -1, class: "cell", title: name, "aria-label": name,
          "data-layer": layer, "data-head": head, "data-entries": entries,
          onclick: () => choose(layer, head),
        });
        const tone = viridis((Math.log(Math.max(1, entries)) - low) / (high - low));
        cell.style.backgroundColor = `rgb(${tone})`;
        row.append(cell);
      }
      grid.append(row);
    }
    const ticks = el("div", { class: "ticks", "aria-hidden": "true" }, el("span", {}, "layer"));
    const every = Math.max(1, Math.round(report.layers / 8));
    for (let layer = 0; layer < report.layers; layer++) {
      ticks.append(el("span", {}, layer % every === 0 ? String(report.layerName(layer)) : ""));
    }
    grid.append(ticks);
    grid.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      const cell = event.target.closest(".cell");
      if (!step || !cell) return;
      event.preventDefault();
      const layer = clamp(Number(cell.dataset.layer) + step[0], report.layers);
      const head = clamp(Number(cell.dataset.head) + step[1], report.heads);
      choose(layer, head);
      grid.querySelector(`[data-layer="${layer}"][data-head="${head}"]`).focus();
    });
    byId("maps").append(el("figure", {}, el("figcaption", {}, column.label), grid));
  }
  const scale = el("div", { class: "scale" }, el("span", {}, count(Math.min(...all))), el("i", {}), el("span", {}, count(Math.max(...all))), el("span", {}, "entries"));
  const stops = VIRIDIS.map((_, i) => `rgb(${viridis(i / (VIRIDIS.length - 1))})`);
  scale.querySelector("i").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  byId("maps").append(scale);
}

function clamp(value, size) {
  return Math.min(size - 1, Math.max(0, value));
}

/** Outline the chosen heads in every map. */
function markMaps(report) {
  const chosen = new Set(view.units(report));
  for (const cell of document.querySelectorAll("#maps .cell")) {
    const layer = Number(cell.dataset.layer);
    const head = Number(cell.dataset.head);
    const on = view.mode !== "all" && chosen.has(layer * report.heads + head);
    cell.setAttribute("aria-selected", String(on));
    // One tab stop per map: the head that the sliders select.
    cell.tabIndex = layer === view.layer && head === view.head ? 0 : -1;
  }
}

/** Shares of tokens by what became of them; the swatches are the text's legend. */
function drawResolution(report) {
  byId("scope").textContent = view.scope(report);
  const units = view.units(report);
  const shown = view.shown(report);
  const table = shown.map((column) => {
    const sums = Array(BINS.length + 3).fill(0);
    column.resolution(units).forEach((tokens, length) => (sums[binOf(length)] += tokens));
    return sums;
  });
  const total = units.length * report.width || 1;
  const most = Math.max(1, ...table.flat());
  const bins = [...Array(BINS.length + 3).keys()].filter((bin) => bin < 2 || table.some((sums) => sums[bin]));
  byId("resolution").replaceChildren(
    el(
      "table",
      { class: "bars" },
      el("thead", {}, el("tr", {}, el("td", {}), ...shown.map((x) => el("th", { scope: "col" }, x.label)))),
      el(
        "tbody",
        {},
        ...bins.map((bin) =>
          el(
            "tr",
            { "data-bin": bin },
            el("th", { scope: "row" }, el("span", { class: `swatch t n${bin}` }, "token"), binName(bin)),
            ...table.map((sums) => {
              const fill = el("i", { class: `n${bin}`, hidden: sums[bin] === 0 });
              fill.style.width = percent(sums[bin] / most, 2);
              return el("td", { "data-tokens": sums[bin] }, el("span", { class: "track" }, fill), el("b", {}, percent(sums[bin] / total)));
            }),
          ),
        ),
      ),
    ),
  );
}

function drawAuction(report) {
  const curved = report.columns.filter((x) => x.curve && x.curve.entries.length > 1);
  byId("auctionSection").hidden = curved.length === 0;
  byId("auction").replaceChildren(...curved.map((column) => auctionFigure(column)));
  const bounded = curved.some((x) => x.curve.bound !== null);
  byId("auctionHint").textContent =
    "Utility over entries spent: the floor's purchases first, then operations by falling utility per entry. " +
    (bounded
      ? "The dashed line is an upper bound for any allocation over the same trees."
      : "A pipeline with certify also computes an upper bound.") +
    (curved.length > 1 ? " Utilities of different pipelines are on different scales." : "");
}

function auctionFigure(column) {
  const { entries, utility, floor_entries: floorEntries, bound } = column.curve;
  const [wide, high, left, bottom, top, right] = [460, 240, 56, 34, 12, 14];
  const mostX = entries[entries.length - 1];
  const mostY = Math.max(utility[utility.length - 1], bound ?? 0) || 1;
  const x = (n) => left + ((wide - left - right) * n) / mostX;
  const y = (u) => high - bottom - ((high - bottom - top) * u) / mostY;
  const path = (xs, ys) => xs.map((n, i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("");
  const last = utility[utility.length - 1];
  const said =
    `${column.label}: ${count(entries[entries.length - 1])} entries reach utility ${short(last)}` +
    (bound === null ? "" : `, the bound is ${short(bound)}`);
  const figure = svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": said });
  if (floorEntries) {
    figure.append(
      svg("rect", { class: "floor", x: x(0), y: top, width: x(floorEntries) - x(0), height: high - bottom - top }),
      svg("text", { x: x(0) + 6, y: top + 14 }, "floor"),
    );
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    figure.append(
      svg("line", { class: "rule", x1: left, x2: wide - right, y1: y(part * mostY), y2: y(part * mostY) }),
      svg("text", { class: "end", x: left - 6, y: y(part * mostY) + 4 }, short(part * mostY)),
    );
    const anchor = part === 0 ? "" : part === 1 ? "end" : "middle";
    figure.append(svg("text", { class: anchor, x: x(part * mostX), y: high - bottom + 16 }, count(Math.round(part * mostX))));
  }
  figure.append(svg("text", { class: "middle", x: x(mostX / 2), y: high - 3 }, "entries spent"));
  if (bound !== null) figure.append(svg("path", { class: "bound", d: path([0, mostX], [bound, bound]) }));
  figure.append(
    svg("path", { class: "curve", d: path(entries, utility) }),
    svg("circle", { class: "dot", cx: x(entries[entries.length - 1]), cy: y(last), r: 3.5 }),
  );
  return el("figure", {}, el("figcaption", {}, said), figure);
}

/** Tokens x heads as a picture; go(position, unit) is called where it is clicked. */
function drawOverview(report, go) {
  const shown = view.shown(report);
  const wide = Math.max(1, Math.min(1000, report.width));
  byId("overview").replaceChildren(
    ...shown.map((column) => {
      const canvas = el("canvas", {
        width: wide, height: report.units, role: "img",
        "aria-label": `${column.label}: how finely each stretch of the context is kept in each head`,
        onclick: (event) => {
          const box = canvas.getBoundingClientRect();
          const token = report.first + clamp(Math.floor(((event.clientX - box.left) / box.width) * report.width), report.width);
          go(token, clamp(Math.floor(((event.clientY - box.top) / box.height) * report.units), report.units));
        },
      });
      canvas.getContext("2d").putImageData(picture(column, wide), 0, 0);
      canvas.style.height = `${Math.min(260, Math.max(96, report.units * 2))}px`;
      const frame = el("div", { class: "frame" }, canvas, el("i", { class: "here" }), el("i", { class: "unit" }));
      return el("figure", {}, el("figcaption", {}, column.label), frame);
    }),
  );
}

function picture(column, wide) {
  return column.cached(`picture ${wide}`, () => {
    const report = column.report;
    const image = new ImageData(wide, report.units);
    const share = new Float32Array(wide);
    const size = new Float32Array(wide);
    const pixel = (token) => Math.min(wide - 1, Math.floor(((token - report.first) * wide) / report.width));
    for (let token = report.first; token < report.last; token++) size[pixel(token)] += 1;
    for (let unit = 0; unit < report.units; unit++) {
      share.fill(0);
      column.eachPiece(unit, (kind, first, tokens) => {
        const part = kind === MERGED ? 1 / tokens : kind;
        if (part) for (let token = first; token < first + tokens; token++) share[pixel(token)] += part;
      });
      for (let at = 0; at < wide; at++) {
        // The square root brightens coarse entries, which are most of a compressed cache.
        image.data.set([...viridis(Math.sqrt(share[at] / (size[at] || 1))), 255], 4 * (unit * wide + at));
      }
    }
    return image;
  });
}

/** Frame the part of the text in the window, and the chosen heads. */
function markOverview(report, from, until) {
  for (const here of document.querySelectorAll("#overview .here")) {
    here.style.left = percent(Math.max(0, (from - report.first) / report.width), 2);
    here.style.width = percent(Math.max(0.002, (Math.min(until, report.last) - Math.max(from, report.first)) / report.width), 2);
    here.hidden = until <= report.first || from >= report.last;
  }
  const units = view.units(report);
  for (const mark of document.querySelectorAll("#overview .unit")) {
    mark.style.top = percent(units[0] / report.units, 3);
    mark.style.height = percent(units.length / report.units, 3);
    mark.hidden = view.mode === "all";
  }
}
