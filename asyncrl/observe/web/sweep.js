// The page of a sweep: its recommendation, a row per limit, and the rewards of all limits.
"use strict";

const { name, verdict, titles, rows, charts } = JSON.parse(document.getElementById("data").textContent);
document.getElementById("page").replaceChildren(
  element("div", { class: "title" }, element("h1", {}, name)), element("p", { class: "verdict" }, verdict), tableOf(titles, rows),
  element("div", { class: "charts" }, charts.map(({ title, x, lines }) => {
    const chart = lineChart({ title, x });
    chart.update(lines.map(([line, xs, ys], at) => ({ name: line, xs, ys, color: PALETTE[at % PALETTE.length] })));
    return chart;
  })));
