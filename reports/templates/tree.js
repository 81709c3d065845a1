// A verified tree as it grew: root at the left, one column a depth, the accepted path thick, what is wrong dashed: ✕ by
// itself, ~ because of something earlier; below it stands what is expected.
const NODE_X = 92, NODE_Y = 44, NODE_W = 62, NODE_H = 24;

// nodes: [{slot, parent, token, expected, state, choice}], root first; taken: slots on the accepted path.
function drawTree(nodes, taken) {
  const bySlot = new Map(nodes.map((node) => [node.slot, node]));
  nodes.forEach((node) => { node.children = []; });
  const roots = nodes.filter((node) => {
    const above = node.slot === node.parent ? null : bySlot.get(node.parent);
    if (above) above.children.push(node);
    return !above;
  });
  let line = 0, deepest = 0;
  const placed = new Set();
  const place = (node, depth) => {
    if (placed.has(node)) return;
    placed.add(node);
    node.depth = depth; deepest = Math.max(deepest, depth);
    node.children.forEach((child) => place(child, depth + 1));
    const below = node.children.filter((child) => child.line !== undefined);
    node.line = below.length ? (below[0].line + below[below.length - 1].line) / 2 : line++;
  };
  roots.forEach((node) => place(node, 0));
  nodes.forEach((node) => place(node, 0));
  const width = (deepest + 1) * NODE_X + 24, height = Math.max(line, 1) * NODE_Y + 22;
  const x = (node) => node.depth * NODE_X + 40, y = (node) => node.line * NODE_Y + 22;
  const edges = [], shapes = [];
  for (const node of nodes) {
    for (const child of node.children) {
      const from = x(node) + NODE_W / 2, to = x(child) - NODE_W / 2, middle = (from + to) / 2;
      const on = taken.has(node.slot) && taken.has(child.slot);
      edges.push(make("path", {
        class: "edge" + (on ? " taken" : ""),
        d: "M" + from + " " + y(node) + "C" + middle + " " + y(node) + " " + middle + " " + y(child) + " " + to + " " + y(child),
      }));
    }
    shapes.push(drawNode(node, x(node), y(node), taken.has(node.slot)));
  }
  const first = nodes.find((node) => node.state === 2);
  const label = "Draft tree with " + nodes.length + " nodes; accepted path " + [...taken].join(", ") +
    (first ? "; first wrong node " + first.slot : "");
  return make("svg", { class: "tree", width, height, viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": label }, edges, shapes);
}

function drawNode(node, x, y, taken) {
  const other = node.expected !== null && node.expected !== undefined;
  const wrong = node.state === 2, follows = !wrong && (node.state === 1 || other), under = other ? "not " + node.expected : null;
  const below = taken ? "→ " + node.choice : "";
  const expected = under ? make("text", { class: "under", x, y: y + NODE_H / 2 + 12 }, under) :
    below ? make("text", { class: "under", x, y: y + NODE_H / 2 + 12 }, below) : null;
  return make("g", { class: (taken ? "taken " : "") + (wrong ? "wrong" : follows ? "follows" : "") },
    make("title", {}, "node " + node.slot + ", token " + node.token + (under ? ", expected " + node.expected : "") + ", target chose " + node.choice + (taken ? ", accepted" : "")),
    make("rect", { class: "node", x: x - NODE_W / 2, y: y - NODE_H / 2, width: NODE_W, height: NODE_H, rx: 12 }),
    make("text", { x, y: y + 4 }, (taken ? "✓ " : "") + node.token),
    wrong || follows ? make("text", { class: "mark", x: x + NODE_W / 2 + 3, y: y - NODE_H / 2 + 5 }, wrong ? "✕" : "~") : null, expected);
}
