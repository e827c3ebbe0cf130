// The prompt's text, token by token. Only the blocks near the window are in the document; others
// are empty boxes of their last or estimated height.

const NEAR = 900; // pixels above and below the window that are drawn
const SHORT = 220; // tokens after which a block ends at the next line break
const LONG = 480; // tokens after which it ends at the next blank

class Words {
  constructor(report, choose) {
    this.report = report;
    this.box = byId("words");
    this.blocks = this.cut();
    this.rows = [];
    this.seen = new Set();
    this.watch = new IntersectionObserver((changes) => this.scrolled(changes), { rootMargin: `${NEAR}px 0px` });
    this.layOut();
    this.box.addEventListener("click", (event) => {
      const word = event.target.closest(".t");
      if (word && String(getSelection()) === "") choose(Number(word.dataset.t));
    });
    this.width = this.box.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(this.box.clientWidth - this.width) > 2) this.layOut();
    }).observe(this.box);
    // A printer needs all blocks, not only those near the window.
    addEventListener("beforeprint", () => this.rows.forEach((_, number) => this.fill(number)));
  }

  /** [first token, token after the last, part of the prompt] of each block. */
  cut() {
    const report = this.report;
    const blocks = [];
    const borders = [0, report.contextStart, report.contextEnd, report.length];
    for (let part = 0; part < 3; part++) {
      let begin = borders[part];
      for (let token = begin; token < borders[part + 1]; token++) {
        const size = token + 1 - begin;
        if (size < SHORT) continue;
        const text = report.token(token);
        const next = token + 1 < report.length ? report.token(token + 1) : "";
        if (text.includes("\n") || (size >= LONG && /^\s/.test(next)) || size >= 2 * LONG) {
          blocks.push([begin, token + 1, part]);
          begin = token + 1;
        }
      }
      if (begin < borders[part + 1]) blocks.push([begin, borders[part + 1], part]);
    }
    return blocks;
  }

  /** Empty boxes for all blocks, filled near the window; what was being read stays in its place. */
  layOut() {
    const read = this.rows.findIndex((row) => row.getBoundingClientRect().bottom > 0);
    const old = read < 0 ? null : this.rows[read].getBoundingClientRect();
    this.watch.disconnect();
    this.seen.clear();
    this.width = this.box.clientWidth;
    const shown = view.shown(this.report);
    this.box.classList.toggle("two", shown.length === 2);
    byId("names").classList.toggle("two", shown.length === 2);
    byId("names").replaceChildren(...shown.map((x) => el("span", {}, x.label)));
    const names = ["Before the context: kept whole in every head", "Context", "Question and the rest: kept whole in every head"];
    let part = -1;
    this.rows = this.blocks.map(([begin, end, at], number) => {
      const row = el("div", { class: "row", "data-block": number });
      if (at !== part) row.dataset.part = names[at];
      part = at;
      row.style.height = `${this.guess(begin, end)}px`;
      return row;
    });
    this.box.replaceChildren(...this.rows);
    if (old && old.top < 0) {
      this.fill(read);
      const now = this.rows[read].getBoundingClientRect();
      scrollBy({ top: now.top - (old.top / old.height) * now.height, behavior: "instant" });
    }
    const places = this.rows.map((row) => row.getBoundingClientRect());
    places.forEach((at, number) => {
      if (at.bottom > -NEAR && at.top < innerHeight + NEAR) this.fill(number);
    });
    this.rows.forEach((row) => this.watch.observe(row));
  }

  /** The estimated height of a block. */
  guess(begin, end) {
    const panes = this.box.classList.contains("two") && matchMedia("(min-width: 760px)").matches ? 2 : 1;
    const letters = Math.max(12, this.width / panes / 7.6);
    const lines = this.report.span(begin, end).split("\n");
    const high = lines.reduce((sum, text) => sum + Math.max(1, Math.ceil(text.length / letters)), 0);
    return Math.ceil(high * 27 * (view.shown(this.report).length / panes));
  }

  scrolled(changes) {
    for (const { target, isIntersecting, boundingClientRect } of changes) {
      const number = Number(target.dataset.block);
      if (isIntersecting) this.fill(number);
      else if (this.seen.delete(number)) {
        target.style.height = `${boundingClientRect.height}px`;
        target.replaceChildren();
      }
    }
  }

  fill(number) {
    if (this.seen.has(number)) return;
    this.seen.add(number);
    const row = this.rows[number];
    const [begin, end] = this.blocks[number];
    row.replaceChildren(
      ...view.shown(this.report).map((column) => {
        const pane = el("div", { class: "pane", "data-label": column.label });
        for (let token = begin; token < end; token++) {
          const text = this.report.token(token);
          // Line breaks are shown as a sign, so that they can be pointed at.
          const sign = text === "" ? "bytes" : /^[\n\r]/.test(text) ? "break" : null;
          const word = el("span", { "data-t": token, "data-sign": sign }, text);
          pane.append(word);
        }
        return pane;
      }),
    );
    row.style.height = "";
    this.paint(number);
  }

  /** The shades of one block in the current view. */
  paint(number) {
    const shown = view.shown(this.report);
    this.rows[number].querySelectorAll(".pane").forEach((pane, at) => {
      const shade = shader(this.report, shown[at]);
      for (const word of pane.children) {
        const name = shade(Number(word.dataset.t));
        if (word.className !== name) word.className = name;
      }
    });
  }

  repaint() {
    for (const number of this.seen) this.paint(number);
  }

  blockOf(token) {
    return this.blocks.findIndex(([begin, end]) => begin <= token && token < end);
  }

  words(token) {
    return this.box.querySelectorAll(`[data-t="${token}"]`);
  }

  /** Mark the cursor; with `move`, bring it into the window. */
  point(token, move) {
    for (const word of this.box.querySelectorAll(".cursor")) word.classList.remove("cursor");
    if (token < 0) return;
    if (move) {
      const number = this.blockOf(token);
      for (const near of [number - 1, number, number + 1]) if (this.rows[near]) this.fill(near);
    }
    const found = this.words(token);
    for (const word of found) word.classList.add("cursor");
    if (!move || !found.length) return;
    const place = found[0].getBoundingClientRect();
    const top = byId("controls").getBoundingClientRect().bottom + 40;
    const bottom = innerHeight - (matchMedia("(min-width: 1100px)").matches ? 40 : innerHeight * 0.42);
    if (place.top < top || place.bottom > bottom) {
      scrollBy({ top: place.top - (top + bottom) / 2, behavior: "instant" });
    }
  }

  /** First and last token in the window. */
  window() {
    const seen = [...this.seen].sort((a, b) => a - b).filter((number) => {
      const box = this.rows[number].getBoundingClientRect();
      return box.bottom > 0 && box.top < innerHeight;
    });
    if (!seen.length) return [0, 0];
    const part = (number, edge) => {
      const box = this.rows[number].getBoundingClientRect();
      const [begin, end] = this.blocks[number];
      return begin + (end - begin) * Math.min(1, Math.max(0, (edge - box.top) / (box.height || 1)));
    };
    return [part(seen[0], 0), part(seen[seen.length - 1], innerHeight)];
  }

  /** The token a line above or below, nearest across. */
  vertical(token, down) {
    const [from] = this.words(token);
    if (!from) return token;
    const at = from.getClientRects()[0];
    let best = token;
    let least = Infinity;
    let row = null;
    for (let next = token + down; next >= 0 && next < this.report.length && Math.abs(next - token) < 400; next += down) {
      const [word] = this.words(next);
      const box = word?.getClientRects()[0];
      if (!box) break;
      const away = (box.top - at.top) * down;
      if (away < 4) continue;
      row ??= box.top;
      if (Math.abs(box.top - row) > 4) break;
      const across = Math.abs(box.left - at.left);
      if (across < least) [best, least] = [next, across];
    }
    return best;
  }
}

/** The meaning of the shades in the current view. */
function drawLegend(report) {
  const sample = (name, text) => el("span", { class: `t ${name}` }, text);
  const parts =
    view.mode === "head"
      ? [
          [[sample("n1", "exact")], "its own entry"],
          [[sample("n2 begin", "2"), sample("n5 begin", "16"), sample("n8 begin", "65")], "tokens merged in one entry"],
          [[sample("n0", "dropped")], ""],
        ]
      : [[[..."012345678"].map((step) => sample(`a${step}`, ((step / 8) ** 2).toFixed(2))), `entries per token, mean of ${view.scope(report)}`]];
  parts.push([[sample("kept", "outside")], "the context, kept whole"]);
  if (view.slots && view.shown(report).some((x) => x.slots)) parts.push([[sample("slot", "slot")], "begins here"]);
  byId("legend").replaceChildren(...parts.map(([samples, said]) => el("span", {}, ...samples, ` ${said}`)));
}

/** A function from token to class names, for one column in the current view. */
function shader(report, column) {
  const units = view.units(report);
  const borders = view.slots && column.slots ? new Set(column.slots) : null;
  const border = (token) => (borders?.has(token) ? " slot" : "");
  const [from, until] = view.match;
  const cursor = (token) =>
    (token >= from && token < until ? " match" : "") + (token === view.cursor ? " cursor" : "");
  const fixed = (token) => token < report.first || token >= report.last;
  if (view.mode === "head") {
    const { length, start } = column.lengths(units[0]);
    return (token) => {
      if (fixed(token)) return `t kept${cursor(token)}`;
      const tokens = length[token - report.first];
      const begins = tokens > 1 && start[token - report.first] === token ? " begin" : "";
      return `t n${binOf(tokens)}${begins}${border(token)}${cursor(token)}`;
    };
  }
  const { share } = column.means(units);
  return (token) => {
    if (fixed(token)) return `t kept${cursor(token)}`;
    return `t a${Math.round(8 * Math.sqrt(share[token - report.first]))}${border(token)}${cursor(token)}`;
  };
}
