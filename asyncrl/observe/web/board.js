// The board: a list of runs, one run, or several compared, as the address says: #, #run/NAME, #compare/NAME/NAME.
"use strict";

const POLL_MS = 2000, ENDED_POLL_MS = 10000, TIMEOUT_MS = 30000, MAX_COMPARED = PALETTE.length;
const page = document.getElementById("page"), notice = element("p", { class: "warning", hidden: true });
document.body.prepend(notice);

async function fetchJson(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { status: answer.status });
  return body;
}

const addressOf = (names) => `#${names.length > 1 ? "compare" : "run"}/${names.map(encodeURIComponent).join("/")}`;
const pathOf = (name) => `run/${encodeURIComponent(name)}`;

/** How long ago a time in seconds was. */
function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  const [unit, size] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, one]) => passed >= one) ?? ["s", 1];
  return `${Math.floor(passed / size)} ${unit} ago`;
}

const NUMBERS = ["step", "reward", "tokens/s", "goodput"];
const ORDERS = {
  newest: (one, other) => (other.status === "running") - (one.status === "running") || other.updated_s - one.updated_s,
  name: (one, other) => one.name.localeCompare(other.name, "en", { numeric: true }),
  reward: (one, other) => (other.reward?.[1] ?? -Infinity) - (one.reward?.[1] ?? -Infinity),
};

/** All runs, with a search, an order, and a choice of those to compare. */
class ListView {
  constructor(box) {
    this.state = { text: "", order: "newest" };
    this.chosen = new Set();
    this.rows = new Map();
    this.cards = [];
    this.compare = element("button", { onclick: () => { location.hash = addressOf([...this.chosen]); } });
    this.count = element("span", { class: "note" });
    this.table = element("table", { class: "runs" });
    const redraw = (values) => { Object.assign(this.state, values); this.draw(); };
    box.replaceChildren(element("h1", {}, "Runs"), element("div", { class: "controls" },
      element("input", { type: "search", placeholder: "search", "aria-label": "search runs", oninput: (event) => redraw({ text: event.target.value }) }),
      element("select", { "aria-label": "order", onchange: (event) => redraw({ order: event.target.value }) },
        Object.keys(ORDERS).map((name) => element("option", { value: name }, name === "newest" ? "running, then newest" : `by ${name}`))),
      this.compare, this.count), element("div", { class: "scroll" }, this.table));
    this.titles = element("tr", {}, ["", "run", "state", "step", "reward", "", "tokens/s", "goodput", "changed", "verdict"].map((title) =>
      element("th", { class: NUMBERS.includes(title) ? "number" : null }, title)));
  }

  async poll() {
    this.cards = (await fetchJson("runs")).runs;
    const names = new Set(this.cards.map((card) => card.name));
    for (const name of this.chosen) if (!names.has(name)) this.chosen.delete(name);
    this.draw();
    return POLL_MS;
  }

  draw() {
    const needle = this.state.text.toLowerCase();
    const shown = this.cards.filter((card) => `${card.name} ${card.status} ${card.verdict}`.toLowerCase().includes(needle))
      .sort(ORDERS[this.state.order]);
    this.table.replaceChildren(this.titles, ...shown.map((card) => this.rowOf(card)));
    this.count.textContent = this.cards.length ? `${shown.length} of ${this.cards.length} runs` : "no runs yet; a launch makes the first one";
    this.compare.disabled = this.chosen.size < 2 || this.chosen.size > MAX_COMPARED;
    this.compare.textContent = this.chosen.size > MAX_COMPARED ? `compare at most ${MAX_COMPARED}` : `compare ${this.chosen.size || ""}`.trim();
  }

  /** The row of a run; the one that is there where nothing has changed. */
  rowOf(card) {
    const key = JSON.stringify(card), known = this.rows.get(card.name);
    if (known?.key === key) {
      known.age.textContent = ago(card.updated_s);
      return known.row;
    }
    const box = element("input", { type: "checkbox", "aria-label": `compare ${card.name}`,
      onchange: () => { this.chosen[box.checked ? "add" : "delete"](card.name); this.draw(); } });
    box.checked = this.chosen.has(card.name);
    const age = element("td", { class: "note" }, ago(card.updated_s));
    const number = (title, text) => element("td", { class: "number", "data-title": title }, text);
    const row = element("tr", {}, element("td", {}, box),
      element("th", {}, element("a", { href: addressOf([card.name]) }, card.name)),
      element("td", {}, element("span", { class: `status ${card.status}` }, card.status),
        card.alarms ? element("span", { class: "status failed" }, "collapse") : null),
      number("step", card.step === null ? "–" : `${readable(card.step)}${card.steps ? ` / ${readable(card.steps)}` : ""}`),
      number("reward", card.reward ? card.reward.map((value) => value.toFixed(3)).join(" → ") : "–"),
      element("td", {}, card.curve.length > 1 ? sparkline(card.curve) : null),
      number("tokens/s", card.tokens_per_s === null ? "–" : readable(Math.round(card.tokens_per_s))),
      number("goodput", card.goodput === null ? "–" : `${(100 * card.goodput).toFixed(0)} %`), age,
      element("td", { class: "note verdict-cell" }, card.verdict));
    this.rows.set(card.name, { key, row, age });
    return row;
  }
}

/** One run, or several compared. */
class RunsView {
  constructor(box, names) {
    this.names = names;
    this.documents = names.map(() => null);
    this.revisions = names.map(() => 0);
    this.waiting = element("p", { class: "note" }, "reading …");
    const main = element("div");
    box.replaceChildren(element("nav", {}, element("a", { href: "#" }, "‹ all runs")), this.waiting, main);
    this.page = new RunPage(main, (run, sample, kind) => this.fetchGroup(run, sample, kind));
  }

  async poll() {
    const answers = await Promise.all(this.names.map((name, at) => fetchJson(`${pathOf(name)}/since/${this.revisions[at]}`)));
    answers.forEach(({ revision, document }, at) => {
      this.revisions[at] = revision;
      this.documents[at] = document ?? this.documents[at];
    });
    this.waiting.hidden = true;
    if (answers.some(({ document }) => document)) this.page.update([...this.documents]);
    return this.documents.some((run) => run.status === "running") ? POLL_MS : ENDED_POLL_MS;
  }

  async fetchGroup(run, sample, kind) {
    const path = kind === "trained" ? `group/${sample.ticket}` : `evaluated/${sample.step}/${sample.row}`;
    return (await fetchJson(`${pathOf(run.name)}/${path}`)).samples;
  }
}

let view = null, timer = null, numbering = 0;

/** Polls the view that is shown, until another one is; not while nobody looks. */
async function poll() {
  clearTimeout(timer);
  const number = ++numbering;
  let pause_ms = POLL_MS;
  try {
    if (!document.hidden) pause_ms = await view.poll();
    notice.hidden = true;
  } catch (error) {
    if (number !== numbering) return;
    notice.hidden = false;
    notice.textContent = error.status ? error.message : "The board does not answer. Is `asyncrl board` still running?";
  }
  if (number === numbering) timer = setTimeout(poll, pause_ms);
}

function route() {
  const [kind, ...names] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const isRuns = (kind === "run" || kind === "compare") && names.length;
  document.title = isRuns ? `${names.join(", ")} · asyncrl` : "asyncrl board";
  view = isRuns ? new RunsView(page, names.slice(0, MAX_COMPARED)) : new ListView(page);
  scrollTo(0, 0);
  poll();
}

addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
route();
