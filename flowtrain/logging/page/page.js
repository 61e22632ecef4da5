// The page of a run.
// ---- the run

function drawRun() {
  const [first, last] = D.reward.length ? D.reward : [null, null];
  const total = Object.values(D.seconds).reduce((a, b) => a + b, 0);
  const tile = (label, value) => value && h("div", { class: "tile" }, h("span", { class: "soft small" }, label), h("b", { class: "num" }, value));
  const tiles = [
    ["Held-out reward", last != null && (first === last ? last.toFixed(3) : `${first.toFixed(2)} → ${last.toFixed(2)}`)],
    ["Steps", D.step != null && (D.num_steps ? `${D.step} of ${D.num_steps}` : `${D.step}`)],
    ["Weight versions", D.versions.length > 0 && [...new Set(D.versions)].join(" – ")],
    ["Rollouts logged", D.num_logged > 0 && D.num_logged.toLocaleString("en")],
    ["Time in steps", total > 0 && seconds(total)]].filter(([, value]) => value);
  document.getElementById("run").replaceChildren(
    h("h1", {}, visible(D.name)),
    h("div", { class: "tiles", hidden: !tiles.length }, tiles.map(([label, value]) => tile(label, value))),
    h("ul", { class: "notes", hidden: !D.notes.length }, D.notes.map((note) => h("li", {}, visible(note)))),
    h("dl", { class: "facts" }, D.facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, visible(value))))),
    h("div", { class: "more" },
      h("details", { hidden: !D.results.length }, h("summary", {}, "Held-out results"), resultTable()),
      h("details", { hidden: !D.config }, h("summary", {}, "Every option"), h("pre", {}, visible(D.config.trim())))));
}

function resultTable() {
  const heads = ["", "before", "after", "difference"].map((name) => h("th", {}, name));
  const rows = D.results.map((cells) => h("tr", { class: !cells[1] && "title" }, cells.map((cell) => h("td", {}, visible(cell)))));
  return h("table", { class: "num" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
}

// ---- rollouts: the list

const byId = new Map();
const groups = new Map();
function indexRollouts() {
  byId.clear();
  groups.clear();
  for (const rollout of D.rollouts) {
    byId.set(rollout.id, rollout);
    groups.set(rollout.group, [...(groups.get(rollout.group) ?? []), rollout]);
  }
}
const main = document.getElementById("rollouts");
const one = h("div", { class: "one" });
const list = h("nav", { class: "list", "aria-label": "Rollouts" });
const count = h("span", { class: "num" });
const filters = {};
let matches = [];
let items = new Map();

const isRight = (rollout) => rollout.outcomes.includes("right");
const mark = (rollout) => (rollout.reward == null ? "·" : isRight(rollout) ? "✓" : "✗");
const tone = (rollout) => (rollout.reward == null ? "soft" : isRight(rollout) ? "right" : "wrong");
const advantage = (rollout) => rollout.turns.find((turn) => turn.training)?.training.advantage;
const textOf = (turn, index) => (turn.texts ? visible(turn.texts[index]).replaceAll("\n", "↵\n") : `${turn.response_ids[index]} `);
const splitName = (split) => (split === "train" ? "training" : visible(split));
const rewardText = (rollout) => (rollout.reward == null ? "not scored" : String(+rollout.reward.toFixed(3)));

function haystack(rollout) {
  rollout.text ??= [rollout.id, rollout.task_id, rollout.question, rollout.answer, ...rollout.answers, ...rollout.turns.flatMap((turn) =>
    [turn.response_text, turn.problem, turn.evidence, turn.action?.tool_name, ...usedTools(turn).flatMap((used) => [used.name, used.arguments, used.result])])].join("\n").toLowerCase();
  return rollout.text;
}

function choice(name, label, values, text = (value) => value) {
  const unique = [...new Set(values)].filter((value) => value !== "");
  const options = unique.map((value) => h("option", { value }, visible(text(value))));
  filters[name] = h("select", { "aria-label": label, onchange: applyFilters }, h("option", { value: "" }, label), options);
  return filters[name];
}

function drawRollouts() {
  const all = D.rollouts;
  indexRollouts();
  items = new Map(all.map((rollout) => [rollout.id, listItem(rollout)]));
  main.hidden = !all.length;
  filters.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", oninput: applyFilters });
  const outcomes = ["right", "wrong", "malformed", "tool error", "truncated", "unscored"].filter((name) => all.some((rollout) => rollout.outcomes.includes(name)));
  main.replaceChildren(
    h("div", { class: "above" }, h("h2", {}, "Rollouts"), h("span", { class: "soft small" }, D.shown)),
    h("div", { class: "columns" },
      h("div", { class: "side" },
        h("div", { class: "filters" }, filters.search, choice("outcomes", "Any outcome", outcomes),
          choice("step", "All steps", all.map((rollout) => rollout.step).sort((a, b) => a - b), (step) => `Step ${step}`),
          choice("split", "All splits", all.map((rollout) => rollout.split).sort(), splitName), choice("kind", "All kinds", all.map((rollout) => rollout.kind).sort()),
          h("div", { class: "count" }, count, h("button", { class: "quiet", type: "button", onclick: clearFilters }, "Clear"))),
        list,
        h("div", { class: "keys" }, h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " next, previous   ", h("kbd", {}, "g"), " group   ", h("kbd", {}, "/"), " search")),
      one));
  filter();
  route();
}

function filter() {
  const words = filters.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const { outcomes, step, split, kind } = filters;
  matches = D.rollouts.filter((rollout) =>
    (!outcomes.value || rollout.outcomes.includes(outcomes.value)) && (!step.value || String(rollout.step) === step.value)
    && (!split.value || rollout.split === split.value) && (!kind.value || rollout.kind === kind.value)
    && words.every((word) => haystack(rollout).includes(word)));
  count.textContent = `${matches.length.toLocaleString("en")} of ${plural(D.rollouts.length, "rollout")}`;
  list.replaceChildren(...matches.map((rollout) => items.get(rollout.id)));
}

function applyFilters() {
  filter();
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
        row("Time", rollout.seconds != null && seconds(rollout.seconds)))),
    h("div", { class: "split tools" }, colorScale(),
      h("span", { class: "soft small" }, rollout.split === "train" ? "" : "Held-out rollouts are not trained.")),
    ...rollout.turns.map((turn, index) => drawTurn(rollout, turn, index)));
}

const turnTime = (turn) => seconds(turn.seconds) + (turn.plan_s == null ? "" : `: planner ${seconds(turn.plan_s)}, tool ${seconds(turn.tool_s)}`);
const usedTools = (turn) => turn.tool_calls ?? [];
const hasError = (turn) => turn.problem || usedTools(turn).some((used) => used.is_error);
const isAnswer = (turn) => !turn.action && !turn.problem && !usedTools(turn).length;
const turnName = (turn) => (turn.action ? visible(turn.action.tool_name) : isAnswer(turn) ? "answer"
  : [...usedTools(turn).map((used) => visible(used.name)), ...(turn.problem ? ["malformed"] : [])].join(", "));
const callRows = (turn) => usedTools(turn).flatMap((used) => [
  row("Call", [h("b", {}, visible(used.name)), " ", visible(used.arguments || "no command"), used.note && `  # ${visible(used.note)}`], "mono"),
  row(used.is_error ? "Error" : "Result", visible(used.result), used.is_error ? "mono wrong" : "mono"),
  row("Code", used.code_wall_s != null && `${seconds(used.code_wall_s)}, ${seconds(used.code_cpu_s)} of them on a core`)]);

function drawTurn(rollout, turn, index) {
  const action = turn.action;
  const versions = [...new Set(turn.spans.map((span) => span[2]))];
  const trained = turn.training && `mini-batch ${turn.training.minibatch + 1}`;
  const about = [plural(turn.response_ids.length, "token"), versions.length > 0 && `weights ${versions.join(", ")}`, trained, turnTime(turn)];
  const fields = action ? [row("Justification", visible(action.justification)), row("Context", visible(action.context)),
    row("Sub-goal", visible(action.sub_goal)), row("Tool", visible(action.tool_name))]
    : turn.problem ? [row("Action", h("span", { class: "wrong" }, usedTools(turn).length ? "malformed" : "malformed: no tool ran"))] : [];
  const rest = isAnswer(turn) ? [] : [h("div", { class: "sep" }), fields, callRows(turn),
    row("Evidence", turn.evidence && visible(turn.evidence), "mono"),
    row("Problem", turn.problem && visible(turn.problem), "mono wrong"),
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
  const numKept = turn.num_prompt_tokens - turn.num_new_tokens;
  return [numKept > 0 && h("span", { class: "soft" }, `${plural(numKept, "token")} as in turn ${index}, then`), numKept > 0 && "\n", visible(turn.prompt)];
}

// ---- tokens

function tokenLine(turn) {
  return h("div", { class: "tokens", onpointerover: (event) => tokenTip(event.target, turn), onpointerleave: hideTip },
    turn.response_ids.map((id, index) => {
      const surprise = turn.response_logprobs[index] == null ? 0 : Math.min(-turn.response_logprobs[index] / 6, 1);
      const text = turn.texts ? turn.texts[index] : null;
      return h("span", { class: text ? "" : "id", "--s": surprise.toFixed(3), "data-index": index },
        text ? visible(text).replaceAll("\n", "↵\n") : turn.texts ? "▫" : `${id} `);
    }));
}

function tokenTip(target, turn) {
  if (!target.dataset.index) return hideTip();
  const index = Number(target.dataset.index);
  const sampler = turn.response_logprobs[index];
  const span = turn.spans.find(([start, end]) => start <= index && index < end);
  const text = turn.texts && (turn.texts[index] || "(part of a character)");
  const rows = [tipRow("id", String(turn.response_ids[index])), tipRow("sampler", sampler == null ? "−∞" : `${signed(sampler, 5)}  (${share(Math.exp(sampler))})`)];
  if (span) rows.push(tipRow("weights", `version ${span[2]}, tokens ${span[0]} to ${span[1] - 1}`));
  return showTip(target, ...(text == null ? [] : [h("b", {}, visible(JSON.stringify(text)))]), ...rows);
}

const colorScale = () => h("span", { class: "scale num" }, "0", h("i"), "6", h("span", {}, "nats of surprisal"));

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

const rootOf = (branch) => byId.get(`${branch.group}.${branch.branch.parent}`);
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
  if (byId.has(wanted()) || members) return byId.get(wanted()) ?? members[0];
  return matches.find((rollout) => advantage(rollout) != null) ?? matches[0];
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

function drawAll() {
  drawRun();
  drawCurves(D.panels);
  drawRollouts();
}

drawAll();
addEventListener("hashchange", () => list.isConnected && route());
addEventListener("keydown", onKey);
