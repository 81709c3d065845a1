// One opened round: its batch, what is wrong in it, the tree, and every row of one request, engine beside reference.
const SHOWN_ROWS = 60, SHOWN_DIVERGENCES = 12;

class RoundView {
  constructor(box, choose) { this.box = box; this.choose = choose; }

  clear() { this.box.replaceChildren(); }

  show(scenario, round, request) {
    const head = read("head-" + scenario), rows = read("rows-" + scenario);
    const part = round[6].find((one) => one[0] === request);
    const parts = [this.title(head, round), this.batch(head, round, request)];
    if (!rows) {
      const command = "eaglecheck report " + head.folder + " --html " + head.name + ".html";
      this.box.replaceChildren(...parts.flat().filter(Boolean), make("p", {}, "The rows of this scenario would make this page too large. A page of its own:"),
        make("div", { class: "command" }, make("code", {}, command), make("button", { type: "button", "data-copy": command }, "Copy")));
      return;
    }
    parts.push(this.divergences(rows, round, part ? request : -1, round[6].length === 0));
    if (part) parts.push(...this.request(head, rows, round, part));
    this.box.replaceChildren(...parts.flat().filter(Boolean));
  }

  title(head, round) {
    const [rank, index, step, mode, forwards, graphs, parts] = round;
    const what = parts.length ? count(parts.length, "request") : "no requests";
    const counts = ["draft", "verify", "extend"].map((name, at) => forwards[at] + " " + name).join(", ");
    return [make("h3", { id: "round-title" }, "Scheduler step " + step + ", rank " + rank + ", batch " + index + ": " + MODES[mode].toLowerCase() + (MODES[mode] === "STOPPED" && !parts.length ? "" : ", " + what)),
      MODES[mode] === "STOPPED" ? make("p", { class: "quiet" }, "The engine stopped in this batch: there is no record of its end" + (parts.length ? ", only rows that were seen." : ".")) :
        make("p", { class: "quiet" }, "forwards entered: " + counts + (graphs ? "; in CUDA graphs: " + graphs : "; eager"))];
  }

  batch(head, round, request) {
    return make("div", { class: "chips", role: "group", "aria-label": "Requests of this batch" }, round[6].map((part) => {
      const mark = ["", " ~", " ✕"][part[5]];
      const button = make("button", { type: "button", "aria-pressed": String(part[0] === request) },
        head.requests[part[0]][0] + ": " + part[2] + (MODES[round[3]] === "STOPPED" ? "" : " → " + (part[2] + part[3])) + mark);
      button.addEventListener("click", () => this.choose(round, part[0]));
      return button;
    }));
  }

  divergences(rows, round, request, whole) {
    const found = rows.divergences.filter((one) => one[0] === round[0] && one[1] === round[1] && (whole || one[2] === request || one[2] === -1));
    if (!found.length) return null;
    const item = ([, , who, phase, step, slot, kind, check, expected, observed, hint, cause, policy]) =>
      make("li", { class: cause ? "follows" : null },
        make("strong", {}, (cause ? "~ " : "✕ ") + kind), " " + (who < 0 ? (SUBJECT[phase] || phase).toLowerCase() : placeOf(phase, step, slot)) + ": engine " + observed + ", expected " + expected +
        (hint ? " (" + hint.replaceAll("-", " ") + ")" : ""), make("br"), make("small", {}, "check " + check + ", " + policy + (cause ? ", follows from " + cause : "")));
    const order = [...found].sort((a, b) => (a[11] ? 1 : 0) - (b[11] ? 1 : 0));
    const list = make("ul", { class: "said" }, order.slice(0, SHOWN_DIVERGENCES).map(item));
    const left = order.length - SHOWN_DIVERGENCES;
    return left > 0 ? [list, this.more(count(left, "more divergence"), () => list.append(...order.slice(SHOWN_DIVERGENCES).map(item)))] : [list];
  }

  more(text, act) {
    const button = make("button", { type: "button" }, "show " + text);
    button.addEventListener("click", () => { act(); button.remove(); });
    return button;
  }

  request(head, rows, round, part) {
    const about = head.requests[part[0]];
    const again = part[1] ? ", after retraction " + part[1] : "";
    const what = MODES[round[3]] === "STOPPED" ? "the batch never ended" : MODES[round[3]] === "DECODE" ? count(part[3], "token") + " committed" : count(part[3], "prompt token") + (part[4] ? ", the last ones" : ", more to come");
    const found = [make("h3", {}, "Request " + about[0] + ": committed length " + part[2] + ", " + what + again)];
    const span = rows.at[round[0] + "," + round[1] + "," + part[0]];
    if (!span) return [...found, make("p", { class: "quiet" }, "No row was recorded.")];
    const byPhase = new Map();
    for (let at = span[0]; at < span[1]; at++) {
      if (!byPhase.has(rows.phase[at])) byPhase.set(rows.phase[at], []);
      byPhase.get(rows.phase[at]).push(at);
    }
    if (byPhase.has(3)) found.push(...this.tree(rows, byPhase.get(2) || [], byPhase.get(3), byPhase.get(4) || []));
    found.push(make("p", { class: "quiet" }, "Bars: error as a share of what is allowed there. Margin: how far the reference's best choice is ahead of its next."));
    for (const [phase, list] of [...byPhase].sort((a, b) => a[0] - b[0])) found.push(...this.table(rows, phase, list));
    return found;
  }

  tree(rows, draft, verify, accept) {
    const taken = new Set(accept.map((at) => rows.parent[at]));
    const nodes = verify.filter((at) => rows.sides[at] !== "reference").map((at) => ({
      slot: rows.slot[at], parent: rows.parent[at], token: rows.input_id[at], state: rows.state[at],
      expected: at in rows.reference.input_id ? rows.reference.input_id[at] : null,
      choice: rows.chosen[at].length ? rows.chosen[at][0] : "–",
    }));
    if (!nodes.length) return [];
    this.proposed(rows, draft, nodes);
    return [make("h3", {}, "Draft tree"), make("p", { class: "quiet" }, "✓ and thick: accepted; → what the target chose there; ✕ and dashed: wrong; ~ and dashed: wrong because of something earlier; “not”: what is expected there."),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Draft tree" }, drawTree(nodes, taken))];
  }

  // What should have been proposed instead of a node's token, where just one row of the draft step read the token above.
  proposed(rows, draft, nodes) {
    const bySlot = new Map(nodes.map((node) => [node.slot, node]));
    const depth = (node, left) => (left && bySlot.has(node.parent) ? 1 + depth(bySlot.get(node.parent), left - 1) : 0);
    for (const node of nodes) {
      const step = depth(node, nodes.length) - 2, above = bySlot.get(node.parent);
      const from = draft.filter((at) => rows.step[at] === step && rows.input_id[at] === above.token);
      const wanted = from.length === 1 && rows.state[from[0]] ? rows.reference.chosen[from[0]] : null;
      const place = wanted && !wanted.includes(node.token) ? rows.chosen[from[0]].indexOf(node.token) : -1;
      if (place >= 0 && node.expected === null) node.expected = wanted[place];
    }
  }

  table(rows, phase, list) {
    const name = PHASES[phase], columns = columnsOf(rows, name, list);
    const shown = list.length <= SHOWN_ROWS ? list : list.filter((at, place) => place < SHOWN_ROWS || rows.state[at]);
    const groups = make("tr", {}, make("th", { rowspan: 2 }, columns.steps ? (name === "DRAFT" ? "step" : "layer") + ", row" : "row"),
      columns.map((column) => make("th", { class: "first", colspan: column.both ? 2 : null, rowspan: column.both ? null : 2 }, column.title)));
    const sides = make("tr", {}, columns.flatMap((column) => column.both ? [make("th", { class: "first" }, "engine"), make("th", {}, "reference")] : []));
    const body = make("tbody", {}, shown.map((at) => rowOf(rows, columns, at)));
    const wrap = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": SUBJECT[name] + " rows" },
      make("table", { class: "rows" }, make("thead", {}, groups, sides), body));
    const left = list.length - shown.length;
    const more = left > 0 ? this.more(count(left, "more row"), () => body.replaceChildren(...list.map((at) => rowOf(rows, columns, at)))) : null;
    return [make("h3", {}, SUBJECT[name]), wrap, more];
  }
}

// Where in a phase, in the words of the terminal.
function placeOf(phase, step, slot) {
  const subject = (SUBJECT[phase] || phase).toLowerCase();
  if (phase === "DRAFT") return "draft step " + step + ", beam " + slot;
  if (phase === "VERIFY") return "tree node " + slot;
  if (phase === "ACCEPT") return "committed token " + slot;
  return subject + (step ? ", layer " + step : "") + ", row " + slot;
}

function columnsOf(rows, name, list) {
  const any = (test) => list.some(test);
  const columns = [{ title: name === "ACCEPT" ? "token" : "token in", key: "input_id", both: true }];
  if (name !== "ACCEPT") columns.push({ title: "position", key: "position", both: true });
  if (any((at) => rows.parent[at] >= 0)) columns.push({ title: name === "ACCEPT" ? "chosen at node" : "parent", key: "parent", both: true });
  if (any((at) => rows.chosen[at].length)) columns.push({ title: name === "PREFILL" || name === "VERIFY" ? "target chose" : "proposed", key: "chosen", both: true });
  if (any((at) => rows.margin[at] !== null)) columns.push({ title: "margin", key: "margin" });
  for (const [key, title] of [["hidden_in", "state in"], ["hidden_out", "state out"], ["logits", "logits"]]) {
    if (any((at) => rows[key][at] !== null)) columns.push({ title, key, budget: true });
  }
  if (any((at) => rows.cache_slot[at] >= 0)) columns.push({ title: "KV slot", key: "cache_slot" });
  columns.steps = any((at) => rows.step[at] > 0);
  return columns;
}

function rowOf(rows, columns, at) {
  const mark = ["", " ~", " ✕"][rows.state[at]], label = (columns.steps ? rows.step[at] + ", " : "") + rows.slot[at] + mark;
  const cells = columns.flatMap((column) => {
    if (column.budget) return [make("td", { class: "first" }, budgetOf(rows[column.key][at], rows[column.key + "_limit"][at]))];
    if (!column.both) return [make("td", { class: "first" }, written(rows[column.key][at]))];
    return beside(rows, column.key, at);
  });
  return make("tr", { class: STATE_CLASS[rows.state[at]] || null }, make("th", { scope: "row" }, label), cells);
}

function beside(rows, key, at) {
  const side = rows.sides[at], other = rows.reference[key], differs = at in other;
  const engine = side === "reference" ? "no row" : written(rows[key][at]);
  const reference = side === "engine" ? "no row" : differs ? written(other[at]) : engine;
  return [make("td", { class: "first" + (differs ? " differs" : "") }, engine),
    make("td", { class: differs ? "differs" : "same" }, (differs ? "≠ " : "") + reference)];
}

function written(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.length ? value.join(" ") : "–";
  return value === -1 ? "–" : String(value);
}

function budgetOf(error, limit) {
  if (error === null) return "–";
  const share = typeof error === "number" && limit > 0 ? error / limit : Infinity, over = !(share <= 1);
  const text = Number.isFinite(share) ? (share >= 10 ? Math.round(share) + " ×" : share >= 1 ? share.toFixed(1) + " ×" : (share ? (100 * share).toPrecision(2) : "0") + " %") : String(error);
  return make("span", { class: "budget" + (over ? " over" : ""), title: "off by " + error + ", up to " + limit + " allowed" },
    make("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, make("rect", { width: Math.min(share, 1) * 100, height: 10 })), text);
}
