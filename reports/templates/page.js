// Ties the parts together: the chosen scenario and round stand in the address, so that a place can be sent to somebody.
const select = document.getElementById("scenario"), facts = document.getElementById("scenario-facts");
let scenario = -1;
const view = new RoundView(document.getElementById("round"), (round, request) => {
  const place = map.find(round[0], round[1], request < 0 ? "" : read("head-" + scenario).requests[request][0]);
  if (place) map.choose(place.line, place.column);
});
const map = new RoundMap(document.getElementById("map"), document.getElementById("overview"), (round, request) => {
  view.show(scenario, round, request);
  const head = read("head-" + scenario), rid = request < 0 ? "" : head.requests[request][0];
  history.replaceState(null, "", "#s=" + scenario + "&d=" + round[0] + "&r=" + round[1] + "&q=" + encodeURIComponent(rid));
});

function choose(number) {
  if (number === scenario) return;
  scenario = number;
  select.value = String(number);
  const head = read("head-" + number), spec = head.spec;
  const shape = spec.algorithm + ", " + spec.num_steps + " steps" + (spec.eagle_topk > 1 ? ", topk " + spec.eagle_topk + ", " + spec.num_draft_tokens + " nodes" : "");
  const why = head.outcome === "UNKNOWN" ? head.reasons.slice(0, 1).map((one) => one.split("\n")[0]) : head.facts;
  facts.textContent = [head.outcome, head.pair, shape, head.positions.toLocaleString("en") + " rows", ...why].join("; ");
  const placeless = head.findings.filter((one) => one.at[1] < 0);
  document.getElementById("scenario-said").replaceChildren(...placeless.map((one) =>
    make("li", { class: one.cause ? "follows" : null }, make("strong", {}, (one.cause ? "~ " : "✕ ") + one.kind), " " + one.text)));
  view.clear();
  map.show(head);
  for (const id of ["next-wrong", "before-wrong"]) document.getElementById(id).disabled = !map.wrong.length;
}

function follow(scroll) {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (!asked.has("s")) { if (scenario < 0) choose(0); return; }
  const number = Number(asked.get("s"));
  if (!document.getElementById("head-" + number)) { if (scenario < 0) choose(0); return; }
  choose(number);
  const place = asked.has("r") ? map.find(Number(asked.get("d")), Number(asked.get("r")), asked.get("q") || "") : null;
  if (place) map.choose(place.line, place.column);
  if (scroll) document.getElementById(place ? "round" : "map-title").scrollIntoView();
}

function wrong(step) {
  if (map.toWrong(step)) map.choose(map.focus.line, map.focus.column);
}

const failing = [...select.options].filter((one) => one.text.trim().endsWith("(FAIL)")).map((one) => Number(one.value));

// The failing scenario behind (1) or before (-1) the chosen one, round about.
function fail(step) {
  const order = step > 0 ? failing : [...failing].reverse();
  const to = order.find((one) => (one - scenario) * step > 0) ?? order[0];
  if (to === undefined) return;
  choose(to);
  history.replaceState(null, "", "#s=" + scenario);
  wrong(1);
}

select.addEventListener("change", () => { choose(Number(select.value)); history.replaceState(null, "", "#s=" + scenario); });
for (const [id, step] of [["next-failing", 1], ["before-failing", -1]]) {
  document.getElementById(id).disabled = !failing.length;
  document.getElementById(id).addEventListener("click", () => fail(step));
}
document.getElementById("next-wrong").addEventListener("click", () => wrong(1));
document.getElementById("before-wrong").addEventListener("click", () => wrong(-1));
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#s="]');
  if (link && link.getAttribute("href") === location.hash) { event.preventDefault(); follow(true); }
});
window.addEventListener("hashchange", () => follow(true));
follow(location.hash.includes("s="));
