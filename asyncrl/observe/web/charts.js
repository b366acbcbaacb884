// Drawings: lines over steps (uPlot), the timeline of generators and learner (canvas), bars and sparklines.
"use strict";

const PALETTE = ["#2f7ed8", "#e0803a", "#2a9d5c", "#b657c9", "#d1533f", "#38a3b8", "#c9a227", "#7a7f87"];
const BY_STALENESS = ["#2a9d5c", "#8abf4b", "#d9b22f", "#e08a3a", "#d1533f", "#9c3a6b"];
const ACTIVITIES = { working: "#2a9d5c", waiting: "#b8bec8", syncing: "#2f7ed8", writing: "#d9b22f",
                     environments: "#b657c9" };
const GROUP_PARTS = { engine: "#2a9d5c", environment: "#b657c9", reward: "#e0803a", queue: "#b8bec8", learner: "#2f7ed8" };
const CHART_HEIGHT = 190, TILE_HEIGHT = 54, LANE_PIXELS = 6, MARKED_POINTS = 30;

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
const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => target.seen(isIntersecting)),
  { rootMargin: "300px" });
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.drawIfDue()));

/** Calls `draw(width, isOther)` when the box comes into view, and again after `box.stale()`; `isOther` is true when the
 * width or the color scheme is another than before, so that everything has to be drawn. */
function redrawn(box, height, draw) {
  let width = 0, isSeen = false, isStale = true;
  box.style.minHeight = `${height}px`;
  box.drawIfDue = (always = false) => {
    if (!box.clientWidth || !(isSeen || always) || !(isStale || box.clientWidth !== width)) return;
    const isOther = box.clientWidth !== width;
    isStale = false;
    draw((width = box.clientWidth), isOther);
  };
  box.stale = () => { isStale = true; box.drawIfDue(); };
  box.seen = (value) => { isSeen = value; box.drawIfDue(); };
  box.recolor = () => { width = 0; box.drawIfDue(); };
  for (const other of drawn) if (other.wasConnected && !other.isConnected) forget(other);
  drawn.add(box);
  seen.observe(box);
  resized.observe(box);
}

function forget(box) {
  drawn.delete(box);
  seen.unobserve(box);
  resized.unobserve(box);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((box) => box.recolor()));
addEventListener("beforeprint", () => drawn.forEach((box) => box.drawIfDue(true)));

function legendOf(entries) {
  const values = entries.map(() => element("b"));
  const items = entries.map(([name, fill], at) =>
    element("span", {}, element("i", { style: `background:${fill}` }), name, " ", values[at]));
  return { box: element("div", { class: "legend" }, items), values };
}

/** Lines over a common x, which `box.update(lines)` replaces: `lines` are {name, color, xs, ys, dash}. */
function lineChart({ title, x, small = false }) {
  const plotBox = element("div"), legendBox = element("div"), here = element("b");
  const box = small ? plotBox : element("div", { class: "chart" }, element("h3", {}, title), legendBox, plotBox);
  let plot = null, data = [[]], lines = [], values = [], key = "", isOtherKey = true;
  const show = (at) => {
    here.textContent = at === null ? "" : readable(data[0][at]);
    values.forEach((value, line) => { value.textContent = at === null ? "" : readable(data[line + 1][at]); });
  };
  const options = (width) => {
    const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid") },
                   font: "11px system-ui" };
    return {
      width, height: small ? TILE_HEIGHT : CHART_HEIGHT,
      scales: { x: { time: false } }, legend: { show: false },
      cursor: small ? { show: false } : { sync: { key: x }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: small ? [{ show: false }, { show: false }]
        : [{ ...axis, size: 30 }, { ...axis, size: 60, values: (_, ticks) => ticks.map(readable) }],
      series: [{}, ...lines.map((line) => ({
        label: line.name, stroke: line.color, width: 1.5, dash: line.dash, spanGaps: true,
        points: { show: line.xs.length < MARKED_POINTS },
      }))],
      hooks: small ? {} : { setCursor: [(own) => show(own.cursor.idx ?? null)] },
    };
  };
  redrawn(plotBox, small ? TILE_HEIGHT : CHART_HEIGHT, (width, isOther) => {
    if (!lines.length) return;
    plotBox.wasConnected = true;
    data = uPlot.join(lines.map((line) => [line.xs, line.ys]));
    if (plot === null || isOther || isOtherKey) {
      plot?.destroy();
      plot = new uPlot(options(width), data, plotBox);
      isOtherKey = false;
      return;
    }
    const { min, max } = plot.scales.x, before = plot.data[0];
    const isZoomed = min > before[0] || max < before.at(-1);
    plot.setData(data, !isZoomed);
    if (isZoomed) plot.setScale("x", { min, max });
  });
  box.update = (newLines) => {
    const newKey = JSON.stringify(newLines.map((line) => [line.name, line.color, line.dash, line.xs.length < MARKED_POINTS]));
    lines = newLines;
    if (newKey !== key) {
      [key, isOtherKey] = [newKey, true];
      const legend = legendOf(lines.map((line) => [line.name, line.color]));
      values = legend.values;
      legend.box.append(element("span", {}, `${x} `, here));
      legendBox.replaceChildren(legend.box);
    }
    plotBox.stale();
  };
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
  redrawn(plotBox, height, (width) => {
    plotBox.wasConnected = true;
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

/** A legend and a row for each of `rows`: a bar of its parts, and what they are. */
function timeBars(colors, rows) {
  const isThere = ([name]) => rows.some(({ activities }) => activities.some(([own]) => own === name));
  return [legendOf(Object.entries(colors).filter(isThere)).box, rows.map(({ role, seconds, activities }) => element("div", { class: "row" },
    element("span", { title: `${readable(seconds)} s` }, role), element("div", {}, stackedBar(activities, colors), element("span", { class: "note" },
      activities.filter(([, fraction]) => fraction > 0.005).map(([name, fraction]) => `${name} ${(100 * fraction).toFixed(0)} %`).join(", ")))))];
}

/** A bar in parts: `parts` are [name, fraction]. */
function stackedBar(parts, colors) {
  return element("div", { class: "bar" }, parts.map(([name, fraction]) => element("span", {
    style: `width:${100 * fraction}%;background:${colors[name] ?? "#888"}`, title: `${name} ${(100 * fraction).toFixed(1)} %`,
  })));
}

/** What each factor leaves and takes: `parts` are [name, factor, what is left after it, what it is a fraction of]. */
function waterfall(parts) {
  const percent = (value) => `${(100 * value).toFixed(0)} %`, width = (value) => `width:${100 * value}%`;
  return element("div", { class: "waterfall" }, parts.map(([name, factor, left, meaning], at) => {
    const kept = Math.min(left, 1), before = at ? Math.min(parts[at - 1][2], 1) : 1;
    return element("div", { title: `${percent(factor)} ${meaning}` }, element("span", {}, name),
      element("div", { class: "bar" }, element("span", { class: "kept", style: width(kept) }),
        element("span", { class: "lost", style: width(Math.max(0, before - kept)) })), element("b", {}, percent(factor)));
  }));
}

/** Bars of a histogram, by their number. */
function histogram(counts) {
  const sum = counts.reduce((one, other) => one + other, 0) || 1, most = Math.max(...counts, 1);
  return counts.map((count, at) => element("div", { class: "row" }, element("span", {}, `staleness ${at}`),
    element("div", { class: "bar" }, element("span", {
      style: `width:${75 * count / most}%;background:${BY_STALENESS[Math.min(at, BY_STALENESS.length - 1)]}`,
    }), element("span", { class: "note inset" }, `${(100 * count / sum).toFixed(1)} %`))));
}

/** A small curve of values, without axes. */
function sparkline(values, width = 120, height = 26) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => [
    2 + at * (width - 4) / Math.max(values.length - 1, 1),
    height - 3 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 6)].map((one) => one.toFixed(1)).join(","));
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, class: "spark" })) {
    svg.setAttribute(name, value);
  }
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}
