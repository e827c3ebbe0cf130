// Wires controls, figures and text together.

function choices(select, report, none) {
  if (none) select.append(el("option", { value: -1 }, "nothing"));
  report.columns.forEach((column, number) => select.append(el("option", { value: number }, column.label)));
}

async function start() {
  const report = await Report.load();
  drawSummary(report);
  drawAuction(report);
  drawCuts(report);
  const several = report.columns.length > 1;
  view.right = several ? 1 : -1;
  // Start with the head that has the most entries in the first column: it shows the most.
  const entries = report.columns[0].accounting.entries.flat();
  const best = entries.indexOf(Math.max(...entries));
  [view.layer, view.head] = [Math.floor(best / report.heads), best % report.heads];

  byId("layer").max = report.layers - 1;
  byId("head").max = report.heads - 1;
  choices(byId("left"), report, false);
  choices(byId("right"), report, true);
  byId("leftChoice").hidden = byId("rightChoice").hidden = !several;
  byId("slotsChoice").hidden = report.columns.every((x) => !x.slots);

  const chooseHead = (layer, head) => {
    Object.assign(view, { mode: "head", layer, head });
    refresh();
  };
  const chooseToken = (position, move = false) => {
    view.cursor = position;
    words.repaint();
    words.point(position, move);
    drawInspector(report, chooseToken);
  };
  const words = new Words(report, (position) => chooseToken(position));
  drawMaps(report, chooseHead);
  const track = () => markOverview(report, ...words.window());

  /** Everything that depends on the heads that are shown. */
  const refresh = () => {
    document.querySelector(`[name=mode][value=${view.mode}]`).checked = true;
    byId("layer").value = view.layer;
    byId("head").value = view.head;
    byId("layerShown").value = view.mode === "all" ? "all" : report.layerName(view.layer);
    byId("headShown").value = view.mode === "head" ? view.head : "all";
    byId("layer").disabled = view.mode === "all";
    byId("head").disabled = view.mode !== "head";
    byId("left").value = view.left;
    byId("right").value = view.right;
    markMaps(report);
    drawResolution(report);
    drawLegend(report);
    words.repaint();
    drawInspector(report, chooseToken);
    track();
  };
  /** Everything that depends on the columns that are shown. */
  const relay = () => {
    drawOverview(report, (position, unit) => {
      if (view.mode === "head") chooseHead(Math.floor(unit / report.heads), unit % report.heads);
      chooseToken(position, true);
    });
    words.layOut();
    refresh();
  };

  for (const radio of document.querySelectorAll("[name=mode]")) {
    radio.addEventListener("change", () => {
      view.mode = radio.value;
      refresh();
    });
  }
  for (const name of ["layer", "head"]) {
    byId(name).addEventListener("input", () => {
      view[name] = Number(byId(name).value);
      refresh();
    });
  }
  for (const side of ["left", "right"]) {
    byId(side).addEventListener("change", () => {
      view[side] = Number(byId(side).value);
      relay();
    });
  }
  byId("slots").addEventListener("change", () => {
    view.slots = byId("slots").checked;
    drawLegend(report);
    words.repaint();
  });
  byId("extra").addEventListener("click", () => {
    const open = byId("controls").classList.toggle("open");
    byId("extra").setAttribute("aria-expanded", String(open));
  });
  // Elements that stick below the controls need their height.
  new ResizeObserver(([{ borderBoxSize: [box] }]) => {
    document.documentElement.style.setProperty("--bar", `${box.blockSize}px`);
  }).observe(byId("controls"));
  byId("inspector").addEventListener("click", (event) => {
    const unit = event.target.dataset.unit;
    if (unit !== undefined) chooseHead(Math.floor(unit / report.heads), unit % report.heads);
  });
  followKeys(report, words, chooseHead, chooseToken);
  followPointer(report);
  followSearch(report, () => words.repaint(), chooseToken);
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      track();
    });
  }, { passive: true });
  relay();
  document.documentElement.dataset.ready = "true";
}

function followKeys(report, words, chooseHead, chooseToken) {
  byId("words").addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") return void chooseToken(-1);
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (event.shiftKey) {
      // Upwards is the next layer, as in a stack of layers.
      chooseHead(clamp(view.layer - step[1], report.layers), clamp(view.head + step[0], report.heads));
    } else if (view.cursor < 0) {
      chooseToken(clamp(Math.round(words.window()[0]), report.length), true);
    } else if (step[0]) {
      chooseToken(clamp(view.cursor + step[0], report.length), true);
    } else {
      chooseToken(words.vertical(view.cursor, step[1]), true);
    }
  });
}

function followPointer(report) {
  const tip = byId("tip");
  const hide = () => (tip.hidden = true);
  byId("words").addEventListener("pointermove", (event) => {
    const word = event.target.closest(".t");
    if (!word || event.pointerType === "touch") return hide();
    const pane = word.parentNode;
    const at = [...pane.parentNode.children].indexOf(pane);
    drawTip(report, Number(word.dataset.t), view.shown(report)[at]);
    showTip(event);
  });
  byId("words").addEventListener("pointerleave", hide);
  addEventListener("scroll", hide, { passive: true });
}

/** Show the tip, as it was filled, near the pointer and inside the window. */
function showTip(event) {
  const tip = byId("tip");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  const below = event.clientY + 20;
  tip.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 12 : below}px`;
}

function followSearch(report, repaint, chooseToken) {
  let lower = null;
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const query = byId("query").value;
    const said = byId("found");
    view.match = [-1, -1];
    said.value = "";
    repaint();
    const number = /^#\s*(\d+)$/.exec(query.trim());
    if (number) {
      const position = Number(number[1]);
      if (position < report.length) chooseToken(position, true);
      else said.value = `the last token is #${report.length - 1}`;
      return;
    }
    if (!query) return;
    lower ??= report.text.toLowerCase();
    // A few letters change length with case; positions would then not match.
    const same = lower.length === report.text.length;
    const plain = same ? lower : report.text;
    const words = same ? query.toLowerCase() : query;
    const places = [];
    for (let at = plain.indexOf(words); at >= 0; at = plain.indexOf(words, at + words.length)) places.push(at);
    if (!places.length) return void (said.value = "not in the prompt");
    // The first one behind the cursor, or the first of all.
    const from = view.cursor < 0 ? 0 : report.begins[view.cursor + 1];
    const turn = Math.max(0, places.findIndex((at) => at >= from));
    const at = places[turn];
    const token = report.tokenAt(at);
    view.match = [token, report.tokenAt(at + words.length - 1) + 1];
    said.value = `${turn + 1} of ${places.length}, token #${token}`;
    chooseToken(token, true);
  });
}

start().catch((error) => {
  byId("problem").textContent = `The report cannot be shown: ${error.message}`;
  byId("problem").hidden = false;
});
