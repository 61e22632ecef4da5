// Follows what the page shows: asks the server that it comes from, again and again, for what is new.
const NEW_RUN = { facts: [], config: "", step: null, num_steps: null, reward: [], versions: [], seconds: {}, num_logged: 0, results: [], worst: [], shown: "", notes: [] };
const EVERY_MS = 1000, HIDDEN_MS = 5000, AFTER_FAILURE_MS = 2000, MOST_POINTS = 2000;
const TOKEN = "flowtrain-view-token";
const badge = h("b");
const about = h("span");
const lost = h("span", { class: "wrong", role: "status" });
D.status = h("p", { class: "state" }, D.live.is_inside && h("a", { href: "/", class: "soft" }, "← all runs"), badge, about, lost);
Object.assign(D, D.live.kind === "table" ? { runs: [], panels: [] } : { ...NEW_RUN, panels: [], rollouts: [] });

// ---- the token: out of the address at once, so that it is in no history, and kept for this tab

let token = sessionStorage.getItem(TOKEN) ?? "";
function takeToken(text) {
  if (!text || text === token) return;
  token = text;
  sessionStorage.setItem(TOKEN, token);
  wake();
}
function readAddress() {
  const found = /^#token=([^&]+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  takeToken(decodeURIComponent(found[1]));
}
// A tab opened from another one asks that for the token.
const tabs = new BroadcastChannel(TOKEN);
tabs.onmessage = ({ data }) => {
  if (data === "ask" && token) tabs.postMessage({ token });
  else if (data.token && !token) takeToken(data.token);
};

// ---- asking

const sleepers = new Set();
function wake() {
  for (const done of sleepers) done();
  sleepers.clear();
}
const pause = (milliseconds) => new Promise((done) => {
  sleepers.add(done);
  setTimeout(() => {
    sleepers.delete(done);
    done();
  }, milliseconds);
});

async function ask(path, query) {
  const response = await fetch(`${path}?${new URLSearchParams(query)}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (response.ok) return response.json();
  throw new Error(response.status === 401 ? "The token is missing or wrong: open the address that the command printed." : `The server says: ${(await response.text()).slice(0, 300)}`);
}

// Asks until the page is left; `take` says whether there is more at once, or how long to wait.
async function follow(path, query, take) {
  for (;;) {
    let news = null;
    try {
      news = await ask(path, query());
    } catch (error) {
      lost.textContent = error instanceof TypeError ? "The server of this page does not answer; it is asked again." : visible(error.message);
    }
    if (news) lost.textContent = "";
    const wait = news ? take(news) : AFTER_FAILURE_MS;
    await pause(wait ?? (document.hidden ? HIDDEN_MS : EVERY_MS));
  }
}

// ---- a run

const cursor = { epoch: -1, record: 0, low: 0, high: 0, head: "" };

function addPoints(line, points) {
  for (const point of points) {
    const place = line.points.findLastIndex(([step]) => step <= point[0]);
    const isThere = place >= 0 && line.points[place][0] === point[0];
    line.points.splice(isThere ? place : place + 1, isThere ? 1 : 0, point);
  }
  // Old points lie closer than pixels then.
  if (line.points.length > MOST_POINTS) line.points = line.points.filter((_, index) => index % 2 || index > MOST_POINTS / 2);
}

function addPanels(panels) {
  for (const news of panels) {
    const panel = D.panels.find(({ title }) => title === news.title);
    if (!panel) D.panels.push(news);
    else for (const line of news.lines) {
      const known = panel.lines.find(({ label }) => label === line.label);
      if (known) addPoints(known, line.points);
      else panel.lines.push(line);
    }
  }
  D.panels.sort((a, b) => a.place - b.place);
}

// Newest step first, in it the order of a page that is a file.
function inOrder(a, b) {
  const [aMember, bMember] = [a, b].map(({ id }) => Number(id.split(".").at(-1)));
  return b.step - a.step || (a.split < b.split ? -1 : a.split > b.split ? 1 : 0) || a.group_index - b.group_index || aMember - bMember;
}

function addRollouts(news) {
  news.rollouts.forEach((rollout, index) => { if (rollout) rollout.number = news.numbers[index]; });
  const all = [...D.rollouts.filter(({ number }) => number >= news.oldest), ...news.rollouts.filter(Boolean)];
  const isSame = all.length === D.rollouts.length && !news.rollouts.length;
  D.rollouts = all.sort(inOrder);
  if (!news.numbers.length) return !isSame;
  cursor.low = Math.min(cursor.low || Infinity, ...news.numbers);
  cursor.high = Math.max(cursor.high, ...news.numbers);
  return true;
}

function showState(state, quiet_s) {
  D.status.className = `state ${state.name}`;
  badge.textContent = visible(state.name);
  about.textContent = visible(state.text) + (state.name === "running" && quiet_s != null ? ` Last step logged ${seconds(Math.round(quiet_s))} ago.` : "");
}

function takeRun(news) {
  if (news.kind === "table") location.reload(); // where nothing was, there is a folder of runs now
  if (!news.state) return null;
  if (news.is_new) {
    const wasCut = cursor.epoch !== -1 && (D.panels.length || D.rollouts.length);
    Object.assign(D, { ...NEW_RUN, panels: [], rollouts: [] });
    Object.assign(cursor, { low: 0, high: 0 });
    items.clear();
    if (wasCut) D.cut = "The logs were cut, as a resumed run does, and read anew.";
  }
  const hasHead = Boolean(news.head);
  if (hasHead) Object.assign(D, news.head, { notes: [...(D.cut ? [D.cut] : []), ...news.head.notes] });
  addPanels(news.panels);
  const hasRollouts = addRollouts(news) || news.is_new;
  Object.assign(cursor, { epoch: news.epoch, record: news.record, head: news.head_id });
  showState(news.state, news.quiet_s);
  if (hasHead) {
    drawRun();
    document.title = printableTitle();
  }
  if (news.panels.length || news.is_new) drawCurves();
  if (hasRollouts) drawRollouts();
  if (hasHead || hasRollouts) drawWorst();
  return news.has_more ? 0 : null;
}

const printableTitle = () => `${D.step == null ? "" : `${D.step}${D.num_steps ? `/${D.num_steps}` : ""} · `}${visible(D.name)} · flowtrain`;

// ---- its dataflow

const flowBox = h("section", { "aria-label": "Dataflow", hidden: true });

function flowTable(table) {
  const body = table.rows.map((row) => h("tr", { class: row.is_silent && "wrong" }, row.cells.map((cell) => h("td", {}, visible(cell)))));
  return [h("h3", {}, table.title), table.rows.length
    ? h("div", { class: "wide" }, h("table", { class: "num" }, h("thead", {}, h("tr", {}, table.head.map((name) => h("th", {}, name)))), h("tbody", {}, body)))
    : h("p", { class: "soft" }, table.empty)];
}

function takeFlow(news) {
  flowBox.hidden = !news.problem && !news.tables;
  if (flowBox.hidden) return HIDDEN_MS; // the run has none, or has not begun
  const parts = keep("flow", news, () => h("div", {},
    h("div", { class: "above" }, h("h2", {}, "Dataflow"), h("span", { class: "soft small" }, visible(news.url ?? ""))),
    news.problem ? h("p", { class: "wrong", role: "status" }, visible(news.problem))
      : [news.tables.map(flowTable), h("ul", { class: "lines soft small" }, news.lines.map((line) => h("li", {}, visible(line))))]));
  arrange(flowBox, [parts]);
  return null;
}

// ---- a folder of runs

function takeTable(news) {
  if (news.runs) {
    D.status.className = "state running";
    badge.textContent = "live";
    Object.assign(D, news, { isNew: true });
    drawAll();
  }
  return null;
}

readAddress();
addEventListener("hashchange", readAddress);
document.addEventListener("visibilitychange", wake);
if (!token) tabs.postMessage("ask");
if (D.live.kind === "table") {
  follow("/api/table", () => ({ id: D.id ?? "" }), takeTable);
  drawAll();
} else {
  document.getElementById("curves").before(flowBox);
  drawAll();
  follow("/api/run", () => ({ run: D.live.run, ...cursor }), takeRun);
  follow("/api/dataflow", () => ({ run: D.live.run }), takeFlow);
}
