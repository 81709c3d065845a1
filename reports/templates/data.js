// Reads the JSON that the page carries. The rows of a scenario are parsed when its first round is opened, not before.
const PHASES = ["PREFILL", "DRAFT_PREFILL", "DRAFT", "VERIFY", "ACCEPT", "EXTEND", "IDLE", "PREBUILT"];
const MODES = ["PREFILL", "DECODE", "IDLE", "PREBUILT", "STOPPED"];
const SUBJECT = {
  PREFILL: "Target prefill", DRAFT_PREFILL: "Draft prefill", DRAFT: "Draft steps", VERIFY: "Verify",
  ACCEPT: "Committed tokens", EXTEND: "Draft extend", IDLE: "Idle", PREBUILT: "Prebuilt",
};
const STATE_CLASS = ["", "follows", "wrong"];
const STATE_WORD = ["", "follows from an earlier divergence", "wrong"];
const parsed = new Map();

function read(id) {
  if (!parsed.has(id)) {
    parsed.set(id, JSON.parse(document.getElementById(id).textContent));
    performance.mark(id.split("-")[0] + " parsed");  // a developer's tools show when, and a test that it was not before
  }
  return parsed.get(id);
}

function count(number, noun) {
  return number + " " + noun + (number === 1 ? "" : "s");
}

// make("td", {class: "n"}, "text" or elements): text is never taken for markup.
function make(name, attributes, ...children) {
  const svg = ["svg", "rect", "g", "path", "text", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

// Columns of the map: one a scheduler step; more where a rank ran several batches in one.
function layOut(head) {
  const width = new Map();
  const seen = new Map();
  head.rounds.forEach((round) => {
    const step = round[2], place = round[0] + "," + step;
    const before = seen.get(place) || 0;
    round.within = before;
    seen.set(place, before + 1);
    width.set(step, Math.max(width.get(step) || 1, before + 1));
  });
  const last = head.rounds.reduce((most, round) => Math.max(most, round[2]), -1);
  const steps = [], start = new Map();
  for (let step = 0; step <= last; step++) {
    start.set(step, steps.length);
    for (let more = 0; more < (width.get(step) || 1); more++) steps.push(step);
  }
  head.rounds.forEach((round) => { round.column = start.get(round[2]) + round.within; });
  return steps;
}

function bodyOf(head) {
  const ranks = [...new Set([...head.rounds.map((round) => round[0]), ...head.requests.map((one) => one[1])])].sort((a, b) => a - b);
  const lines = [];
  for (const rank of ranks) {
    lines.push({ rank, request: -1, label: ranks.length > 1 ? "rank " + rank : "batch" });
    const here = new Set();
    head.rounds.forEach((round) => { if (round[0] === rank) round[6].forEach((part) => here.add(part[0])); });
    head.requests.forEach((one, at) => {
      if (here.has(at) || (one[1] === rank && !head.rounds.some((round) => round[6].some((part) => part[0] === at)))) {
        lines.push({ rank, request: at, label: one[0] });
      }
    });
  }
  return lines;
}

// One cell: what it shows, in letters as well as in colour, and what a screen reader says of it.
function cellOf(head, round, part) {
  if (!round) return { text: "·", kind: "N", state: 0, say: "no batch" };
  const mode = MODES[round[3]];
  if (part === null) {
    const size = round[6].length;
    const state = round[7];
    if (mode === "STOPPED") return { text: "X", kind: "X", state, say: "batch that never ended" };
    if (mode === "IDLE") return { text: "I", kind: "I", state, say: "idle" };
    if (!size) return { text: "E", kind: "E", state, say: "batch without requests" };
    return { text: size + "×", kind: "sum", state, say: "batch of " + size + ", " + mode.toLowerCase() };
  }
  const [, attempt, committed, length, final, state] = part;
  const again = attempt ? "′" : "";
  if (mode === "STOPPED") return { text: "X" + again, kind: "X", state, say: "in a batch that never ended, committed " + committed };
  if (mode === "PREFILL") {
    const kind = final ? "P" : "C";
    return { text: kind + again, kind, state, say: (final ? "last chunk, " : "chunk, ") + length + " tokens from " + committed };
  }
  if (mode === "PREBUILT") return { text: "B" + again, kind: "B", state, say: "prefilled elsewhere" };
  if (mode === "IDLE") return { text: "I", kind: "I", state, say: "idle" };
  return { text: "D" + (length || "–") + again, kind: "D", state, say: "decode, committed " + committed + ", " + length + " more" };
}
