"use strict";

// What the page is made of. Everything of a run is in D; it reaches the document through textContent alone.
const D = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c5", "--c6", "--c4"].map((name) => `var(${name})`);

// ---- building blocks

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--") || name === "background") element.style.setProperty(name, value);
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

const legendOf = (entries) => h("div", { class: "legend" }, entries.map(([color, ...content]) => h("span", {}, h("i", { background: color }), ...content)));

// ---- curves

const at = h("span", { class: "soft small num" });
let charts = [];
let averaged = 1;

function drawCurves(panels) {
  const section = document.getElementById("curves");
  section.hidden = !panels.length;
  let [first, last] = [Infinity, -Infinity];
  for (const panel of panels) for (const line of panel.lines) for (const [step] of line.points) [first, last] = [Math.min(first, step), Math.max(last, step)];
  averaged = smoothing(last - first);
  charts = panels.map((panel) => makeChart(panel, first, last));
  section.replaceChildren(h("div", { class: "above" }, h("h2", {}, "Curves"), at), h("div", { class: "grid" }, charts.map((chart) => chart.element)));
  charts.forEach((chart) => chart.draw()); // which have a size now
  showStep(null);
}
addEventListener("resize", () => charts.forEach((chart) => chart.draw()));

function showStep(step) {
  const thin = averaged > 1 ? ` Faint: each step. Strong: mean of the last ${averaged}.` : "";
  at.textContent = step == null ? `Last values.${thin}` : `Step ${step}`;
  for (const chart of charts) chart.show(step);
}

const smoothing = (numSteps) => (numSteps < 100 ? 1 : Math.round(numSteps / 25));

function trailingMean(points, width) {
  let sum = 0;
  return points.map(([step, value], index) => {
    sum += value - (index >= width ? points[index - width][1] : 0);
    return [step, sum / Math.min(index + 1, width)];
  });
}

// Times get round numbers of the unit that they are told in, which leaves the labels short.
function timeTicks(low, high) {
  const [unit, name] = high >= 7200 ? [3600, "h"] : high >= 120 ? [60, "min"] : [1, "s"];
  const values = niceTicks(low / unit, high / unit);
  return [values.map((value) => value * unit), (tick) => (high < 1 ? seconds(tick) : `${+(tick / unit).toPrecision(3)} ${name}`)];
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

function makeChart(panel, first, last) {
  const width = averaged;
  const form = FORMS[panel.form];
  const raw = panel.lines.map((line, index) => ({ ...line, color: COLORS[index % COLORS.length], values: new Map(line.points) }));
  const smooth = raw.map((line) => ({ ...line, points: line.is_sparse ? line.points : trailingMean(line.points, width) }));
  const shown = panel.is_stack ? stacked(smooth) : smooth;
  let [low, high] = [Infinity, -Infinity];
  for (const line of panel.is_stack ? shown : [...raw, ...shown]) for (const [, value] of line.points) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (panel.is_stack || (low >= 0 && low < 0.6 * high)) low = 0;
  const [ticks, tickForm] = panel.form === "seconds" ? timeTicks(low, high) : [niceTicks(low, high), form];
  const legend = raw.map((line) => ({ line, value: h("b", { class: "num" }) }));
  const picture = svg("svg", { role: "img", "aria-label": `${panel.title} by step` });
  const legendBox = legendOf(legend.map(({ line, value }) => [line.color, `${visible(line.label)} `, value]));
  const chart = { element: h("div", { class: "panel" }, h("h3", {}, visible(panel.title)), picture, legendBox) };
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
        svg("text", { x: 38, y: y(tick) + 4, "text-anchor": "end" }, tickForm(tick)))),
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
    showStep(steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best)));
  });
  picture.addEventListener("pointerleave", () => showStep(null));
  return chart;
}
