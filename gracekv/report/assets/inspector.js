// What became of one token: the tip under the pointer, and the panel of the chosen token.

/** A sentence on a token in one head. */
function story(report, outcome, fate) {
  if (fate.kept) return "kept whole in every head";
  if (fate.state === "dropped") return "dropped";
  const others = fate.end - fate.start - 1;
  if (!others) return outcome.represents === "mixture" ? "kept; parts of dropped tokens may have been added to it" : "exact";
  return `merged with ${others} ${others === 1 ? "neighbour" : "neighbours"}`;
}

/** Name and value of everything known of a token in one head. */
function details(report, outcome, fate, position) {
  const rows = [];
  if (fate.kept) return rows;
  if (fate.state === "merged") {
    rows.push(["entry", `[${fate.start}, ${fate.end})`]);
    rows.push(["multiplicity", `${fate.end - fate.start} tokens, weighs as ${fate.weight.toPrecision(3)}`]);
  }
  if (fate.depth !== null) rows.push(["depth in its tree", String(fate.depth)]);
  if (fate.floor !== null) rows.push(["bought by", fate.floor ? "the floor" : "the auction"]);
  if (fate.relevance !== null) {
    rows.push(["relevance", `${short(fate.relevance)} × the mean${grain(outcome)}`]);
    if (fate.state === "merged") rows.push(["entry's relevance", `${percent(fate.share, 2)} of the head's`]);
  }
  const slot = outcome.slotOf(position);
  if (slot) rows.push(["slot", `${slot[0]}, [${slot[1]}, ${slot[2]})`]);
  if (!rows.length && fate.state === "exact") rows.push(["entry", "the token's own key and value"]);
  return rows;
}

/** What relevance was averaged over to keep the page small. */
function grain(outcome) {
  if (outcome.relevance.layers === 1 && outcome.report.layers > 1) return " (all heads)";
  return outcome.relevance.heads === 1 && outcome.report.heads > 1 ? " (layer)" : "";
}

function visible(text) {
  if (text === "") return "part of a character";
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
}

function facts(rows) {
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** How many heads keep, merge, drop the token, in words. */
function tally(report, outcome, position) {
  const units = view.units(report);
  if (position < report.first || position >= report.last) return "kept whole in every head";
  const { exact, merged } = outcome.means(units);
  const at = position - report.first;
  const gone = units.length - exact[at] - merged[at];
  return `exact in ${exact[at]} of ${units.length} heads, merged in ${merged[at]}, dropped in ${gone}`;
}

function drawTip(report, position, outcome) {
  const tip = byId("tip");
  const head = view.mode === "head" ? outcome.fate(view.units(report)[0], position) : null;
  tip.replaceChildren(
    el("b", {}, visible(report.token(position))),
    el("span", { class: "place" }, ` #${position}`),
    el("p", {}, head ? story(report, outcome, head) : tally(report, outcome, position)),
    head ? facts(details(report, outcome, head, position)) : "",
  );
}

function drawInspector(report, choose) {
  const panel = byId("inspector");
  const position = view.cursor;
  if (position < 0) {
    panel.className = "";
    panel.replaceChildren(el("p", { class: "hint" }, "No token is chosen yet. Click one, or search for the words of the answer: here you then see which entry absorbed them in every layer and head."));
    return;
  }
  panel.className = "open";
  const lead = el(
    "p",
    { class: "lead" },
    el("b", {}, visible(report.token(position))),
    el("span", { class: "place" }, ` #${position}, ${report.partOf(position)}`),
  );
  const close = el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => choose(-1) }, "×");
  const parts = view.shown(report).map((outcome) => {
    const fate = outcome.fate(view.layer * report.heads + view.head, position);
    const one = view.mode === "head";
    const where = one ? `layer ${view.layer}, head ${view.head}` : view.scope();
    const said = el("p", {}, el("span", { class: `state ${one ? fate.state : ""}` }, one ? story(report, outcome, fate) : tally(report, outcome, position)), ` in ${where}`);
    const merged = one && fate.state === "merged";
    return el(
      "section",
      { "data-label": outcome.label },
      el("h3", {}, outcome.label),
      said,
      one ? facts(details(report, outcome, fate, position)) : null,
      merged ? el("blockquote", {}, passage(report, fate, position)) : null,
      heads(report, outcome, position),
    );
  });
  panel.replaceChildren(close, lead, ...parts);
  // Read aloud from a place of its own, which stays in the document as screen readers want it.
  const said = parts.map((part) => `${part.dataset.label}: ${part.querySelector("p").textContent}`);
  byId("announce").textContent = `${visible(report.token(position))}, token ${position}. ${said.join(". ")}`;
}

/** The text of a merged entry, the token marked. */
function passage(report, fate, position) {
  const most = 60;
  const from = Math.max(fate.start, position - most);
  const until = Math.min(fate.end, position + 1 + most);
  return el(
    "span",
    {},
    from > fate.start ? "… " : "",
    report.span(from, position),
    el("mark", {}, report.token(position)),
    report.span(position + 1, until),
    until < fate.end ? " …" : "",
  );
}

/** The token in every layer and head: a small grid, and the same as a table. */
function heads(report, outcome, position) {
  const fates = [...Array(report.units).keys()].map((unit) => outcome.fate(unit, position));
  if (fates[0].kept) return null;
  const tallied = STATES.map((state) => fates.filter((fate) => fate.state === state).length);
  const grid = el("div", { class: "fates", "aria-hidden": "true" });
  grid.style.setProperty("--layers", report.layers);
  for (let head = 0; head < report.heads; head++) {
    for (let layer = 0; layer < report.layers; layer++) {
      const unit = layer * report.heads + head;
      const fate = fates[unit];
      const bin = fate.state === "merged" ? binOf(fate.end - fate.start) : STATES.indexOf(fate.state);
      const now = view.mode === "head" && layer === view.layer && head === view.head ? " now" : "";
      grid.append(el("i", { class: `n${bin}${now}`, "data-unit": unit, title: `layer ${layer}, head ${head}: ${story(report, outcome, fate)}` }));
    }
  }
  const table = el("details", {}, el("summary", {}, `Table of ${report.units} heads`));
  table.addEventListener("toggle", () => {
    if (!table.open || table.children.length > 1) return;
    table.append(el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "All heads" }, fateTable(report, outcome, fates)));
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

function fateTable(report, outcome, fates) {
  const columns = ["layer", "head", "state", "entry", "tokens", "weighs", "depth", "relevance"];
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
    el(
      "tbody",
      {},
      ...fates.map((fate, unit) => {
        const gone = fate.state === "dropped";
        const cells = [
          Math.floor(unit / report.heads),
          unit % report.heads,
          fate.state,
          gone ? "–" : `[${fate.start}, ${fate.end})`,
          gone ? "–" : fate.end - fate.start,
          gone ? "–" : fate.weight.toPrecision(3),
          fate.depth ?? "–",
          fate.relevance === null ? "–" : short(fate.relevance),
        ];
        return el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))));
      }),
    ),
  );
}
