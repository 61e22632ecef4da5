// The page of a folder of runs: D.runs as a table, and the rewards of the chosen ones over each other.
const MOST_CHOSEN = 7;
const MOST_OPTIONS = 8;
const runsBox = h("section", { class: "runs", "aria-label": "Runs" });
document.getElementById("curves").before(runsBox);
document.getElementById("rollouts").hidden = true;
const chosen = new Map(); // run to true or false, where somebody has clicked
const boxes = new Map();
let colors = new Map();

const STATES = { running: "right", ended: "soft", stopped: "wrong" };
const fixed = (value) => (value == null ? "–" : value.toFixed(3).replace("-", "−"));
const address = (run) => (D.live ? `/run/${encodeURIComponent(run.name)}#token=${token}` : run.has_page ? `${run.name.split("/").map(encodeURIComponent).join("/")}/view.html` : null);
const hasCurve = (run) => run.reward.length > 0 || run.held_out.length > 0;

// Gives the chosen runs colours, and returns the panels with their curves.
function choose() {
  const free = D.runs.filter((run) => hasCurve(run) && !chosen.has(run.name)).slice(0, MOST_CHOSEN).map((run) => run.name);
  const names = D.runs.filter((run) => chosen.get(run.name) ?? free.includes(run.name)).map((run) => run.name);
  colors = new Map(names.map((name, index) => [name, COLORS[index % COLORS.length]]));
  for (const [name, box] of boxes) {
    box.checked = colors.has(name);
    box.nextSibling.style.background = colors.get(name) ?? "transparent";
  }
  const coloured = (lines) => lines.filter((line) => colors.has(line.label)).map((line) => ({ ...line, color: colors.get(line.label) }));
  return D.panels.map((panel) => ({ ...panel, lines: coloured(panel.lines) })).filter((panel) => panel.lines.length);
}

const option = ([key, value]) => h("span", {}, h("b", {}, visible(key)), ` ${visible(value)}`);
const differences = (options) => [options.slice(0, MOST_OPTIONS).map(option), options.length > MOST_OPTIONS
  && h("details", {}, h("summary", {}, `${options.length - MOST_OPTIONS} more`), options.slice(MOST_OPTIONS).map(option))];

function runRow(run) {
  const name = visible(run.name);
  const [first, last, best] = run.reward;
  const [heldFirst, heldLast] = run.held_out;
  const box = hasCurve(run) && h("input", { type: "checkbox", "aria-label": `Curves of ${name}`, onchange: (event) => {
    chosen.set(run.name, event.target.checked);
    drawCurves(choose());
  } });
  if (box) boxes.set(run.name, box);
  const link = address(run);
  const steps = run.step == null ? "–" : run.num_steps ? `${run.step} of ${run.num_steps}` : `${run.step}`;
  return h("tbody", {}, h("tr", {},
    h("td", {}, h("label", { class: "pick" }, box, h("i"))),
    h("td", { class: "name" }, link ? h("a", { href: link }, name) : name),
    h("td", { class: "when" }, run.began ? visible(run.began.slice(0, 16).replace("T", " ")) : "–"),
    h("td", { class: STATES[run.state] }, visible(run.state)),
    h("td", {}, steps), h("td", {}, fixed(first)), h("td", {}, fixed(last)), h("td", {}, fixed(best)),
    h("td", {}, heldLast == null ? "–" : heldFirst === heldLast ? fixed(heldLast) : `${fixed(heldFirst)} → ${fixed(heldLast)}`),
    h("td", {}, run.seconds == null ? "–" : seconds(run.seconds)),
    h("td", { class: "words" }, visible(run.model.split("/").slice(-3).join("/"))), h("td", { class: "words" }, visible(run.algorithm))),
    run.differs.length > 0 && h("tr", { class: "differs" }, h("td"), h("td", { colspan: 11 }, differences(run.differs))));
}

function drawAll() {
  const heads = ["", "run", "began, UTC", "state", "step", "reward, first", "last", "best", "held-out", "time in steps", "model", "algorithm"];
  boxes.clear();
  runsBox.replaceChildren(h("div", { class: "wide" }, h("table", { class: "num" }, h("thead", {}, h("tr", {}, heads.map((name) => h("th", {}, name)))), D.runs.map(runRow))));
  document.getElementById("run").replaceChildren(
    h("h1", {}, visible(D.name)), ...(D.status ? [D.status] : []), h("p", { class: "soft" }, plural(D.runs.length, "run")));
  drawCurves(choose());
}

if (!D.live) drawAll();
