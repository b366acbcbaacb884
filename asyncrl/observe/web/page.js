// The page of one run or several: reads the documents in the page and puts its sections together.
"use strict";

const PAGE_ROWS = 10;
const runs = JSON.parse(document.getElementById("data").textContent);

function tableOf(titles, lines, isText = () => false) {
  const cell = (tag, value, at) => element(tag, { class: at && typeof value === "number" ? "number" : isText(at) ? "text" : null },
    typeof value === "number" ? readable(value) : value ?? "–");
  return element("div", { class: "scroll" }, element("table", {},
    titles ? element("tr", {}, titles.map((title, at) => element("th", { class: at && lines.length
      && typeof lines[0][at] === "number" ? "number" : null }, title))) : null,
    lines.map((line) => element("tr", {}, line.map((value, at) => at ? cell("td", value, at) : element("th", {}, String(value)))))));
}

const section = (title, ...children) => [element("h2", {}, title), ...children];

/** The lines of a chart of this section and title, of all runs: a color per run where there are several. */
function linesOf(sectionTitle, chartTitle) {
  return runs.flatMap((run, number) => {
    const found = run.charts.find((one) => one.title === sectionTitle)?.charts.find((one) => one.title === chartTitle);
    return (found?.lines ?? []).map(([name, xs, ys], at) => ({
      name: runs.length > 1 ? `${run.name} ${name}` : name, xs, ys,
      color: PALETTE[(runs.length > 1 ? number : at) % PALETTE.length], dash: runs.length > 1 && at ? [4 * at, 3] : undefined,
    }));
  });
}

function heading() {
  return runs.map((run) => element("div", {},
    element("div", {}, element("h1", {}, run.name), element("span", { class: `status ${run.status}` }, run.status || "unknown")),
    run.verdict ? element("p", { class: "verdict" }, run.verdict) : null,
    run.error && run.error !== run.verdict ? element("p", { class: "warning" }, run.error) : null));
}

function tiles() {
  const titles = [...new Set(runs.flatMap((run) => run.tiles.map((tile) => tile.title)))];
  return element("div", { class: "tiles" }, titles.map((title) => {
    const own = runs.flatMap((run, number) => run.tiles.filter((tile) => tile.title === title).map((tile) => [tile, number]));
    const lines = runs.flatMap((run, number) => run.charts.flatMap((part) => part.charts.flatMap((chart) => chart.lines))
      .filter(([name]) => name === own[0][0].metric)
      .map(([name, xs, ys]) => ({ name, xs, ys, color: PALETTE[number % PALETTE.length] })));
    return element("div", { class: "tile" }, element("div", { class: "note" }, title),
      own.map(([tile, number]) => element("div", {}, element("div", { class: "value" },
        runs.length > 1 ? element("span", { class: "note" }, `${runs[number].name} `) : null, tile.value),
        element("div", { class: "note" }, tile.note))),
      lines.length ? lineChart({ x: "step", lines, small: true }) : null);
  }));
}

/** A table of samples that can be searched, sorted and paged. */
function samplesTable(run) {
  const state = { kind: run.samples.trained.length ? "trained" : "evaluated", text: "", by: null, down: true, page: 0, raw: false, row: "" };
  const columns = [["step", "step"], ["why", "chosen"], ["prompt", "prompt"], ["completion", "completion"], ["truth", "ground_truth"],
    ["reward", "reward"], ["parts", "reward_parts"], ["staleness", "staleness"], ["version", "end_version"], ["tokens", "num_action_tokens"],
    ["ended", "status"], ["ticket", "ticket"]];
  const textual = new Set(["prompt", "completion", "ground_truth"]);
  const box = element("div");
  const valueOf = (sample, name) => name === "reward_parts" ? Object.entries(sample[name] ?? {}).map(([part, value]) =>
    `${part} ${readable(value)}`).join(", ") : name === "status" && sample.error ? sample.error
    : name === "completion" && state.raw ? sample.raw ?? sample.completion : sample[name];
  const change = (values) => { Object.assign(state, { page: 0 }, values); draw(); };
  function draw() {
    const all = run.samples[state.kind];
    const needle = state.text.toLowerCase();
    let rows = all.filter((sample) => (state.row === "" || String(sample.row) === state.row)
      && [sample.prompt, sample.completion].some((text) => text.toLowerCase().includes(needle)));
    if (state.by) rows = rows.toSorted((one, other) => {
      const [a, b] = [one, other].map((sample) => valueOf(sample, state.by) ?? "");
      return (a < b ? -1 : a > b ? 1 : 0) * (state.down ? -1 : 1);
    });
    else rows = rows.toSorted((one, other) => other.step - one.step);
    const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
    const shown = rows.slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS);
    const used = columns.filter(([, name]) => all.some((sample) => ![undefined, null, ""].includes(valueOf(sample, name))));
    table.replaceChildren(element("tr", {}, used.map(([title, name]) => element("th", { class: "sorts", tabindex: 0,
      onclick: () => change({ by: name, down: state.by === name ? !state.down : true }) },
      title + (state.by === name ? (state.down ? " ↓" : " ↑") : "")))),
      ...shown.map((sample) => element("tr", {}, used.map(([, name]) => {
        const value = valueOf(sample, name);
        return element("td", { class: textual.has(name) ? "text" : typeof value === "number" ? "number" : null },
          textual.has(name) ? element("div", {}, value ?? "–") : typeof value === "number" ? readable(value) : value ?? "–");
      }))));
    count.textContent = `${rows.length} of ${all.length}, page ${state.page + 1} of ${pages}`;
    back.disabled = state.page === 0; next.disabled = state.page + 1 >= pages;
    for (const [kind, button] of Object.entries(kinds)) button.setAttribute("aria-pressed", String(kind === state.kind));
    raw.setAttribute("aria-pressed", String(state.raw));
    prompts.hidden = state.kind !== "evaluated";
  }
  const table = element("table"), count = element("span", { class: "note" });
  const kinds = Object.fromEntries([["trained", "trained"], ["evaluated", "evaluations"]].filter(([kind]) => run.samples[kind].length)
    .map(([kind, title]) => [kind, element("button", { onclick: () => change({ kind, by: null, row: "" }) }, title)]));
  const raw = element("button", { onclick: () => change({ raw: !state.raw, page: state.page }) }, "special tokens");
  const back = element("button", { onclick: () => change({ page: state.page - 1 }) }, "‹");
  const next = element("button", { onclick: () => change({ page: state.page + 1 }) }, "›");
  const byRow = new Map(run.samples.evaluated.map((sample) => [String(sample.row), sample.prompt]));
  const prompts = element("select", { "aria-label": "one prompt over training",
    onchange: (event) => change({ row: event.target.value, by: event.target.value === "" ? null : "step", down: false }) },
    element("option", { value: "" }, "all prompts"),
    [...byRow].map(([row, prompt]) => element("option", { value: row }, `${row}: ${prompt.slice(-40)}`)));
  box.append(element("div", { class: "controls" }, Object.values(kinds), prompts,
    element("input", { type: "search", placeholder: "search", "aria-label": "search", oninput: (event) => change({ text: event.target.value }) }),
    raw, back, next, count), element("div", { class: "scroll" }, table));
  draw();
  return box;
}

function details(run) {
  const parts = [];
  if (run.time.length) parts.push(section("Where the time goes",
    legendOf(Object.entries(ACTIVITIES)).box, run.time.map(({ role, activities }) => element("div", { class: "row" },
      element("span", {}, role), element("div", {}, stackedBar(activities), element("span", { class: "note" },
        activities.filter(([, fraction]) => fraction > 0.005).map(([name, fraction]) => `${name} ${(100 * fraction).toFixed(0)} %`).join(", ")))))));
  if (run.timeline) parts.push(section("Timeline of a few steps", timelineChart(run.timeline)));
  if (run.gains.length) parts.push(section("What a change would gain, simulated", tableOf(["change", "trained tokens/s"],
    run.gains.map(([name, gain]) => [name, `${gain < 0 ? "" : "+"}${(100 * gain).toFixed(1)} %`]))));
  if (run.histogram.length) parts.push(section("Trained tokens by staleness", histogram(run.histogram)));
  if (run.staleness.lines.length) parts.push(section(`By staleness, mean of the last ${run.staleness.steps} steps`,
    tableOf(run.staleness.titles, run.staleness.lines)));
  if (run.ledger.length) parts.push(section("Ledger: where every group and token is",
    tableOf(["", "groups", "trajectories", "action tokens"], run.ledger)));
  parts.push(run.bias.map((sentence) => element("p", { class: "warning" }, sentence)));
  if (run.summary.length) parts.push(section("Summary", element("details", {}, element("summary", {}, `${run.summary.length} values`),
    tableOf(null, run.summary, () => true))));
  if (run.config) parts.push(section("Configuration", element("details", {}, element("summary", {}, "config.yaml"), element("pre", {}, run.config))));
  return parts.flat(3);
}

function charts() {
  const titles = new Map();
  for (const run of runs) for (const part of run.charts) {
    const known = titles.get(part.title) ?? titles.set(part.title, new Map()).get(part.title);
    for (const chart of part.charts) known.set(chart.title, chart.x);
  }
  return [...titles].flatMap(([title, known]) => section(title, element("div", { class: "charts" },
    [...known].map(([name, x]) => lineChart({ title: name, x, lines: linesOf(title, name) })))));
}

/** The sections of which there is one per run, of the run that is chosen. */
function perRun(titleOf, make) {
  const box = element("div");
  const show = (run) => box.replaceChildren(...[make(run)].flat());
  show(runs[0]);
  const choice = runs.length > 1 ? element("select", { "aria-label": "run", onchange: (event) => show(runs[event.target.value]) },
    runs.map((run, number) => element("option", { value: number }, run.name))) : null;
  return [titleOf ? element("h2", {}, titleOf) : null, choice, box];
}

const hasSamples = runs.some((run) => run.samples.trained.length || run.samples.evaluated.length);
document.getElementById("page").replaceChildren(...[
  heading(), tiles(), hasSamples ? perRun("What it writes", samplesTable) : [], charts(), perRun(null, details),
].flat().filter(Boolean));
