// What the model writes: a table of samples that can be searched, sorted and paged, and one sample with all of its text.
"use strict";

const PAGE_ROWS = 10;
const COLUMNS = [["step", "step"], ["why", "chosen"], ["prompt", "prompt"], ["completion", "completion"], ["truth", "ground_truth"],
  ["reward", "reward"], ["parts", "reward_parts"], ["staleness", "staleness"], ["version", "end_version"],
  ["tokens", "num_action_tokens"], ["ended", "status"], ["ticket", "ticket"]];
const TEXTUAL = new Set(["prompt", "completion", "ground_truth"]);

const partsOf = (sample) => Object.entries(sample.reward_parts ?? {}).map(([part, value]) => `${part} ${readable(value)}`).join(", ");

/** The policy versions that sampled a completion, as text. */
function versionsOf(sample) {
  if (sample.versions?.length) {
    return sample.versions.map(([version, tokens]) => `version ${version}: ${readable(tokens)} tokens`).join(", ");
  }
  const { start_version: first, end_version: last } = sample;
  return first === undefined || first === last ? `version ${readable(last)}` : `versions ${first} to ${last}`;
}

/** Facts about a completion: [title, text]. */
function factsOf(sample) {
  const reward = sample.error || sample.reward === null ? `none: ${sample.error}` : readable(sample.reward) + (partsOf(sample) ? ` (${partsOf(sample)})` : "");
  const facts = [["reward", reward], ["truth", sample.ground_truth], ["sampled by", versionsOf(sample)], ["staleness", sample.staleness],
    ["tokens", sample.num_action_tokens], ["ended", sample.status], ["data source", sample.data_source], ["dataset row", sample.row]];
  return facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
}

/** The turns of an episode, each under its role. */
const conversationOf = (lines) => element("div", { class: "conversation" }, lines.map((line) => [
  element("h4", {}, line.role + (line.reward === null ? "" : `, reward ${readable(line.reward)}`)),
  element("pre", { class: line.said ? "said" : null }, line.text)]).flat());

function completionBox(sample, title, isChosen = false) {
  return element("section", { class: isChosen ? "completion chosen" : "completion" }, element("h3", {}, title),
    sample.conversation ? conversationOf(sample.conversation) : element("pre", {}, sample.raw ?? sample.completion ?? ""),
    element("dl", {}, factsOf(sample).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), " ", element("dd", {}, readable(value))))));
}

const openFailed = (error) => element("p", { class: "warning" }, `Only the beginning and the end of long texts are here: ${error.message}`);

/** Opens one sample. `fetchGroup(run, sample, kind)`, where there is one, returns all completions of its group. */
async function openSample(run, sample, kind, fetchGroup) {
  const title = kind === "trained" ? `step ${readable(sample.step)}, ticket ${sample.ticket}` : `evaluation of version ${readable(sample.step)}`;
  const body = element("div");
  const close = element("button", { class: "close", "aria-label": "close", onclick: () => dialog.close() }, "×");
  const dialog = element("dialog", { class: "sample", onclose: () => dialog.remove(),
    onclick: (event) => { if (event.target === dialog) dialog.close(); } },
    element("div", { class: "dialog-head" }, element("h2", {}, `${run.name}: ${title}`), close), body);
  const show = (samples, ...notes) => {
    const boxes = samples.map((one, at) => [isSame(one, sample), completionBox(one,
      samples.length > 1 ? `completion ${at + 1} of ${samples.length}` : "completion", samples.length > 1 && isSame(one, sample))]);
    boxes.sort(([one], [other]) => other - one);  // the one that was opened is the first
    const prompt = samples[0].conversation ? [] : [element("h3", {}, "prompt"), element("pre", {}, samples[0].prompt)];
    body.replaceChildren(...notes, ...prompt, ...boxes.map(([, box]) => box));
  };
  show([sample]);
  document.body.append(dialog);
  dialog.showModal();
  if (!fetchGroup) return;
  try {
    show(await fetchGroup(run, sample, kind));
  } catch (error) {
    show([sample], openFailed(error));
  }
}

/** True if both are the same completion: one in the page has a text that may be cut. */
const isSame = (one, other) => one.index !== undefined && one.index === other.index;

/** The table of a run's samples, which `box.update(run)` replaces; search, order and page stay. */
function samplesTable(fetchGroup) {
  let run = null;
  const state = { kind: null, text: "", by: null, down: true, page: 0, raw: false, row: "" };
  const valueOf = (sample, name) => name === "reward_parts" ? partsOf(sample) : name === "status" && sample.error ? sample.error
    : name === "completion" && state.raw ? sample.raw ?? sample.completion : sample[name];
  const change = (values) => { Object.assign(state, { page: 0 }, values); draw(); };
  const table = element("table", { class: "samples" }), count = element("span", { class: "note" });
  const kinds = Object.fromEntries([["trained", "trained"], ["evaluated", "evaluations"]].map(([kind, title]) =>
    [kind, element("button", { onclick: () => change({ kind, by: null, row: "" }) }, title)]));
  const raw = element("button", { onclick: () => change({ raw: !state.raw, page: state.page }) }, "special tokens");
  const back = element("button", { "aria-label": "previous page", onclick: () => change({ page: state.page - 1 }) }, "‹");
  const next = element("button", { "aria-label": "next page", onclick: () => change({ page: state.page + 1 }) }, "›");
  const prompts = element("select", { "aria-label": "one prompt over training",
    onchange: (event) => change({ row: event.target.value, by: event.target.value === "" ? null : "step", down: false }) });
  const box = element("div", {}, element("div", { class: "controls" }, Object.values(kinds), prompts,
    element("input", { type: "search", placeholder: "search", "aria-label": "search", oninput: (event) => change({ text: event.target.value }) }),
    raw, back, next, count), element("div", { class: "scroll" }, table));

  function chosen() {
    const needle = state.text.toLowerCase();
    const rows = run.samples[state.kind].filter((sample) => (state.row === "" || String(sample.row) === state.row)
      && [sample.prompt, sample.completion].some((text) => text.toLowerCase().includes(needle)));
    if (!state.by) return rows.toSorted((one, other) => other.step - one.step);
    return rows.toSorted((one, other) => {
      const [a, b] = [one, other].map((sample) => valueOf(sample, state.by) ?? "");
      return (a < b ? -1 : a > b ? 1 : 0) * (state.down ? -1 : 1);
    });
  }

  const cellOf = (sample, name) => {
    const value = valueOf(sample, name);
    return element("td", { class: TEXTUAL.has(name) ? "text" : typeof value === "number" ? "number" : null },
      TEXTUAL.has(name) ? element("div", {}, value ?? "–") : typeof value === "number" ? readable(value) : value ?? "–");
  };

  function rowOf(sample, used) {
    const open = () => openSample(run, sample, state.kind, fetchGroup);
    return element("tr", { class: "opens", tabindex: 0, title: "open this sample",
      onclick: () => { if (!String(getSelection())) open(); }, onkeydown: (event) => { if (event.key === "Enter") open(); } },
      used.map(([, name]) => cellOf(sample, name)));
  }

  function draw() {
    const all = run.samples[state.kind], rows = chosen();
    const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
    state.page = Math.min(state.page, pages - 1);
    const used = COLUMNS.filter(([, name]) => all.some((sample) => ![undefined, null, ""].includes(valueOf(sample, name))));
    table.replaceChildren(element("tr", {}, used.map(([title, name]) => element("th", { class: "sorts", tabindex: 0,
      onclick: () => change({ by: name, down: state.by === name ? !state.down : true }) },
      title + (state.by === name ? (state.down ? " ↓" : " ↑") : "")))),
      ...rows.slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS).map((sample) => rowOf(sample, used)));
    count.textContent = `${rows.length} of ${all.length}, page ${state.page + 1} of ${pages}`;
    back.disabled = state.page === 0; next.disabled = state.page + 1 >= pages;
    for (const [kind, button] of Object.entries(kinds)) {
      button.setAttribute("aria-pressed", String(kind === state.kind));
      button.hidden = !run.samples[kind].length;
    }
    raw.setAttribute("aria-pressed", String(state.raw));
    prompts.hidden = state.kind !== "evaluated";
  }

  box.update = (newRun) => {
    if (run?.samples === newRun.samples) return;
    if (run?.name !== newRun.name) Object.assign(state, { kind: null, page: 0, row: "" });
    run = newRun;
    if (!state.kind || !run.samples[state.kind].length) state.kind = run.samples.trained.length ? "trained" : "evaluated";
    const byRow = new Map(run.samples.evaluated.map((sample) => [String(sample.row), sample.prompt]));
    prompts.replaceChildren(element("option", { value: "" }, "all prompts"),
      ...[...byRow].map(([row, prompt]) => element("option", { value: row }, `${row}: ${prompt.slice(-40)}`)));
    prompts.value = state.row;
    draw();
  };
  return box;
}
