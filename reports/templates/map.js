// The map of requests and rounds. Only what is in view is in the document, however long the run was.
const CELL = 40, LINE = 30, HEAD = 24, MARGIN = 3;

class RoundMap {
  constructor(box, overview, open) {
    this.box = box; this.overview = overview; this.open = open;
    this.focus = { line: 0, column: 0 }; this.current = null;
    box.addEventListener("scroll", () => this.later());
    window.addEventListener("resize", () => this.later());
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("click", (event) => {
      const cell = event.target.closest("button.cell");
      if (cell) this.choose(Number(cell.dataset.line), Number(cell.dataset.column));
    });
    overview.addEventListener("click", (event) => {
      const place = overview.getBoundingClientRect();
      const column = ((event.clientX - place.left) / place.width) * this.steps.length;
      this.box.scrollLeft = column * CELL - this.box.clientWidth / 2;
    });
  }

  show(head) {
    this.head = head; this.steps = layOut(head); this.lines = bodyOf(head);
    this.label = Math.min(Math.max(72, ...this.lines.map((line) => 22 + line.label.length * 8)), 150);
    this.grid = this.lines.map(() => new Map());
    this.lines.forEach((line, at) => this.fill(line, this.grid[at]));
    this.wrong = this.findWrong();
    const filled = this.grid.findIndex((line) => line.size);
    this.focus = { line: Math.max(filled, 0), column: filled < 0 ? 0 : Math.min(...this.grid[filled].keys()) };
    this.current = null;
    this.build();
    this.box.scrollTo(0, 0);
    this.draw();
  }

  fill(line, cells) {
    for (const round of this.head.rounds) {
      if (round[0] !== line.rank) continue;
      if (line.request < 0) { cells.set(round.column, { round, part: null, ...cellOf(this.head, round, null) }); continue; }
      const part = round[6].find((one) => one[0] === line.request);
      if (part) cells.set(round.column, { round, part, ...cellOf(this.head, round, part) });
    }
    if (line.request >= 0) return;
    this.steps.forEach((step, column) => {
      if (!cells.has(column)) cells.set(column, { round: null, part: null, ...cellOf(this.head, null, null) });
    });
  }

  findWrong() {
    const found = [];
    this.grid.forEach((line, at) => line.forEach((cell, column) => { if (cell.state === 2) found.push([column, at]); }));
    return found.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  }

  build() {
    const width = this.label + this.steps.length * CELL + MARGIN * 2, height = HEAD + this.lines.length * LINE + MARGIN * 2;
    this.corner = make("span", { class: "corner", style: "width:" + this.label + "px" }, "step");
    this.stepBox = make("div", { class: "steps" }, this.corner);
    this.labels = make("div", { class: "labels", style: "width:" + this.label + "px;height:" + (height - HEAD) + "px" });
    this.cells = make("div", { style: "position:absolute;left:" + this.label + "px;top:" + HEAD + "px" });
    const canvas = make("div", {
      class: "canvas", role: "grid", "aria-label": "Requests and rounds of " + this.head.name,
      "aria-rowcount": this.lines.length, "aria-colcount": this.steps.length, style: "width:" + width + "px;height:" + height + "px",
    }, this.stepBox, this.labels, this.cells);
    this.box.replaceChildren(canvas);
  }

  later() {
    if (this.waiting || !this.head) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const left = Math.max(Math.floor((this.box.scrollLeft - this.label) / CELL) - 1, 0);
    const right = Math.min(Math.ceil((this.box.scrollLeft + this.box.clientWidth) / CELL) + 1, this.steps.length);
    const top = Math.max(Math.floor((this.box.scrollTop - HEAD) / LINE) - 1, 0);
    const bottom = Math.min(Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE) + 1, this.lines.length);
    const steps = [this.corner], labels = [], rows = [];
    for (let column = left; column < right; column++) {
      steps.push(make("span", { style: "left:" + (this.label + MARGIN + column * CELL) + "px;width:36px" }, String(this.steps[column])));
    }
    const held = document.activeElement && this.cells.contains(document.activeElement);
    for (let line = top; line < bottom; line++) {
      const about = this.lines[line];
      labels.push(make("span", { class: about.request < 0 ? "rank" : null, style: "top:" + (line * LINE + MARGIN) + "px", title: about.label }, about.label));
      const cells = [];
      for (let column = left; column < right; column++) {
        const cell = this.grid[line].get(column);
        if (cell) cells.push(this.cell(cell, line, column));
      }
      rows.push(make("div", { role: "row", "aria-rowindex": line + 1 }, cells));
    }
    this.stepBox.replaceChildren(...steps);
    this.labels.replaceChildren(...labels);
    this.cells.replaceChildren(...rows);
    if (held) this.take();
    this.drawOverview(left, right);
  }

  cell(cell, line, column) {
    const about = this.lines[line], here = this.focus.line === line && this.focus.column === column;
    const who = about.request < 0 ? about.label : "request " + about.label;
    const state = STATE_WORD[cell.state];
    return make("button", {
      type: "button", role: "gridcell", class: "cell " + cell.kind + " " + STATE_CLASS[cell.state],
      style: "left:" + (MARGIN + column * CELL) + "px;top:" + (line * LINE + MARGIN) + "px",
      tabindex: here ? 0 : -1, "data-line": line, "data-column": column, "aria-colindex": column + 1,
      "aria-label": who + ", scheduler step " + this.steps[column] + ": " + cell.say + (state ? "; " + state : ""),
      "aria-current": this.current && this.current.line === line && this.current.column === column ? "true" : null,
      title: "scheduler step " + this.steps[column] + ": " + cell.say + (state ? "; " + state : ""),
    }, cell.text);
  }

  drawOverview(left, right) {
    const total = this.steps.length;
    if (total * CELL <= this.box.clientWidth) { this.overview.replaceChildren(); return; }
    const buckets = Math.min(total, 400), worst = new Array(buckets).fill(-1);
    this.grid.forEach((line) => line.forEach((cell, column) => {
      const bucket = Math.min(Math.floor((column / total) * buckets), buckets - 1);
      if (cell.round) worst[bucket] = Math.max(worst[bucket], cell.state);
    }));
    const bars = worst.map((state, at) => state < 0 ? null :
      make("rect", { class: ["busy", "follows", "wrong"][state], x: at, y: state === 2 ? 0 : 3, width: 1.02, height: state === 2 ? 10 : 4 }));
    const view = make("rect", { class: "view", x: (left / total) * buckets, y: 0, width: ((right - left) / total) * buckets, height: 10 });
    this.overview.replaceChildren(make("svg", { viewBox: "0 0 " + buckets + " 10", preserveAspectRatio: "none" }, bars, view));
  }

  key(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) this.move(step[0], step[1]);
    else if (event.key === "Home" || event.key === "End") this.end(event.key === "End");
    else if (event.key === "n" || event.key === "p") this.toWrong(event.key === "n" ? 1 : -1);
    else return;
    event.preventDefault();
  }

  move(lines, columns) {
    let { line, column } = this.focus;
    if (columns) {
      const there = [...this.grid[line].keys()].filter((one) => (one - column) * columns > 0);
      if (there.length) column = columns > 0 ? Math.min(...there) : Math.max(...there);
    } else {
      for (let at = line + lines; at >= 0 && at < this.lines.length; at += lines) {
        if (!this.grid[at].size) continue;
        line = at;
        if (!this.grid[at].has(column)) column = nearest([...this.grid[at].keys()], column);
        break;
      }
    }
    this.moveTo(line, column);
  }

  end(last) {
    const there = [...this.grid[this.focus.line].keys()];
    this.moveTo(this.focus.line, last ? Math.max(...there) : Math.min(...there));
  }

  moveTo(line, column) {
    this.focus = { line, column };
    this.reveal(line, column);
    this.draw();
    this.take();
  }

  take() {
    const cell = this.cells.querySelector('[data-line="' + this.focus.line + '"][data-column="' + this.focus.column + '"]');
    if (cell) cell.focus({ preventScroll: true });
  }

  reveal(line, column) {
    const x = column * CELL, y = line * LINE, box = this.box;
    const room = box.clientWidth - this.label, deep = box.clientHeight - HEAD;
    if (x < box.scrollLeft) box.scrollLeft = Math.max(x - CELL, 0);
    if (x + 2 * CELL > box.scrollLeft + room) box.scrollLeft = x + 2 * CELL - room;
    if (y < box.scrollTop) box.scrollTop = Math.max(y - LINE, 0);
    if (y + 2 * LINE > box.scrollTop + deep) box.scrollTop = y + 2 * LINE - deep;
  }

  // The next wrong cell after the focused one, in order of time; from the last on to the first again.
  toWrong(step) {
    if (!this.wrong.length) return false;
    const after = ([column, line]) => (column - this.focus.column || line - this.focus.line) * step > 0;
    const order = step > 0 ? this.wrong : [...this.wrong].reverse();
    const [column, line] = order.find(after) || order[0];
    this.moveTo(line, column);
    return true;
  }

  find(rank, index, rid) {
    const round = this.head.rounds.find((one) => one[0] === rank && one[1] === index);
    if (!round) return null;
    const line = this.lines.findIndex((one) => one.rank === rank && (rid === "" ? one.request < 0 : one.label === rid && one.request >= 0));
    const own = line >= 0 ? line : this.lines.findIndex((one) => one.rank === rank && one.request < 0);
    return own < 0 ? null : { line: own, column: round.column };
  }

  choose(line, column) {
    const cell = this.grid[line] && this.grid[line].get(column);
    this.focus = { line, column };
    if (!cell || !cell.round) { this.moveTo(line, column); return; }
    this.current = { line, column };
    this.reveal(line, column);
    this.draw();
    this.open(cell.round, this.lines[line].request);
  }
}

function nearest(columns, column) {
  return columns.reduce((best, one) => (Math.abs(one - column) < Math.abs(best - column) ? one : best), columns[0]);
}
