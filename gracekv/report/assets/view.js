// What is shown now, and small helpers to draw it. Text from the prompt only ever goes in as text
// nodes and attributes, never as markup.

const view = {
  mode: "head",
  layer: 0,
  head: 0,
  left: 0,
  right: -1,
  slots: true,
  cursor: -1,
  /** First token of what was found, and the one after its last. */
  match: [-1, -1],
  /** Heads that the text is shaded by. */
  units(report) {
    if (this.mode === "all") return [...Array(report.units).keys()];
    const base = this.layer * report.heads;
    if (this.mode === "layer") return [...Array(report.heads).keys()].map((g) => base + g);
    return [base + this.head];
  },
  /** The columns side by side. */
  shown(report) {
    return [this.left, this.right].filter((n) => n >= 0).map((n) => report.columns[n]);
  },
  /** In words. */
  scope(report) {
    if (this.mode === "all") return "all layers and heads";
    if (this.mode === "layer") return `layer ${report.layerName(this.layer)}, all heads`;
    return `layer ${report.layerName(this.layer)}, head ${this.head}`;
  },
};

function put(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function el(tag, properties = {}, ...children) {
  return put(document.createElement(tag), properties, children);
}

function svg(tag, properties = {}, ...children) {
  return put(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function byId(id) {
  return document.getElementById(id);
}

const count = (n) => n.toLocaleString("en");
const percent = (x, digits = 1) => `${(100 * x).toFixed(digits)}%`;

/** Three digits, as people write them. */
function short(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(2);
  return size >= 100 ? count(Math.round(x)) : String(Number(x.toPrecision(3)));
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? n : n.toFixed(1)} ${units[unit]}`;
}

// Lengths of merged entries that share a shade; the first two bins are dropped and exact tokens.
const BINS = [2, 4, 8, 16, 32, 64];

/** 0: dropped, 1: exact, 2...: merged, ever coarser. */
function binOf(length) {
  if (length < 2) return length;
  const at = BINS.findIndex((most) => length <= most);
  return 2 + (at < 0 ? BINS.length : at);
}

function binName(bin) {
  if (bin === 0) return "dropped";
  if (bin === 1) return "exact";
  const at = bin - 2;
  if (at === 0) return "2 in one";
  if (at === BINS.length) return `${BINS[at - 1] + 1} or more`;
  return `${BINS[at - 1] + 1}–${BINS[at]} in one`;
}

// Viridis, a scale that survives colour blindness and greyscale. Ten even steps of it.
const VIRIDIS = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37],
];

/** [red, green, blue] at x from 0 to 1. */
function viridis(x) {
  const place = Math.min(1, Math.max(0, x)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return VIRIDIS[low].map((from, i) => Math.round(from + (VIRIDIS[low + 1][i] - from) * (place - low)));
}
