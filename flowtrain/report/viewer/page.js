"use strict";

// The page of a run. Everything of the run is in D; it reaches the document through textContent alone.
const D = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c5", "--c6", "--c4"].map((name) => `var(${name})`);
const TIME_COLORS = { planner: "var(--c0)", tool: "var(--c1)", "executor, verifier": "var(--c2)", turn: "var(--c0)", "waiting, answer": "var(--c4)" };

// ---- building blocks

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--") || name === "background" || name === "flex") element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Control characters as their symbols, and what turns the direction of writing, parts lines or is half a character as its number, so that
// what a model wrote is seen and does nothing.
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\p{Cs}/gu;
const symbol = (code) => (code < 0x20 ? String.fromCharCode(0x2400 + code) : code === 0x7f ? "\u2421" : `\\u${code.toString(16).padStart(4, "0")}`);
const visible = (text) => String(text ?? "").replace(UNSEEN, (c) => symbol(c.charCodeAt(0)));
const signed = (x, digits = 2) => (x == null ? "–" : (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits));

function number(x) {
  if (x == null) return "–";
  const size = Math.abs(x);
  const text = size === 0 ? "0" : size < 1e-3 || size >= 1e6 ? x.toExponential(1).replace(".0e", "e") : size >= 100 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(3));
  return text.replaceAll("-", "−").replace("e+", "e");
}
const share = (x) => (x == null ? "–" : `${+(100 * x).toPrecision(3)} %`);
function seconds(x) {
  if (x == null) return "–";
  if (x >= 3600) return `${Math.floor(x / 3600)} h ${Math.round((x % 3600) / 60)} min`;
  if (x >= 60) return `${Math.floor(x / 60)} min ${Math.round(x % 60)} s`;
  return x >= 1 || x === 0 ? `${+x.toPrecision(3)} s` : `${+(1000 * x).toPrecision(2)} ms`;
}
const FORMS = { number, share, seconds };
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

const tip = document.getElementById("tip");
function showTip(target, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = target.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}
const hideTip = () => { tip.hidden = true; };
const tipRow = (label, value) => h("div", {}, h("span", {}, label), h("span", {}, value));
addEventListener("scroll", hideTip, { passive: true });

function secondsBar(parts, total) {
  const of = (part) => `${seconds(part.seconds)}, ${share(part.seconds / total)}`;
  return h("div", { class: "bar", role: "img", "aria-label": parts.map((part) => `${part.name} ${of(part)}`).join("; ") },
    parts.map((part) => h("i", { class: part.gap && "gap", flex: `${(1000 * part.seconds) / total} 0 0`, background: part.color,
      onpointerenter: (event) => showTip(event.target, h("b", {}, part.name), tipRow("seconds", of(part))), onpointerleave: hideTip })));
}
const legendOf = (entries) => h("div", { class: "legend" }, entries.map(([color, ...content]) => h("span", {}, h("i", { background: color }), ...content)));

// ---- the run

function drawRun() {
  const [first, last] = D.reward.length ? D.reward : [null, null];
  const total = Object.values(D.seconds).reduce((a, b) => a + b, 0);
  const tile = (label, value) => value && h("div", { class: "tile" }, h("span", { class: "soft small" }, label), h("b", { class: "num" }, value));
  const stages = Object.entries(D.seconds).map(([name, value], index) => ({ name: visible(name), seconds: value, color: COLORS[index % COLORS.length] }));
  document.getElementById("run").append(
    h("h1", {}, visible(D.name)),
    h("div", { class: "tiles" },
      tile("Held-out reward", last != null && (first === last ? last.toFixed(3) : `${first.toFixed(2)} → ${last.toFixed(2)}`)),
      tile("Steps", D.step != null && (D.num_steps ? `${D.step} of ${D.num_steps}` : `${D.step}`)),
      tile("Weight versions", D.versions.length > 0 && [...new Set(D.versions)].join(" – ")),
      tile("Rollouts logged", D.num_logged > 0 && D.num_logged.toLocaleString("en")),
      tile("Time in steps", total > 0 && seconds(total))),
    h("ul", { class: "notes", hidden: !D.notes.length }, D.notes.map((note) => h("li", {}, visible(note)))),
    h("dl", { class: "facts" }, D.facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, visible(value))))),
    ...(total > 0 ? [h("div", { class: "stages" }, h("span", { class: "soft small" }, "Seconds by stage"), secondsBar(stages, total),
      legendOf(stages.map((stage) => [stage.color, `${stage.name} `, h("b", { class: "num" }, seconds(stage.seconds))])))] : []),
    h("div", { class: "more" },
      D.results.length > 0 && h("details", {}, h("summary", {}, "Held-out results"), resultTable()),
      D.config && h("details", {}, h("summary", {}, "Every option"), h("pre", {}, visible(D.config.trim())))));
}

function resultTable() {
  const heads = ["", "frozen", "trained", "difference"].map((name) => h("th", {}, name));
  const rows = D.results.map((cells) => h("tr", { class: !cells[1] && "title" }, cells.map((cell) => h("td", {}, visible(cell)))));
  return h("table", { class: "num" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
}

// ---- curves

const charts = [];

function drawCurves() {
  const section = document.getElementById("curves");
  section.hidden = !D.panels.length;
  const steps = D.panels.flatMap((panel) => panel.lines.flatMap((line) => line.points.map((point) => point[0])));
  const range = steps.length ? [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))] : [0, 1];
  const width = smoothing(range[1] - range[0]);
  const at = h("span", { class: "soft small num" });
  section.append(
    h("div", { class: "above" }, h("h2", {}, "Curves"), at),
    h("div", { class: "grid" }, D.panels.map((panel) => drawPanel(panel, range, width))));
  const show = (step) => {
    const thin = width > 1 ? ` Faint: each step. Strong: mean of the last ${width}.` : "";
    at.textContent = step == null ? `Last values.${thin}` : `Step ${step}`;
    for (const chart of charts) chart.show(step);
  };
  for (const chart of charts) chart.onhover = show;
  const draw = () => {
    for (const chart of charts) chart.draw();
    show(null);
  };
  addEventListener("resize", draw);
  draw();
}

const smoothing = (numSteps) => (numSteps < 100 ? 1 : Math.round(numSteps / 25));

function trailingMean(points, width) {
  let sum = 0;
  return points.map(([step, value], index) => {
    sum += value - (index >= width ? points[index - width][1] : 0);
    return [step, sum / Math.min(index + 1, width)];
  });
}

function niceTicks(low, high) {
  const raw = (high - low) / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw) * power;
  const from = Math.floor(low / unit + 0.02); // a hair beyond the outermost line is not worth another
  const to = Math.ceil(high / unit - 0.02);
  return Array.from({ length: Math.max(to - from, 1) + 1 }, (_, index) => (from + index) * unit);
}

function stacked(lines) {
  const sums = new Map();
  return lines.map((line) => ({ ...line, points: line.points.map(([step, value]) => {
    const base = sums.get(step) ?? 0;
    sums.set(step, base + value);
    return [step, base + value, base];
  }) }));
}

function drawPanel(panel, [first, last], width) {
  const form = FORMS[panel.form];
  const raw = panel.lines.map((line, index) => ({ ...line, color: COLORS[index % COLORS.length], values: new Map(line.points) }));
  const smooth = raw.map((line) => ({ ...line, points: line.is_sparse ? line.points : trailingMean(line.points, width) }));
  const shown = panel.is_stack ? stacked(smooth) : smooth;
  const bounds = (panel.is_stack ? shown : [...raw, ...shown]).flatMap((line) => line.points.map((point) => point[1]));
  const low = panel.is_stack ? 0 : bounds.reduce((a, b) => Math.min(a, b));
  const ticks = niceTicks(low >= 0 && low < 0.6 * bounds.reduce((a, b) => Math.max(a, b)) ? 0 : low, bounds.reduce((a, b) => Math.max(a, b)));
  const picture = svg("svg", { role: "img", "aria-label": `${panel.title} by step` });
  const legend = raw.map((line) => ({ line, value: h("b", { class: "num" }) }));
  const chart = { onhover: null };
  let x, y, height;

  chart.draw = () => {
    const full = picture.clientWidth || 300;
    height = picture.clientHeight - 18;
    x = (step) => 44 + ((full - 52) * (step - first)) / (last - first || 1);
    y = (value) => height - ((height - 6) * (value - ticks[0])) / (ticks.at(-1) - ticks[0] || 1);
    picture.setAttribute("viewBox", `0 0 ${full} ${height + 18}`);
    const path = (points) => points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const area = (points) => `${path(points)}${path(points.map(([step, , base]) => [step, base]).reverse()).replace("M", "L")}Z`;
    picture.replaceChildren(
      ...ticks.map((tick) => svg("g", {}, svg("line", { class: "rule", x1: 44, x2: full - 8, y1: y(tick), y2: y(tick) }),
        svg("text", { x: 38, y: y(tick) + 4, "text-anchor": "end" }, form(tick)))),
      svg("text", { x: 44, y: height + 16 }, `${first}`),
      svg("text", { x: full - 8, y: height + 16, "text-anchor": "end" }, `${last}`),
      ...(panel.is_stack || width === 1 ? [] : raw.filter((line) => !line.is_sparse).map((line) =>
        svg("path", { d: path(line.points), fill: "none", stroke: line.color, "stroke-opacity": 0.28 }))),
      ...shown.map((line) => panel.is_stack
        ? svg("path", { d: area(line.points), fill: line.color, "fill-opacity": 0.85 })
        : svg("path", { d: path(line.points), fill: "none", stroke: line.color, "stroke-width": 1.8, "stroke-linejoin": "round" })),
      ...shown.filter((line) => line.is_sparse || line.points.length === 1).flatMap((line) =>
        line.points.map(([step, value]) => svg("circle", { cx: x(step), cy: y(value), r: 2.6, fill: line.color }))));
  };

  chart.show = (step) => {
    for (const { line, value } of legend) value.textContent = form(step == null ? line.points.at(-1)[1] : line.values.get(step));
    picture.querySelector(".cross")?.remove();
    if (step != null) picture.append(svg("line", { class: "cross", x1: x(step), x2: x(step), y1: 4, y2: height }));
  };

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = first + ((event.clientX - box.left - 44) / (box.width - 52)) * (last - first);
    const steps = raw.flatMap((line) => [...line.values.keys()]);
    chart.onhover(steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best)));
  });
  picture.addEventListener("pointerleave", () => chart.onhover(null));
  charts.push(chart);
  return h("div", { class: "panel" }, h("h3", {}, panel.title), picture,
    legendOf(legend.map(({ line, value }) => [line.color, `${visible(line.label)} `, value])));
}

// ---- tokens that trainer and sampler disagree about

function drawWorst() {
  const section = document.getElementById("worst");
  section.hidden = !D.worst.length;
  const heads = ["step", "token in its context", "sampler", "trainer", "difference"].map((name) => h("th", {}, name));
  const spot = (each) => [visible(each.before), h("b", { class: "warn" }, visible(each.text)), visible(each.after)];
  const place = (each) => (byId.has(each.rollout) ? h("a", { href: `#${each.rollout}` }, `${each.step}`) : `${each.step}`);
  section.append(
    h("div", { class: "above" }, h("h2", {}, "Worst tokens"), h("span", { class: "soft small" },
      "Trainer and sampler disagree most about these, though the same weights sampled them.")),
    h("table", { class: "num worst" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, D.worst.map((each) => h("tr", {},
      h("td", {}, place(each)), h("td", { class: "mono" }, spot(each)), h("td", {}, signed(each.sampler, 3)), h("td", {}, signed(each.trainer, 3)),
      h("td", {}, signed(each.trainer - each.sampler, 3)))))));
}

// ---- rollouts: the list

const byId = new Map(D.rollouts.map((rollout) => [rollout.id, rollout]));
const groups = Map.groupBy ? Map.groupBy(D.rollouts, (rollout) => rollout.group) : D.rollouts.reduce((found, rollout) =>
  found.set(rollout.group, [...(found.get(rollout.group) ?? []), rollout]), new Map());
const main = document.getElementById("rollouts");
const one = h("div", { class: "one" });
const list = h("nav", { class: "list", "aria-label": "Rollouts" });
const count = h("span", { class: "num" });
const filters = {};
let matches = [];
let colorBy = D.rollouts.some((rollout) => rollout.turns.some((turn) => turn.training)) ? "by-diff" : "by-odd";

const isRight = (rollout) => rollout.outcomes.includes("right");
const mark = (rollout) => (rollout.reward == null ? "·" : isRight(rollout) ? "✓" : "✗");
const tone = (rollout) => (rollout.reward == null ? "soft" : isRight(rollout) ? "right" : "wrong");
const advantage = (rollout) => rollout.turns.find((turn) => turn.training)?.training.advantage;
const textOf = (turn, index) => (turn.texts ? visible(turn.texts[index]).replaceAll("\n", "↵\n") : `${turn.response_ids[index]} `);
const splitName = (split) => (split === "train" ? "training" : visible(split));
const rewardText = (rollout) => (rollout.reward == null ? "not scored" : String(+rollout.reward.toFixed(3)));

function haystack(rollout) {
  rollout.text ??= [rollout.id, rollout.task_id, rollout.question, rollout.answer, ...rollout.answers, ...rollout.turns.flatMap((turn) =>
    [turn.response_text, turn.command, turn.result, turn.action?.tool_name, ...usedTools(turn).flatMap((used) => [used.name, used.arguments, used.result])])].join("\n").toLowerCase();
  return rollout.text;
}

function choice(name, label, values, text = (value) => value) {
  const unique = [...new Set(values)].filter((value) => value !== "");
  filters[name] = h("select", { "aria-label": label, onchange: applyFilters },
    h("option", { value: "" }, label), unique.map((value) => h("option", { value }, visible(text(value)))));
  return filters[name];
}

function drawRollouts() {
  main.hidden = !D.rollouts.length;
  const outcomes = ["right", "wrong", "malformed", "tool error", "truncated", "unscored"];
  const present = outcomes.filter((name) => D.rollouts.some((rollout) => rollout.outcomes.includes(name)));
  const steps = [...new Set(D.rollouts.map((rollout) => rollout.step))].sort((a, b) => a - b);
  filters.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", oninput: applyFilters });
  const clear = h("button", { class: "quiet", type: "button", onclick: clearFilters }, "Clear");
  main.append(
    h("div", { class: "above" }, h("h2", {}, "Rollouts"), h("span", { class: "soft small" }, D.shown)),
    h("div", { class: "columns" },
      h("div", { class: "side" },
        h("div", { class: "filters" }, filters.search,
          choice("outcomes", "Any outcome", present),
          choice("step", "All steps", steps, (step) => `Step ${step}`),
          choice("split", "All splits", D.rollouts.map((rollout) => rollout.split), splitName),
          choice("kind", "All kinds", D.rollouts.map((rollout) => rollout.kind).sort()),
          h("div", { class: "count" }, count, clear)),
        list,
        h("div", { class: "keys" }, h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " next, previous   ", h("kbd", {}, "g"), " group   ", h("kbd", {}, "/"), " search")),
      one));
  applyFilters();
}

function applyFilters() {
  const words = filters.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const { outcomes, step, split, kind } = filters;
  matches = D.rollouts.filter((rollout) =>
    (!outcomes.value || rollout.outcomes.includes(outcomes.value)) && (!step.value || String(rollout.step) === step.value)
    && (!split.value || rollout.split === split.value) && (!kind.value || rollout.kind === kind.value)
    && words.every((word) => haystack(rollout).includes(word)));
  count.textContent = `${matches.length.toLocaleString("en")} of ${plural(D.rollouts.length, "rollout")}`;
  list.replaceChildren(...matches.map(listItem));
  if (isOpen()) markCurrent();
  else route();
}

function clearFilters() {
  for (const field of Object.values(filters)) field.value = "";
  applyFilters();
}

function listItem(rollout) {
  const troubles = rollout.outcomes.filter((name) => !["right", "wrong", "unscored"].includes(name));
  const place = [`step ${rollout.step}`, rollout.split !== "train" && splitName(rollout.split), visible(rollout.kind), plural(rollout.turns.length, "turn")];
  return h("a", { class: "item", href: `#${rollout.id}` },
    h("span", { class: tone(rollout), "aria-label": rollout.outcomes[0] }, mark(rollout)), h("span", { class: "q" }, visible(rollout.question)),
    h("span", { class: "num small soft" }, advantage(rollout) == null ? "" : signed(advantage(rollout))),
    h("span", { class: "sub" }, place.filter(Boolean).join(" · "), rollout.answer && ` → ${visible(rollout.answer.slice(0, 80))}`, troubles.length > 0 && h("span", { class: "warn" }, ` · ${troubles.join(", ")}`)));
}

// ---- one rollout

const ENDS = { "": "the verifier said STOP", turns: "the turn limit was reached", time: "time was up", prompt: "the prompt outgrew the model" };
const FINISHES = { length: "cut off at the token limit", deadline: "cut off by the deadline" };
const row = (label, content, kind = "") => content != null && content !== false && content !== ""
  ? [h("dt", {}, label), h("dd", { class: kind }, content)] : [];

function drawRollout(rollout) {
  const size = groups.get(rollout.group).length;
  const decided = rollout.scored_by ?? (rollout.scorer && `the rule “${rollout.scorer}”`);
  const reward = [h("span", { class: tone(rollout) }, `${mark(rollout)} ${rewardText(rollout)}`), decided ? `, decided by ${visible(decided)}` : "",
    advantage(rollout) == null ? "" : `, advantage ${signed(advantage(rollout))}`];
  one.replaceChildren(
    h("a", { class: "quiet back", href: "#rollouts" }, "← All rollouts"),
    h("article", { class: "card" },
      h("p", { class: "crumbs num" }, h("span", {}, splitName(rollout.split)), h("span", {}, `step ${rollout.step}`), h("span", {}, visible(rollout.kind)),
        h("span", {}, `task ${visible(rollout.task_id)}`), size > 1 && h("a", { href: `#group.${rollout.group}` }, `group of ${size} side by side`)),
      h("h2", {}, visible(rollout.question)),
      h("dl", { class: "rows" },
        row("Answer", rollout.answer ? visible(rollout.answer) : h("span", { class: "soft" }, "(empty)")),
        row("Accepted", visible(rollout.answers.join("  |  "))),
        row("Reward", reward), row("Judge", rollout.analysis && visible(rollout.analysis)), row("Failure", rollout.error && visible(rollout.error), "wrong"),
        row("Branch", rollout.branch && leftAt(rollout)),
        row("Ended", `${ENDS[rollout.truncated] ?? visible(rollout.truncated)}, after ${plural(rollout.turns.length, "turn")}`),
        row("Seconds", rolloutTime(rollout)))),
    h("div", { class: "split tools" }, colorSwitch(), colorScale(),
      h("span", { class: "soft small" }, rollout.split === "train" ? "" : "Held-out rollouts are not trained.")),
    ...rollout.turns.map((turn, index) => drawTurn(rollout, turn, index)));
  one.className = `one ${colorBy}`;
}

const toMilliseconds = (value) => Math.max(Math.round(1000 * value) / 1000, 0); // as the log has them, without what subtraction leaves

function rolloutTime(rollout) {
  if (rollout.seconds == null) return null;
  const parts = rollout.turns.flatMap((turn, index) => (turn.plan_s == null
    ? [["turn", turn.seconds]]
    : [["planner", turn.plan_s], ["tool", turn.tool_s], ["executor, verifier", turn.seconds - turn.plan_s - turn.tool_s]]
  ).map(([name, value], place) => ({ kind: name, name: `turn ${index + 1}: ${name}`, seconds: toMilliseconds(value), gap: index > 0 && !place })));
  const left = rollout.seconds - parts.reduce((sum, part) => sum + part.seconds, 0);
  parts.push({ kind: "waiting, answer", name: "waiting, answer", seconds: toMilliseconds(left), gap: true });
  const seen = [...new Set(parts.filter((part) => part.seconds > 0).map((part) => part.kind))];
  const sum = (kind) => parts.filter((part) => part.kind === kind).reduce((total, part) => total + part.seconds, 0);
  return [secondsBar(parts.map((part) => ({ ...part, color: TIME_COLORS[part.kind] })), rollout.seconds || 1),
    legendOf([...seen.map((kind) => [TIME_COLORS[kind], `${kind} `, h("b", {}, seconds(sum(kind)))]), ["transparent", "all ", h("b", {}, seconds(rollout.seconds))]])];
}

const usedTools = (turn) => turn.tool_calls ?? [];
const hasError = (turn) => turn.is_error || usedTools(turn).some((used) => used.is_error);
const isAnswer = (turn) => !turn.action && !turn.is_error && !usedTools(turn).length;
const turnName = (turn) => (turn.action ? visible(turn.action.tool_name) : isAnswer(turn) ? "answer"
  : [...usedTools(turn).map((used) => visible(used.name)), ...(turn.is_error ? ["malformed"] : [])].join(", "));
const callRows = (turn) => usedTools(turn).flatMap((used) => [
  row("Call", [h("b", {}, visible(used.name)), " ", visible(used.arguments)], "mono"),
  row(used.is_error ? "Error" : "Result", visible(used.result), used.is_error ? "mono wrong" : "mono"),
  row("Code", used.code_wall_s != null && `${seconds(used.code_wall_s)}, ${seconds(used.code_cpu_s)} of them on a core`)]);

function drawTurn(rollout, turn, index) {
  const action = turn.action;
  const versions = [...new Set(turn.spans.map((span) => span[2]))];
  const trained = turn.training && `mini-batch ${turn.training.minibatch + 1}`;
  const about = [plural(turn.response_ids.length, "token"), versions.length > 0 && `weights ${versions.join(", ")}`, trained, seconds(turn.seconds)];
  const fields = action ? [row("Justification", visible(action.justification)), row("Context", visible(action.context)),
    row("Sub-goal", visible(action.sub_goal)), row("Tool", visible(action.tool_name))]
    : turn.is_error ? [row("Action", h("span", { class: "wrong" }, usedTools(turn).length ? "malformed" : "malformed: no tool ran"))] : [];
  const asked = action || turn.is_error;
  const rest = isAnswer(turn) ? [] : [h("div", { class: "sep" }), callRows(turn), fields,
    row("Command", asked && visible(turn.command), "mono"),
    row(turn.is_error ? "Error" : "Result", asked && visible(turn.result), turn.is_error ? "mono wrong" : "mono"),
    row("Code", turn.code_wall_s != null && `${seconds(turn.code_wall_s)}, ${seconds(turn.code_cpu_s)} of them on a core`),
    row("Verdict", turn.verdict && [visible(turn.verdict), turn.verdict_text && `: ${visible(turn.verdict_text)}`])];
  return h("article", { class: "card turn" },
    h("div", { class: "split" }, h("h3", {}, `Turn ${index + 1} `, h("span", {}, turnName(turn))),
      h("span", { class: "soft small num" }, about.filter(Boolean).join(" · "))),
    h("dl", { class: "rows" },
      row("Prompt", promptText(rollout, index), turn.prompt == null ? "" : "mono"),
      row("Response", turn.texts || turn.response_ids.length ? tokenLine(turn) : visible(turn.response_text)),
      !turn.texts && turn.response_ids.length ? row("As text", visible(turn.response_text), "mono") : [],
      row("", FINISHES[turn.finish_reason] && h("span", { class: "warn" }, FINISHES[turn.finish_reason])),
      rest));
}

function promptText(rollout, index) {
  const turn = rollout.turns[index];
  if (turn.prompt == null) {
    const why = turn.num_new_tokens == null ? "this log has no prompts" : "there is no tokenizer";
    return h("span", { class: "soft" }, turn.num_prompt_tokens == null ? why : `${plural(turn.num_prompt_tokens, "token")}; ${why}`);
  }
  rollout.prompts ??= rollout.turns.reduce((found, each) => [...found, (found.at(-1) ?? "").slice(0, each.prompt_kept) + (each.prompt ?? "")], []);
  const kept = rollout.prompts[index].slice(0, turn.prompt_kept);
  const numKept = turn.num_prompt_tokens - turn.num_new_tokens;
  if (!kept) return visible(turn.prompt);
  const old = h("span", { class: "old", hidden: true }, visible(kept));
  const button = h("button", { class: "quiet", type: "button", onclick: () => {
    old.hidden = !old.hidden;
    button.textContent = label();
  } });
  const label = () => (old.hidden ? `+ ${numKept} tokens as in turn ${index}` : `− hide the ${numKept} tokens of turn ${index}`);
  button.textContent = label();
  return [button, "\n", old, visible(turn.prompt)];
}

// ---- tokens

function tokenLine(turn) {
  const scores = turn.training?.logprobs ?? [];
  return h("div", { class: "tokens", onpointerover: (event) => tokenTip(event.target, turn), onpointerleave: hideTip },
    turn.response_ids.map((id, index) => {
      const difference = scores[index] == null || turn.response_logprobs[index] == null ? 0 : scores[index] - turn.response_logprobs[index];
      const strength = Math.min(Math.max((Math.log10(Math.abs(difference) || 1e-9) + 4) / 4, 0), 1);
      const surprise = turn.response_logprobs[index] == null ? 0 : Math.min(-turn.response_logprobs[index] / 6, 1);
      const text = turn.texts ? turn.texts[index] : null;
      return h("span", { class: `${difference > 0 ? "up" : "down"}${text ? "" : " id"}`, "--d": strength.toFixed(3), "--s": surprise.toFixed(3), "data-index": index },
        text ? visible(text).replaceAll("\n", "↵\n") : turn.texts ? "▫" : `${id} `);
    }));
}

function tokenTip(target, turn) {
  if (!target.dataset.index) return hideTip();
  const index = Number(target.dataset.index);
  const [sampler, trainer] = [turn.response_logprobs[index], turn.training?.logprobs[index]];
  const span = turn.spans.find(([start, end]) => start <= index && index < end);
  const text = turn.texts && (turn.texts[index] || "(part of a character)");
  const rows = [tipRow("id", String(turn.response_ids[index])), tipRow("sampler", sampler == null ? "−∞" : `${signed(sampler, 5)}  (${share(Math.exp(sampler))})`)];
  if (trainer != null) rows.push(tipRow("trainer", `${signed(trainer, 5)}  (${share(Math.exp(trainer))})`));
  if (trainer != null && sampler != null) rows.push(tipRow("difference", signed(trainer - sampler, 5)), tipRow("ratio", Math.exp(trainer - sampler).toFixed(5)));
  if (trainer == null) rows.push(tipRow("trainer", turn.training ? "did not count" : "not trained"));
  if (span) rows.push(tipRow("weights", `version ${span[2]}, tokens ${span[0]} to ${span[1] - 1}`));
  return showTip(target, ...(text == null ? [] : [h("b", {}, visible(JSON.stringify(text)))]), ...rows);
}

function colorSwitch() {
  const button = (name, label) => h("button", { type: "button", "aria-pressed": String(colorBy === name), onclick: () => {
    colorBy = name;
    route();
  } }, label);
  return h("div", { class: "switch", role: "group", "aria-label": "Colour tokens by" }, button("by-diff", "Trainer − sampler"), button("by-odd", "Surprisal"));
}

const colorScale = () => h("span", { class: "scale num" }, ...(colorBy === "by-diff"
  ? ["−1", h("i"), "+1", h("span", {}, "nats, on a log scale from 0.0001")] : ["0", h("i"), "6", h("span", {}, "nats")]));

// ---- a group side by side

function drawGroup(members) {
  const [first] = members;
  const rewards = members.map((rollout) => rollout.reward ?? 0);
  const mean = rewards.reduce((a, b) => a + b, 0) / members.length;
  const isTrained = members.some((rollout) => advantage(rollout) != null);
  const why = isTrained ? "" : first.split !== "train" ? ", held-out: not trained"
    : rewards.every((reward) => reward === rewards[0]) ? ", not trained: one reward, no signal" : ", no advantages in the log";
  one.replaceChildren(
    h("a", { class: "quiet back", href: "#rollouts" }, "← All rollouts"),
    h("div", { class: "card" },
      h("p", { class: "crumbs num" }, h("span", {}, splitName(first.split)), h("span", {}, `step ${first.step}`), h("span", {}, visible(first.kind)),
        h("span", {}, `task ${visible(first.task_id)}`)),
      h("h2", {}, visible(first.question)),
      h("dl", { class: "rows" }, row("Accepted", visible(first.answers.join("  |  "))),
        row("Rollouts", `${members.filter(isRight).length} of ${members.length} right, mean reward ${mean.toFixed(3)}${why}`))),
    ...(members.some((rollout) => rollout.branch) ? drawTree(members) : [drawMembers(members)]));
}

function drawMembers(members) {
  return h("div", { class: "members" }, members.map((rollout) => h("a", { class: `member ${isRight(rollout) ? "good" : ""}`, href: `#${rollout.id}` },
    h("div", { class: "split num" }, h("span", { class: tone(rollout) }, `${mark(rollout)} ${rewardText(rollout)}`),
      h("span", { class: "soft small" }, advantage(rollout) == null ? "" : `advantage ${signed(advantage(rollout))}`)),
    h("div", {}, rollout.answer ? visible(rollout.answer.slice(0, 300)) : h("span", { class: "soft" }, "(empty)")),
    h("ol", {}, rollout.turns.map((turn) => h("li", {}, h("b", {}, turnName(turn)), " ",
      turn.action ? visible(turn.action.sub_goal.slice(0, 300)) : "", usedTools(turn).map((used) => visible(used.arguments).slice(0, 300)).join(" · "), hasError(turn) && h("span", { class: "wrong" }, " → error")))),
    rollout.truncated && h("div", { class: "warn small" }, ENDS[rollout.truncated] ?? visible(rollout.truncated)))));
}

// ---- branches: every root with the places at which others left it, and how these went on

const rootOf = (branch) => groups.get(branch.group)[branch.branch.parent];
const outcome = (rollout) => h("a", { class: `num ${tone(rollout)}`, href: `#${rollout.id}` }, `${mark(rollout)} ${rewardText(rollout)}`);
const score = (branch) => number(branch.branch.score);

function leftAt(rollout) {
  const { turn, token } = rollout.branch;
  return ["left ", h("a", { href: `#${rootOf(rollout)?.id}` }, "another rollout"), ` in turn ${turn + 1}, before token ${token}; score ${score(rollout)}`];
}

function drawTree(members) {
  return members.filter((rollout) => !rollout.branch).map((root) => {
    const branches = members.filter((rollout) => rollout.branch && rootOf(rollout) === root)
      .sort((a, b) => a.branch.turn - b.branch.turn || a.branch.token - b.branch.token);
    return h("article", { class: "card" }, drawPath(root, 0, 0, branches),
      branches.map((branch) => drawPath(branch, branch.branch.turn, branch.branch.token, [])));
  });
}

// A rollout from a token of a turn on, its reward beside it.
function drawPath(rollout, firstTurn, firstToken, branches) {
  const gained = advantage(rollout) != null && h("div", { class: "soft small" }, `advantage ${signed(advantage(rollout))}`);
  return h("div", { class: `path ${rollout.branch ? "branch" : "root"}` }, h("div", { class: "num" }, outcome(rollout), gained),
    h("div", {}, rollout.turns.map((turn, index) => index >= firstTurn && turnText(rollout, index, index === firstTurn ? firstToken : 0, branches)),
      h("p", { class: "small" }, h("span", { class: "soft" }, "Answer "), rollout.answer ? visible(rollout.answer.slice(0, 300)) : "(empty)")));
}

// A turn's response from token `from` on, with a mark before each token at which a branch left, and what came of it.
function turnText(rollout, index, from, branches) {
  const turn = rollout.turns[index];
  const left = (token) => branches.filter(({ branch }) => branch.turn === index && branch.token === token).map((branch) =>
    h("a", { class: "fork num", href: `#${branch.id}`, title: `score ${score(branch)}: another rollout goes on from here` }, `⑂ ${score(branch)}`));
  return h("p", {},
    h("span", { class: "soft small" }, `${index + 1} `, rollout.branch && index === rollout.branch.turn && `⑂ ${score(rollout)} … `),
    h("span", { class: "tokens" }, turn.response_ids.slice(from).map((id, place) => [left(from + place), textOf(turn, from + place)]), left(turn.response_ids.length)),
    h("span", { class: "soft small" }, " → ", hasError(turn) ? h("span", { class: "wrong" }, "error") : visible((usedTools(turn).map((used) => used.result).join(" · ") || turn.result || "").slice(0, 120))));
}

// ---- where one is: the fragment of the address

const wanted = () => location.hash.slice(1);

function current() {
  const members = groupWanted();
  return byId.get(wanted()) ?? (members ? members[0] : matches.find((rollout) => advantage(rollout) != null) ?? matches[0]);
}

const groupWanted = () => wanted().startsWith("group.") && groups.get(wanted().slice(6));
const isOpen = () => Boolean(groupWanted()) || byId.has(wanted());

function markCurrent() {
  const rollout = current();
  for (const item of list.children) item.toggleAttribute("aria-current", item.getAttribute("href") === `#${rollout?.id}`);
}

function route() {
  main.classList.toggle("open", isOpen());
  hideTip();
  if (groupWanted()) drawGroup(groupWanted());
  else if (current()) drawRollout(current());
  markCurrent();
  const item = list.querySelector("[aria-current]");
  const below = item ? item.offsetTop - list.offsetTop : 0; // scrolled by hand: scrollIntoView would move the page too
  if (below < list.scrollTop || below + 80 > list.scrollTop + list.clientHeight) list.scrollTop = below - list.clientHeight / 3;
  if (isOpen() && (one.getBoundingClientRect().top < 0 || one.getBoundingClientRect().top > innerHeight / 2)) main.scrollIntoView();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !D.rollouts.length) return;
  if (event.key === "Escape") return document.activeElement.blur();
  if (event.target.matches("input, select, textarea")) return;
  const step = { j: 1, k: -1 }[event.key];
  if (step && matches.length) {
    const next = Math.min(Math.max(matches.indexOf(current()) + step, 0), matches.length - 1);
    location.hash = matches[next].id;
  } else if (event.key === "g" && current()) location.hash = groupWanted() ? current().id : `group.${current().group}`;
  else if (event.key === "/") {
    filters.search.focus();
    event.preventDefault();
  }
}

drawRun();
drawCurves();
drawWorst();
drawRollouts();
route();
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
