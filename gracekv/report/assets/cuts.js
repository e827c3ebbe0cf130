// What became of the answer's own tokens: a picture of cuts and tokens, and the text after one cut.

const PROMPT_SHARE = 0.3; // most of the picture's width that the prompt takes

function drawCuts(report) {
  const cuts = report.cuts;
  byId("cutsSection").hidden = !cuts;
  if (!cuts) return;
  const rows = cuts.lengths.length;
  byId("cutsHint").textContent = rows
    ? `${count(rows)} cuts. Each row is the cache after a cut, the first on top; each column is a token. ` +
      "Brighter means that more heads hold the token as an entry of its own. Click a row or move the slider to see the text as that cut left it: more heads hold a word with a stronger shade."
    : "Decoding never reached the limit, so nothing was cut after the text was compressed.";
  byId("cuts").hidden = !rows;
  if (!rows) return;
  const line = Math.min(PROMPT_SHARE, cuts.first / cuts.length);
  const place = (position) =>
    position <= cuts.first ? (line * position) / cuts.first : line + ((1 - line) * (position - cuts.first)) / (cuts.length - cuts.first);
  const token = (x) =>
    clamp(Math.floor(x < line ? (x / line) * cuts.first : cuts.first + ((x - line) / (1 - line)) * (cuts.length - cuts.first)), cuts.length);

  const canvas = byId("cutsPicture");
  const wide = Math.min(1200, Math.max(200, cuts.length));
  Object.assign(canvas, { width: wide, height: rows });
  canvas.setAttribute("aria-label", `In how many heads each token is held after each of ${rows} cuts`);
  canvas.style.height = `${Math.min(280, Math.max(48, rows * 14))}px`;
  canvas.getContext("2d").putImageData(cutsImage(cuts, wide, token), 0, 0);
  byId("cutsLine").style.left = percent(line, 3);
  byId("cutsPrompt").style.width = percent(line, 3);

  const slider = byId("cut");
  slider.max = rows;
  slider.value = rows;
  const choose = () => {
    const cut = slider.value - 1;
    byId("cutShown").value = `${slider.value} of ${rows}`;
    byId("cutRow").style.top = percent(cut / rows, 3);
    byId("cutRow").style.height = percent(1 / rows, 3);
    let kept = 0;
    for (let at = cuts.first; at < cuts.lengths[cut]; at++) kept += cuts.heads(cut, at) > 0;
    const written = cuts.lengths[cut] - cuts.first;
    byId("cutSaid").textContent =
      `After cut ${cut + 1}, ${count(kept)} of the ${count(written)} tokens read since the prompt are held in one head or more.`;
    drawCutText(cuts, cut);
  };
  slider.addEventListener("input", choose);
  canvas.addEventListener("click", (event) => {
    slider.value = 1 + cutAt(canvas, event, rows);
    choose();
  });
  const hide = () => (byId("tip").hidden = true);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    cutTip(cuts, cutAt(canvas, event, rows), token((event.clientX - box.left) / box.width), event);
  });
  byId("cutText").addEventListener("pointermove", (event) => {
    const word = event.target.closest(".t");
    if (word && event.pointerType !== "touch") cutTip(cuts, slider.value - 1, Number(word.dataset.t), event);
    else hide();
  });
  for (const name of ["cutsPicture", "cutText"]) byId(name).addEventListener("pointerleave", hide);
  const stops = VIRIDIS.map((_, i) => `rgb(${viridis(i / (VIRIDIS.length - 1))})`);
  byId("cutsScale").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  byId("cutsMost").textContent = `all ${count(report.units)} heads`;
  choose();
}

function cutAt(canvas, event, rows) {
  const box = canvas.getBoundingClientRect();
  return clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), rows);
}

/** A pixel is the mean of its tokens; empty where they were not written yet. */
function cutsImage(cuts, wide, token) {
  const image = new ImageData(wide, cuts.lengths.length);
  for (let at = 0; at < wide; at++) {
    const from = token(at / wide);
    const until = Math.max(from + 1, token((at + 1) / wide));
    cuts.lengths.forEach((length, cut) => {
      let sum = 0;
      for (let position = from; position < until; position++) sum += cuts.heads(cut, position) ?? 0;
      const share = sum / (until - from) / cuts.report.units;
      // The square root brightens old tokens, which few heads hold.
      if (from < length) image.data.set([...viridis(Math.sqrt(share)), 255], 4 * (cut * wide + at));
    });
  }
  return image;
}

/** The text since the prompt, as far as it was written before the cut. */
function drawCutText(cuts, cut) {
  const words = [];
  for (let position = cuts.first; position < cuts.lengths[cut]; position++) {
    const text = cuts.token(position);
    const sign = text === "" ? "bytes" : /^[\n\r]/.test(text) ? "break" : null;
    const shade = Math.round(8 * Math.sqrt(cuts.heads(cut, position) / cuts.report.units));
    words.push(el("span", { class: `t a${shade}`, "data-t": position, "data-sign": sign }, text));
  }
  byId("cutText").replaceChildren(...words);
}

function cutTip(cuts, cut, position, event) {
  const heads = cuts.heads(cut, position);
  const near = (from, until) => {
    let text = "";
    for (let at = Math.max(0, from); at < Math.min(until, cuts.length); at++) text += cuts.token(at);
    return text;
  };
  const said =
    heads === null
      ? `not written yet at cut ${cut + 1}`
      : `held in ${count(heads)} of ${count(cuts.report.units)} heads after cut ${cut + 1}`;
  byId("tip").replaceChildren(
    el("b", {}, visible(cuts.token(position))),
    el("span", { class: "place" }, ` #${position}, ${position < cuts.first ? "prompt" : "read since"}`),
    el("p", {}, said),
    el("span", { class: "place" }, `… ${near(position - 6, position)}`, el("mark", {}, cuts.token(position)), `${near(position + 1, position + 7)} …`),
  );
  showTip(event);
}
