// Shows what the server that the page comes from says, and asks it again and again whether that has changed.
const EVERY_MS = 2000;
const TOKEN = "flowtrain-view-token";
const lost = h("span", { class: "wrong", role: "status" });
const news = h("button", { class: "quiet", type: "button", hidden: true, onclick: () => show() }, "There is more now: show it");
D.status = h("p", { class: "state" }, D.live.run && h("a", { href: "/", class: "soft" }, "← all runs"), news, lost);
D.rollouts = [];
document.getElementById("run").append(D.status);

// The token leaves the address at once, so that it is in no history, and is kept for this tab.
let token = sessionStorage.getItem(TOKEN) ?? "";
function readAddress() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  token = found[1];
  sessionStorage.setItem(TOKEN, token);
}

let tag = "";
let newest = null;
async function ask() {
  const headers = { Authorization: `Bearer ${token}`, ...(tag && { "If-None-Match": tag }) };
  const response = await fetch(`/data?${new URLSearchParams({ run: D.live.run })}`, { headers, cache: "no-store" });
  if (response.status === 304) return "";
  if (!response.ok) return response.text();
  newest = await response.json();
  tag = response.headers.get("ETag");
  if (Boolean(newest.runs) !== D.live.is_table) location.reload(); // where nothing was, there is something now
  // Who reads a rollout, or has searched, is not disturbed.
  const isRead = location.hash || [...document.querySelectorAll("input[type=search], select")].some((field) => field.value);
  if (isRead && D.facts) news.hidden = false;
  else show();
  return "";
}

function show() {
  Object.assign(D, newest);
  news.hidden = true;
  drawAll();
}

async function follow() {
  for (;;) {
    if (!document.hidden) lost.textContent = visible(await ask().catch(() => "The server of this page does not answer; it is asked again."));
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

readAddress();
addEventListener("hashchange", readAddress);
follow();
