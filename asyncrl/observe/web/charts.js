// Drawings: lines over steps (uPlot), the timeline of generators and learner (canvas), and bars.
"use strict";

const PALETTE = ["#2f7ed8", "#e0803a", "#2a9d5c", "#b657c9", "#d1533f", "#38a3b8", "#c9a227", "#7a7f87"];
const BY_STALENESS = ["#2a9d5c", "#8abf4b", "#d9b22f", "#e08a3a", "#d1533f", "#9c3a6b"];
const ACTIVITIES = { working: "#2a9d5c", waiting: "#b8bec8", syncing: "#2f7ed8", writing: "#d9b22f" };
const CHART_HEIGHT = 190, TILE_HEIGHT = 54, LANE_PIXELS = 6;

/** A new element with attributes, of which "on..." are listeners, and children; texts become text nodes. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** The value of a CSS variable in the present color scheme. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A number as people read it: 1,234 or 0.1235. */
function readable(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en-US");
  return Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const drawn = new Set();
/** Calls `draw(width)` now, and again when the box gets another width or the color scheme changes. */
function redrawn(box, draw) {
  let width = 0;
  const again = () => { if (box.clientWidth) draw((width = box.clientWidth)); };
  drawn.add(again);
  new ResizeObserver(() => { if (box.clientWidth !== width) again(); }).observe(box);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((again) => again()));

function legendOf(entries) {
  const values = entries.map(() => element("b"));
  const items = entries.map(([name, fill], at) =>
    element("span", {}, element("i", { style: `background:${fill}` }), name, " ", values[at]));
  return { box: element("div", { class: "legend" }, items), values };
}

/** Lines over a common x: `lines` are {name, color, xs, ys, dash}. */
function lineChart({ title, x, lines, small = false }) {
  const data = uPlot.join(lines.map((line) => [line.xs, line.ys]));
  const plotBox = element("div");
  const legend = legendOf(lines.map((line) => [line.name, line.color]));
  const here = element("b");
  const box = small ? plotBox : element("div", { class: "chart" }, element("h3", {}, title), legend.box, plotBox);
  if (!small) legend.box.append(element("span", {}, `${x} `, here));
  let plot = null;
  const show = (at) => {
    here.textContent = at === null ? "" : readable(data[0][at]);
    legend.values.forEach((value, line) => { value.textContent = at === null ? "" : readable(data[line + 1][at]); });
  };
  redrawn(plotBox, (width) => {
    plot?.destroy();
    const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid") },
                   font: "11px system-ui" };
    plot = new uPlot({
      width, height: small ? TILE_HEIGHT : CHART_HEIGHT,
      scales: { x: { time: false } }, legend: { show: false },
      cursor: small ? { show: false } : { sync: { key: x }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: small ? [{ show: false }, { show: false }]
        : [{ ...axis, size: 30 }, { ...axis, size: 52, values: (_, ticks) => ticks.map(readable) }],
      series: [{}, ...lines.map((line) => ({
        label: line.name, stroke: line.color, width: 1.5, dash: line.dash, spanGaps: true,
        points: { show: line.xs.length < 30 },
      }))],
      hooks: small ? {} : { setCursor: [(own) => show(own.cursor.idx ?? null)] },
    }, data, plotBox);
  });
  return box;
}

/** Bars of the groups of each generator and of the learner's steps over time; what is under the pointer is told. */
function timelineChart({ begin_s, end_s, roles, bars }) {
  const fillOf = (kind) => kind === "step" ? PALETTE[0] : kind.startsWith("staleness ")
    ? BY_STALENESS[Math.min(Number(kind.slice(10)), BY_STALENESS.length - 1)] : "#a9b0ba";
  const kinds = [...new Set(bars.map((bar) => bar[3]))].sort();
  const tip = element("div", { class: "note tip" }, "point at a bar to see its group");
  const canvas = element("canvas", { role: "img", "aria-label": "timeline of generators and learner" });
  const plotBox = element("div", {}, canvas);
  const lanes = Math.max(...roles.map(([, first, count]) => first + count));
  const lane = Math.max(2.5, Math.min(LANE_PIXELS, 460 / lanes)), left = 92, bottom = 20, step = 16;
  const top = (at) => at === 0 ? 0 : step + (at - 1) * lane;
  const tall = (at) => at === 0 ? step : lane;
  const height = step + lanes * lane + bottom;
  let toX = () => 0;
  redrawn(plotBox, (width) => {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    toX = (seconds) => left + (seconds - begin_s) / (end_s - begin_s) * (width - left);
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
    for (const [from_s, to_s, at, kind] of bars) {
      pen.fillStyle = fillOf(kind);
      pen.fillRect(toX(from_s) + 0.5, top(at) + 0.5, Math.max(toX(to_s) - toX(from_s) - 1, 1), tall(at) - 1);
    }
    pen.restore();
    pen.font = "11px system-ui"; pen.fillStyle = color("muted");
    for (const [name, first, count] of roles) pen.fillText(name, 0, (top(first) + top(first + count)) / 2 + 4);
    for (let tick = 0; tick <= 4; tick++) {
      const seconds = begin_s + (end_s - begin_s) * tick / 4;
      pen.textAlign = ["left", "center", "center", "center", "right"][tick];
      pen.fillText(`${seconds.toFixed(2)} s`, toX(seconds), height - 5);
    }
    pen.textAlign = "left";
  });
  canvas.addEventListener("mousemove", (event) => {
    const { offsetX, offsetY } = event;
    const found = bars.find(([from_s, to_s, at]) => offsetX >= toX(from_s) && offsetX <= toX(to_s)
      && offsetY >= top(at) && offsetY < top(at) + tall(at));
    tip.textContent = found ? found[4] : "";
  });
  return element("div", {}, legendOf(kinds.map((kind) => [kind === "step" ? "optimizer step" : kind, fillOf(kind)])).box,
    plotBox, tip);
}

/** A bar in parts: `parts` are [name, fraction]. */
function stackedBar(parts) {
  return element("div", { class: "bar" }, parts.map(([name, fraction]) => element("span", {
    style: `width:${100 * fraction}%;background:${ACTIVITIES[name] ?? "#888"}`, title: `${name} ${(100 * fraction).toFixed(1)} %`,
  })));
}

/** Bars of a histogram, by their number. */
function histogram(counts) {
  const sum = counts.reduce((one, other) => one + other, 0) || 1, most = Math.max(...counts, 1);
  return counts.map((count, at) => element("div", { class: "row" }, element("span", {}, `staleness ${at}`),
    element("div", { class: "bar" }, element("span", {
      style: `width:${75 * count / most}%;background:${BY_STALENESS[Math.min(at, BY_STALENESS.length - 1)]}`,
    }), element("span", { class: "note", style: "padding-left:0.5rem" }, `${(100 * count / sum).toFixed(1)} %`))));
}
