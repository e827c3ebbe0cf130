// Unpacks what gracekv/report/encoding.py encoded. Units: heads are numbered layer * G + head, tokens
// by their absolute position in the prompt.

const DROPPED = 0;
const EXACT = 1;
const MERGED = 2;
const STATES = ["dropped", "exact", "merged"];

/** Everything that was packed, with views into the block of bytes. */
class Report {
  constructor(header, bytes) {
    Object.assign(this, header);
    this.bytes = bytes;
    [this.contextStart, this.contextEnd, this.questionEnd, this.length] = header.spans;
    [this.first, this.last] = header.region;
    this.width = this.last - this.first;
    this.units = this.layers * this.heads;
    this.text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.part("text"));
    this.begins = this.borders("textLengths", this.length);
    this.cuts = header.cuts && new Cuts(this, header.cuts, header.written);
    this.columns = header.columns.map((column, number) => new Column(this, column, number));
  }

  static async load() {
    const header = JSON.parse(document.getElementById("header").textContent);
    const packed = atob(document.getElementById("block").textContent.trim());
    const raw = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) raw[i] = packed.charCodeAt(i);
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser is too old to unpack the report (it needs DecompressionStream).");
    }
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Report(header, new Uint8Array(await new Response(stream).arrayBuffer()));
  }

  has(name) {
    return name in this.parts;
  }

  part(name) {
    const [offset, size] = this.parts[name];
    return this.bytes.subarray(offset, offset + size);
  }

  numbers(name) {
    const [offset, size] = this.parts[name];
    return new Uint32Array(this.bytes.buffer, this.bytes.byteOffset + offset, size / 4);
  }

  /** The start of each of so many tokens in their text, and the end of the last. */
  borders(name, tokens) {
    const begins = new Uint32Array(tokens + 1);
    this.numbers(name).forEach((length, token) => (begins[token + 1] = begins[token] + length));
    return begins;
  }

  token(position) {
    return this.text.slice(this.begins[position], this.begins[position + 1]);
  }

  span(start, end) {
    return this.text.slice(this.begins[start], this.begins[end]);
  }

  /** The token that holds a character of the text. */
  tokenAt(character) {
    let low = 0;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.begins[middle] <= character) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** A layer's number in the model, of which some layers may not be compressed. */
  layerName(layer) {
    return this.modelLayers[layer] ?? layer;
  }

  /** "prefix", "context", "question" or "tail". */
  partOf(position) {
    if (position < this.contextStart) return "prefix";
    if (position < this.contextEnd) return "context";
    return position < this.questionEnd ? "question" : "tail";
  }
}

/** One result: its figures, and what became of every token. */
class Column {
  constructor(report, facts, number) {
    Object.assign(this, facts);
    this.report = report;
    this.number = number;
    this.entryStarts = report.numbers(`entryStarts.${number}`);
    // For each entry: dropped tokens before it, and the number of tokens that it stands for.
    this.gaps = report.numbers(`gaps.${number}`);
    this.sizes = report.numbers(`sizes.${number}`);
    this.origins = report.has(`origins.${number}`) ? report.part(`origins.${number}`) : null;
    // For fitted entries only: how much values changed, in hundredths, and multiplicities in sixteenths of an octave.
    // For others: multiplicity over tokens, in parts of 255.
    this.weights = report.has(`weights.${number}`) ? report.part(`weights.${number}`) : null;
    this.changes = report.has(`changes.${number}`) ? report.part(`changes.${number}`) : null;
    this.bits = report.has(`bits.${number}`) ? report.part(`bits.${number}`) : null;
    this.masses = report.has(`masses.${number}`) ? report.part(`masses.${number}`) : null;
    this.slots = report.has(`slots.${number}`) ? report.numbers(`slots.${number}`) : null;
    this.codes = facts.relevance ? report.part(`relevance.${number}`) : null;
    this.memory = new Map();
  }

  /** Calls visit(kind, first token, tokens, entry) along a head's context, until it returns false. */
  eachPiece(unit, visit) {
    let token = this.report.first;
    for (let entry = this.entryStarts[unit]; entry < this.entryStarts[unit + 1]; entry++) {
      const [gap, tokens] = [this.gaps[entry], this.sizes[entry]];
      if (gap && visit(DROPPED, token, gap, -1) === false) return;
      token += gap;
      if (visit(tokens > 1 ? MERGED : EXACT, token, tokens, entry) === false) return;
      token += tokens;
    }
    if (token < this.report.last) visit(DROPPED, token, this.report.last - token, -1);
  }

  /** The last few results of `make`, by name. */
  cached(name, make) {
    if (!this.memory.has(name)) {
      if (this.memory.size > 24) this.memory.delete(this.memory.keys().next().value);
      this.memory.set(name, make());
    }
    return this.memory.get(name);
  }

  /** For one head: tokens of each token's entry (0 if dropped), and the start of that entry. */
  lengths(unit) {
    return this.cached(`head ${unit}`, () => {
      const length = new Uint32Array(this.report.width);
      const start = new Uint32Array(this.report.width);
      const base = this.report.first;
      this.eachPiece(unit, (kind, first, tokens) => {
        for (let i = 0; i < tokens; i++) {
          length[first - base + i] = kind === MERGED ? tokens : kind;
          start[first - base + i] = kind === MERGED ? first : first + i;
        }
      });
      return { length, start };
    });
  }

  /** For several heads: mean entries per token, and the numbers of heads where it is exact and merged. */
  means(units) {
    return this.cached(`heads ${units[0]} ${units.length}`, () => {
      const width = this.report.width;
      const base = this.report.first;
      const share = new Float32Array(width);
      const exact = new Uint32Array(width);
      const merged = new Uint32Array(width);
      for (const unit of units) {
        this.eachPiece(unit, (kind, first, tokens) => {
          if (kind === DROPPED) return;
          const part = (kind === EXACT ? 1 : 1 / tokens) / units.length;
          const counts = kind === EXACT ? exact : merged;
          for (let i = first - base; i < first - base + tokens; i++) {
            share[i] += part;
            counts[i] += 1;
          }
        });
      }
      return { share, exact, merged, heads: units.length };
    });
  }

  /** Token counts of the heads `units` by the length of their entries: [dropped, exact, 2, ...]. */
  resolution(units) {
    return this.cached(`resolution ${units[0]} ${units.length}`, () => {
      const counts = [0, 0];
      for (const unit of units) {
        this.eachPiece(unit, (kind, first, tokens) => {
          const bin = kind === MERGED ? tokens : kind;
          while (counts.length <= bin) counts.push(0);
          counts[bin] += tokens;
        });
      }
      return counts;
    });
  }

  /** A token's relevance in a head, in multiples of the head's mean; null if it has none. */
  relevanceAt(unit, position) {
    const at = position - this.report.first;
    if (!this.codes || at < 0 || at >= this.relevance.length) return null;
    const { layers, heads, length, low, high } = this.relevance;
    const layer = layers === 1 ? 0 : Math.floor(unit / this.report.heads);
    const head = heads === 1 ? 0 : unit % this.report.heads;
    const code = this.codes[(layer * heads + head) * length + at];
    return code ? Math.exp(low + ((high - low) / 254) * (code - 1)) : 0;
  }

  /** An entry's weight in attention, in tokens. */
  weight(entry) {
    return this.masses ? 2 ** ((this.masses[entry] - 128) / 16) : (this.weights[entry] / 255) * this.sizes[entry];
  }

  /** What became of a token in a head. */
  status(unit, position) {
    const report = this.report;
    if (position < report.first || position >= report.last) {
      return { state: "exact", start: position, end: position + 1, weight: 1, change: null, kept: true };
    }
    let found = null;
    this.eachPiece(unit, (kind, first, tokens, entry) => {
      if (position >= first + tokens) return true;
      const origin = this.origins && kind ? this.origins[entry] : 127;
      found = {
        state: STATES[kind],
        start: first,
        end: first + tokens,
        weight: kind ? this.weight(entry) : 0,
        change: this.changes && kind ? this.changes[entry] / 100 : null,
        bits: this.bits && kind ? this.bits[entry] : null,
        depth: (origin & 127) === 127 ? null : origin & 127,
        floor: this.hasFloor && kind && (origin & 127) !== 127 ? origin >= 128 : null,
        relevance: this.relevanceAt(unit, position),
      };
      return false;
    });
    if (found.state !== "dropped" && found.relevance !== null) {
      let sum = 0;
      for (let p = found.start; p < found.end; p++) sum += this.relevanceAt(unit, p) ?? 0;
      found.share = sum / this.relevance.length;
    }
    return found;
  }

  /** [slot, first token, token after its last] of a token, or null. */
  slotOf(position) {
    const slots = this.slots;
    if (!slots || position < slots[0] || position >= slots[slots.length - 1]) return null;
    let low = 0;
    let high = slots.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (slots[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return [low, slots[low], slots[low + 1]];
  }
}

/** What a limit's cuts left of prompt and answer; cuts are numbered from 0. */
class Cuts {
  constructor(report, { first, lengths }, written) {
    Object.assign(this, { report, first, lengths });
    this.length = first + written;
    this.text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(report.part("written"));
    this.begins = report.borders("writtenLengths", written);
    this.held = report.numbers("held");
    let end = 0;
    this.starts = lengths.map((length) => (end += length) - length);
  }

  token(position) {
    const at = position - this.first;
    return at < 0 ? this.report.token(position) : this.text.slice(this.begins[at], this.begins[at + 1]);
  }

  /** The number of heads that hold a token after a cut; null if it was not written yet. */
  heads(cut, position) {
    return position < this.lengths[cut] ? this.held[this.starts[cut] + position] : null;
  }
}
