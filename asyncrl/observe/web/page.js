// The page of one run or several, from their documents; drawn once in a report, and again and again in a board.
"use strict";

function tableOf(titles, lines, isText = () => false) {
  const isNumber = (at) => at > 0 && lines.some((line) => typeof line[at] === "number");
  const cell = (tag, value, at) => element(tag, { class: isText(at) ? "text" : isNumber(at) ? "number" : null },
    typeof value === "number" ? readable(value) : value ?? "–");
  return element("div", { class: "scroll" }, element("table", {},
    titles ? element("tr", {}, titles.map((title, at) => element("th", { class: isNumber(at) ? "number" : null }, title))) : null,
    lines.map((line) => element("tr", {}, line.map((value, at) => at ? cell("td", value, at) : element("th", {}, String(value)))))));
}

/** Fills the box with `make(value)` unless the value is the one before; what is unfolded stays so. */
function fill(box, value, make) {
  const key = JSON.stringify(value);
  if (box.key === key) return;
  box.key = key;
  const isOpen = box.querySelector("details")?.open;
  box.replaceChildren(...[make(value)].flat(3).filter(Boolean));
  const details = box.querySelector("details");
  if (isOpen && details) details.open = true;
}

const section = (title, ...children) => [element("h2", {}, title), ...children];
const folded = (title, ...children) => element("details", {}, element("summary", {}, title), ...children);

/** The sections of a run's details, in their order: [part of the document, what is drawn of it]. */
const DETAILS = [
  [(run) => run.time, (time) => time.length ? section("Where the time goes", timeBars(ACTIVITIES, time)) : []],
  [(run) => run.group_times, (times) => times.length ? section("Where the time of a group goes", element("p", { class: "note" },
    `from its lease to the end of the step that trains it, ${times.map(({ role, seconds }) => `${readable(seconds)} s (${role})`).join(", ")}`),
    timeBars(GROUP_PARTS, times)) : []],
  [(run) => run.timeline, (timeline) => timeline ? section("Timeline of a few steps", timelineChart(timeline)) : []],
  [(run) => run.gains, (gains) => gains.length ? section("What a change would gain, simulated", tableOf(["change", "trained tokens/s"],
    gains.map(([name, gain]) => [name, `${gain < 0 ? "" : "+"}${(100 * gain).toFixed(1)} %`]))) : []],
  [(run) => run.histogram, (counts) => counts.length ? section("Trained tokens by staleness", histogram(counts)) : []],
  [(run) => run.staleness, ({ steps, titles, lines }) => lines.length
    ? section(`By staleness, mean of the last ${steps} steps`, tableOf(titles, lines)) : []],
  [(run) => run.ledger, (ledger) => ledger.length ? section("Ledger: where every group and token is",
    tableOf(["", "groups", "trajectories", "action tokens"], ledger)) : []],
  [(run) => run.bias, (sentences) => sentences.map((sentence) => element("p", { class: "warning" }, sentence))],
  [(run) => run.rows, (rows) => rows.length ? section("Rows of the dataset, by their latest group",
    tableOf(["data source", "solved", "learning", "never solved", "unseen"], rows)) : []],
  [(run) => run.summary, (summary) => summary.length ? section("Summary", folded(`${summary.length} values`, tableOf(null, summary, () => true))) : []],
  [(run) => run.config, (config) => config ? section("Configuration", folded("config.yaml", element("pre", {}, config))) : []],
];

/** Draws runs into a box, and draws them again when their documents change. */
class RunPage {
  /** `fetchGroup(run, sample, kind)` returns the group of a sample with complete texts; without it there is only what is in the page. */
  constructor(box, fetchGroup = null) {
    this.runs = [];
    this.shown = 0;
    this.charts = new Map();
    this.tileCharts = new Map();
    this.head = element("div");
    this.tiles = element("div", { class: "tiles" });
    this.chartBox = element("div");
    this.samplesTitle = element("h2", {}, "What it writes");
    this.samples = samplesTable(fetchGroup);
    this.details = DETAILS.map(() => element("div"));
    this.choices = [0, 1].map(() => element("select", { "aria-label": "run", onchange: (event) => this.choose(Number(event.target.value)) }));
    box.replaceChildren(this.head, this.tiles, this.samplesTitle, this.choices[0], this.samples, this.chartBox, this.choices[1], ...this.details);
  }

  /** Shows the sections of which there is one per run of this run. */
  choose(number) {
    this.shown = number;
    this.update(this.runs);
  }

  update(runs) {
    this.runs = runs;
    const run = runs[this.shown = Math.min(this.shown, runs.length - 1)];
    if (runs.length > 1 && this.tiles.nextSibling !== this.chartBox) this.tiles.after(this.chartBox);  // compared are curves
    fill(this.head, runs.map(({ name, status, verdict, error, collapse, warnings, progress }) => ({ name, status, verdict, error, collapse, warnings, progress })),
      (heads) => heads.map((head, number) => this.headingOf(head, heads.length > 1 ? PALETTE[number % PALETTE.length] : null)));
    this.updateTiles();
    this.updateCharts();
    const hasSamples = runs.some((one) => one.samples.trained.length || one.samples.evaluated.length);
    this.samplesTitle.hidden = this.samples.hidden = !hasSamples;
    if (hasSamples) this.samples.update(run);
    DETAILS.forEach(([part, make], at) => fill(this.details[at], part(run), make));
    this.choices.forEach((choice, at) => {
      choice.hidden = runs.length < 2 || (at === 0 && !hasSamples);
      fill(choice, runs.map((one) => one.name), (names) => names.map((name, number) => element("option", { value: number }, name)));
      choice.value = String(this.shown);
    });
  }

  /** Name, state and verdict of a run; with a color, where there are several. */
  headingOf({ name, status, verdict, error, collapse, warnings, progress }, color) {
    return element("div", { class: color && "one-of-many" },
      element("div", { class: "title" }, element("h1", {}, color ? element("i", { style: `background:${color}` }) : null, name), element("span", { class: `status ${status}` }, status || "unknown"),
        progress ? element("span", { class: "note" }, progress) : null),
      collapse ? element("p", { class: "warning alarm" }, collapse) : null,
      verdict && verdict !== collapse ? element("p", { class: "verdict" }, verdict) : null,
      error && error !== verdict ? element("p", { class: "warning" }, error) : null,
      (warnings ?? []).map((warning) => element("p", { class: "warning" }, warning)));
  }

  updateTiles() {
    const { runs } = this;
    const titles = [...new Set(runs.flatMap((run) => run.tiles.map((tile) => tile.title)))];
    for (const title of titles) {
      if (!this.tileCharts.has(title)) {
        const text = element("div"), factors = element("div"), chart = lineChart({ x: "step", small: true });
        this.tileCharts.set(title, { text, factors, chart });
        this.tiles.append(element("div", { class: "tile" }, element("div", { class: "note" }, title), text, factors, chart));
      }
      const { text, factors, chart } = this.tileCharts.get(title);
      const own = runs.flatMap((run, number) => run.tiles.filter((tile) => tile.title === title).map((tile) => [tile, number]));
      fill(text, own.map(([{ value, note }, number]) => [value, note, runs.length > 1 ? runs[number].name : null, number]),
        (values) => values.map(([value, note, name, number]) => name === null
          ? element("div", {}, element("div", { class: "value" }, value), element("div", { class: "note" }, note))
          : element("div", { class: "of-run", title: note }, element("span", { class: "note" },
            element("i", { style: `background:${PALETTE[number % PALETTE.length]}` }), name), element("b", {}, value))));
      const parts = runs.length === 1 ? own[0][0].parts ?? [] : [];
      fill(factors, parts, (values) => values.length ? waterfall(values) : []);
      chart.hidden = parts.length > 0;
      chart.update(runs.flatMap((run, number) => run.charts.flatMap((part) => part.charts.flatMap((one) => one.lines))
        .filter(([name]) => name === own[0][0].metric)
        .map(([name, xs, ys]) => ({ name, xs, ys, color: PALETTE[number % PALETTE.length] }))));
    }
  }

  /** Updates every chart, and lays them out again when there is another one. */
  updateCharts() {
    const sections = new Map();
    for (const run of this.runs) for (const part of run.charts) {
      const known = sections.get(part.title) ?? sections.set(part.title, new Map()).get(part.title);
      for (const chart of part.charts) known.set(chart.title, chart.x);
    }
    const keyOf = (title, name) => `${title}\n${name}`;
    fill(this.chartBox, [...sections].map(([title, known]) => [title, [...known]]), (all) => all.map(([title, known]) => section(title,
      element("div", { class: "charts" }, known.map(([name, x]) => {
        const key = keyOf(title, name);
        if (!this.charts.has(key)) this.charts.set(key, lineChart({ title: name, x }));
        return this.charts.get(key);
      })))));
    for (const [title, known] of sections) for (const name of known.keys()) {
      this.charts.get(keyOf(title, name)).update(this.linesOf(title, name));
    }
  }

  /** The lines of a chart of this section and title, of all runs: a color per run where there are several. */
  linesOf(sectionTitle, chartTitle) {
    const isOne = this.runs.length === 1;
    return this.runs.flatMap((run, number) => {
      const found = run.charts.find((one) => one.title === sectionTitle)?.charts.find((one) => one.title === chartTitle);
      return (found?.lines ?? []).map(([name, xs, ys], at) => ({
        name: isOne ? name : found.lines.length === 1 ? run.name : `${run.name} ${name.split("/").at(-1)}`, xs, ys,
        color: PALETTE[(isOne ? at : number) % PALETTE.length], dash: !isOne && at ? [4 * at, 3] : undefined,
      }));
    });
  }
}
