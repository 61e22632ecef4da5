// Keeps a page as its run is: asks the server that it comes from, again and again, for data that it has not got.
const EVERY_MS = 2000;
const TOKEN = "flowtrain-view-token";
const lost = h("span", { class: "wrong", role: "status" });
D.status = h("p", { class: "state" }, D.live.run && h("a", { href: "/", class: "soft" }, "← all runs"), lost);
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
async function refresh() {
  const headers = { Authorization: `Bearer ${token}`, ...(tag && { "If-None-Match": tag }) };
  const response = await fetch(`/data?${new URLSearchParams({ run: D.live.run })}`, { headers, cache: "no-store" });
  if (response.status === 304) return "";
  if (!response.ok) return response.text();
  const news = await response.json();
  tag = response.headers.get("ETag");
  if (Boolean(news.runs) !== D.live.is_table) location.reload(); // where nothing was, there is something now
  Object.assign(D, news, { allPanels: null });
  drawAll();
  return "";
}

async function follow() {
  for (;;) {
    if (!document.hidden) lost.textContent = visible(await refresh().catch(() => "The server of this page does not answer; it is asked again."));
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

readAddress();
addEventListener("hashchange", readAddress);
follow();
