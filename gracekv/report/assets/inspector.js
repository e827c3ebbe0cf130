// What became of one token: the tip under the pointer, and the panel of the chosen token.

/** A sentence on a token in one head. */
function describe(report, column, status) {
  if (status.kept) return "kept whole in every head";
  if (status.state === "dropped") return "dropped";
  const others = status.end - status.start - 1;
  if (!others && column.represents === "mixture") return "kept; parts of dropped tokens may have been added to it";
  if (!others) return status.bits && status.bits < 16 ? `kept in ${status.bits} bits` : "exact";
  return `merged with ${others} ${others === 1 ? "neighbour" : "neighbours"}`;
}

/** Name and value of everything known of a token in one head. */
function details(report, column, status, position) {
  const rows = [];
  if (status.kept) return rows;
  if (status.state === "merged") {
    rows.push(["entry", `[${status.start}, ${status.end})`]);
    rows.push(["multiplicity", `${status.end - status.start} tokens, weighs as ${status.weight.toPrecision(3)}`]);
  }
  if (status.bits) rows.push(["stored in", `${status.bits} bits per number`]);
  if (status.change !== null) {
    rows.push(["value moved by the fit", status.change >= 2.55 ? "by 255 % of its length or more" : `by ${Math.round(100 * status.change)} % of its length`]);
  }
  if (status.state === "exact" && column.masses) rows.push(["multiplicity", `weighs as ${status.weight.toPrecision(3)} tokens`]);
  if (status.depth !== null) rows.push(["depth in its tree", String(status.depth)]);
  if (status.floor !== null) rows.push(["bought by", status.floor ? "the floor" : "the auction"]);
  if (status.relevance !== null) {
    rows.push(["relevance", `${short(status.relevance)} × the mean${averagedOver(column)}`]);
    if (status.state === "merged") rows.push(["entry's relevance", `${percent(status.share, 2)} of the head's`]);
  }
  const slot = column.slotOf(position);
  if (slot) rows.push(["slot", `${slot[0]}, [${slot[1]}, ${slot[2]})`]);
  if (!rows.length && status.state === "exact") rows.push(["entry", "the token's own key and value"]);
  return rows;
}

/** What relevance was averaged over to keep the page small. */
function averagedOver(column) {
  if (column.relevance.layers === 1 && column.report.layers > 1) return " (all heads)";
  return column.relevance.heads === 1 && column.report.heads > 1 ? " (layer)" : "";
}

function visible(text) {
  if (text === "") return "part of a character";
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
}

function facts(rows) {
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** How many heads keep, merge, drop the token, in words. */
function countStates(report, column, position) {
  const units = view.units(report);
  if (position < report.first || position >= report.last) return "kept whole in every head";
  const { exact, merged } = column.means(units);
  const at = position - report.first;
  const gone = units.length - exact[at] - merged[at];
  return `exact in ${exact[at]} of ${units.length} heads, merged in ${merged[at]}, dropped in ${gone}`;
}

function drawTip(report, position, column) {
  const tip = byId("tip");
  const head = view.mode === "head" ? column.status(view.units(report)[0], position) : null;
  tip.replaceChildren(
    el("b", {}, visible(report.token(position))),
    el("span", { class: "place" }, ` #${position}`),
    el("p", {}, head ? describe(report, column, head) : countStates(report, column, position)),
    head ? facts(details(report, column, head, position)) : "",
  );
}

function drawInspector(report, choose) {
  const panel = byId("inspector");
  const position = view.cursor;
  if (position < 0) {
    panel.className = "";
    panel.replaceChildren(el("p", { class: "hint" }, "No token is chosen yet. Click one, or search for the words of the answer: this panel then shows the entry that holds it in every layer and head."));
    return;
  }
  panel.className = "open";
  const lead = el(
    "p",
    { class: "lead" },
    el("b", {}, visible(report.token(position))),
    el("span", { class: "place" }, ` #${position}, ${report.partOf(position)}`),
  );
  const closed = () => {
    choose(-1);
    // The button is gone; keys go on in the text.
    byId("words").focus({ preventScroll: true });
  };
  const close = el("button", { type: "button", class: "close", "aria-label": "Close", onclick: closed }, "×");
  const parts = view.shown(report).map((column) => {
    const status = column.status(view.layer * report.heads + view.head, position);
    const one = view.mode === "head";
    const where = view.scope(report);
    const said = el("p", {}, el("span", { class: `state ${one ? status.state : ""}` }, one ? describe(report, column, status) : countStates(report, column, position)), ` in ${where}`);
    const merged = one && status.state === "merged";
    return el(
      "section",
      { "data-label": column.label },
      el("h3", {}, column.label),
      said,
      one ? facts(details(report, column, status, position)) : null,
      merged ? el("blockquote", {}, passage(report, status, position)) : null,
      heads(report, column, position),
    );
  });
  // Tables that were open stay so for the next token.
  const open = [...panel.querySelectorAll("details[open]")].map((table) => table.closest("section").dataset.label);
  panel.replaceChildren(close, lead, ...parts);
  for (const part of parts) {
    if (open.includes(part.dataset.label)) part.querySelector("details")?.setAttribute("open", "");
  }
  // Announced from a separate element that stays in the document, as screen readers need it.
  const said = parts.map((part) => `${part.dataset.label}: ${part.querySelector("p").textContent}`);
  byId("announce").textContent = `${visible(report.token(position))}, token ${position}. ${said.join(". ")}`;
}

/** The text of a merged entry, the token marked. */
function passage(report, status, position) {
  const most = 60;
  const from = Math.max(status.start, position - most);
  const until = Math.min(status.end, position + 1 + most);
  return el(
    "span",
    {},
    from > status.start ? "… " : "",
    report.span(from, position),
    el("mark", {}, report.token(position)),
    report.span(position + 1, until),
    until < status.end ? " …" : "",
  );
}

/** The token in every layer and head: a small grid, and the same as a table. */
function heads(report, column, position) {
  const statuses = [...Array(report.units).keys()].map((unit) => column.status(unit, position));
  if (statuses[0].kept) return null;
  const tallied = STATES.map((state) => statuses.filter((status) => status.state === state).length);
  const grid = el("div", { class: "statuses", "aria-hidden": "true" });
  grid.style.setProperty("--layers", report.layers);
  for (let head = 0; head < report.heads; head++) {
    for (let layer = 0; layer < report.layers; layer++) {
      const unit = layer * report.heads + head;
      const status = statuses[unit];
      const bin = status.state === "merged" ? binOf(status.end - status.start) : STATES.indexOf(status.state);
      const now = view.mode === "head" && layer === view.layer && head === view.head ? " now" : "";
      grid.append(el("i", { class: `n${bin}${now}`, "data-unit": unit, title: `layer ${report.layerName(layer)}, head ${head}: ${describe(report, column, status)}` }));
    }
  }
  const table = el("details", {}, el("summary", {}, `Table of ${report.units} heads`));
  table.addEventListener("toggle", () => {
    if (!table.open || table.children.length > 1) return;
    table.append(el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "All heads" }, statusTable(report, column, statuses)));
  });
  const [dropped, exact, merged] = tallied;
  return el(
    "div",
    {},
    el("p", { class: "tally" }, `All layers and heads: exact in ${exact}, merged in ${merged}, dropped in ${dropped}. Columns are layers, rows heads.`),
    grid,
    table,
  );
}

function statusTable(report, column, statuses) {
  const titles = ["layer", "head", "state", "entry", "tokens", "weighs", ...(column.bits ? ["bits"] : []), ...(column.changes ? ["value moved"] : []), "depth", "relevance"];
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...titles.map((name) => el("th", { scope: "col" }, name)))),
    el(
      "tbody",
      {},
      ...statuses.map((status, unit) => {
        const gone = status.state === "dropped";
        const cells = [
          report.layerName(Math.floor(unit / report.heads)),
          unit % report.heads,
          status.state,
          gone ? "–" : `[${status.start}, ${status.end})`,
          gone ? "–" : status.end - status.start,
          gone ? "–" : status.weight.toPrecision(3),
          ...(column.bits ? [status.bits ?? "–"] : []),
          ...(column.changes ? [status.change === null ? "–" : `${Math.round(100 * status.change)} %`] : []),
          status.depth ?? "–",
          status.relevance === null ? "–" : short(status.relevance),
        ];
        return el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))));
      }),
    ),
  );
}
