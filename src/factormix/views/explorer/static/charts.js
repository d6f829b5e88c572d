// Charts as SVG in the colours of the page, bars, and tables of features.

import { el, fill, number, svg } from "./dom.js";
import {
  addReadout, describeColumn, getDisplay, nameOfColumn, picture, profileLimits,
} from "./pictures.js";

// In a narrow window a chart is drawn narrower, not smaller, so that labels keep their size.
const width = () => (innerWidth < 736 ? 360 : 720);

// Round numbers between low and high, about n of them; counts have whole numbers only.
function ticks(low, high, n = 5, whole = false) {
  const raw = (high - low) / n || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const round = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
  const step = whole ? Math.max(1, round) : round;
  const found = [];
  // Multiples, so that a tick at zero is zero; adding 0 turns -0 into 0.
  const first = Math.ceil(low / step);
  for (let i = first; i * step <= high + step * 1e-6; i += 1) found.push(i * step + 0);
  return found;
}

function frame(wide, height, label) {
  return svg("svg", { viewBox: `0 0 ${wide} ${height}`, class: "chart", role: "img",
    "aria-label": label });
}

// The horizontal lines of an axis at the left, with their values.
function levels(chart, wide, left, values, rise) {
  for (const t of values) {
    chart.append(svg("line", { x1: left, x2: wide - 14, y1: rise(t), y2: rise(t), class: "rule" }));
    chart.append(svg("text", { x: left - 8, y: rise(t) + 4, class: "label level",
      "text-anchor": "end" }, number(t)));
  }
}

function axis(chart, wide, low, high, place, y, whole = false) {
  for (const t of ticks(low, high, wide > 500 ? 5 : 4, whole)) {
    const x = place(t);
    const label = Math.min(wide - 24, Math.max(24, x));
    chart.append(svg("line", { x1: x, x2: x, y1: y, y2: y + 5, class: "tick" }));
    chart.append(svg("text", { x: label, y: y + 20, class: "label place",
      "text-anchor": "middle" }, number(t)));
  }
}

// The histogram of log-likelihoods, with the threshold below which rows are outliers.
export function drawHistogram({ counts, edges }, threshold, label, things) {
  const [wide, height] = [width(), 250];
  const chart = frame(wide, height, label);
  const [low, high] = [edges[0], edges.at(-1)];
  const most = Math.max(...counts);
  const floor = height - 50;
  // A digit of a label is about 8 pixels wide.
  const left = 20 + 8 * number(most).length;
  const place = (value) => left + ((value - low) / (high - low || 1)) * (wide - left - 14);
  levels(chart, wide, left, ticks(0, most, 4, true), (count) => floor - (count / most) * (floor - 22));
  counts.forEach((count, i) => {
    const x = place(edges[i]);
    const tall = (count / most) * (floor - 22);
    const outlying = edges[i + 1] <= threshold;
    const bar = svg("rect", { x: x + 0.5, y: floor - tall, height: tall,
      width: Math.max(1, place(edges[i + 1]) - x - 1), class: outlying ? "bar-out" : "bar-in" });
    bar.append(svg("title", {}, `${count} ${things} from ${number(edges[i])} to ${number(edges[i + 1])}`));
    chart.append(bar);
  });
  axis(chart, wide, low, high, place, floor);
  chart.append(svg("text", { x: (left + wide) / 2, y: height - 6, class: "label", "text-anchor": "middle" },
    "← unusual · log-likelihood · usual →"));
  const x = Math.min(wide - 14, Math.max(left, place(threshold)));
  const right = x < wide / 2;
  chart.append(svg("line", { x1: x, x2: x, y1: 4, y2: floor, class: "bound" }));
  chart.append(svg("text", { x: x + (right ? 6 : -6), y: 14, class: "bound-label",
    "text-anchor": right ? "start" : "end" }, right ? "← outliers" : "outliers →"));
  return chart;
}

// Curves over the same x, which counts something: [{name, values, kind}], null where a curve has no
// value. Values that are counts have a `whole` axis.
export function drawCurves(x, lines, label, { height = 220, xLabel = "", whole = false } = {}) {
  // Two charts lie side by side.
  const wide = Math.min(width(), 540);
  const chart = frame(wide, height, label);
  const all = lines.flatMap((line) => line.values.filter(Number.isFinite));
  if (x.length < 2 || all.length < 2) return el("p", { class: "soft" }, "Not enough points yet.");
  // The first values of a run are far below all others and must not flatten the curve.
  const sorted = [...all].sort((a, b) => a - b);
  let low = sorted[Math.floor(0.04 * sorted.length)];
  let high = sorted.at(-1);
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  low -= 0.04 * (high - low);
  high += 0.04 * (high - low);
  const [left, floor] = [74, height - 44];
  const place = (t) => left + ((t - x[0]) / (x.at(-1) - x[0] || 1)) * (wide - left - 14);
  const rise = (value) => floor - ((Math.max(low, value) - low) / (high - low)) * (floor - 8);
  levels(chart, wide, left, ticks(low, high, 4, whole), rise);
  axis(chart, wide, x[0], x.at(-1), place, floor, true);
  chart.append(svg("text", { x: (left + wide) / 2, y: height - 6, class: "label",
    "text-anchor": "middle" }, xLabel));
  for (const line of lines) {
    const points = x.map((t, i) => [t, line.values[i]]).filter(([, v]) => Number.isFinite(v));
    if (!points.length) continue;
    const path = points.map(([t, v]) => `${place(t).toFixed(1)},${rise(v).toFixed(1)}`).join(" ");
    chart.append(svg("polyline", { points: path, class: `curve ${line.kind}` }));
    const [t, v] = points.at(-1);
    chart.append(svg("circle", { cx: place(t), cy: rise(v), r: 3.5, class: `dot ${line.kind}` }));
  }
  const legend = lines.length > 1
    ? el("p", { class: "legend" }, ...lines.map((line) =>
      el("span", { class: `key ${line.kind}` }, line.name)))
    : null;
  return el("figure", {}, chart, legend);
}

// One bar of several parts: [{name, short, share, kind}].
export function stackedBar(parts, label) {
  const bar = el("div", { class: "stacked", role: "img" });
  bar.setAttribute("aria-label", label);
  for (const part of parts) {
    const piece = el("span", { class: part.kind, title: part.name },
      part.share > 0.1 ? part.short : "");
    piece.style.flexGrow = String(Math.max(part.share, 0.0005));
    bar.append(piece);
  }
  return bar;
}

// A bar from the middle, for a number between -limit and limit.
export function signedBar(value, limit) {
  const bar = el("i");
  setBar(bar, value, limit);
  return el("span", { class: "bar" }, bar);
}

function setBar(bar, value, limit) {
  const share = Math.max(-1, Math.min(1, value / limit));
  bar.className = share < 0 ? "below" : "above";
  bar.style.left = `${50 + Math.min(0, 50 * share)}%`;
  bar.style.width = `${Math.abs(50 * share)}%`;
}

// A bar from the left, for a share of one.
export function shareBar(share) {
  const bar = el("i", { class: "above" });
  bar.style.left = "0";
  bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return el("span", { class: "bar whole" }, bar);
}

// Let a long name break after its punctuation.
function breakName(name) {
  return name.split(/(?<=[^\p{L}\p{N}\s])/u).flatMap((part) => [part, el("wbr")]);
}

// Make a picture with the names of its columns: a bar beside each name, or a line with a readout.
export function namedPicture(values, { size, mode = "value", limit, label }) {
  const { kind, shape } = getDisplay();
  // A tile of the map may have fewer values than there are columns.
  if (kind !== "bars" || values.length !== shape[0]) {
    return addReadout(picture(values, { size, mode, limit, label }), mode);
  }
  const [low, high] = profileLimits(values, mode, limit);
  const bar = (value) => (mode === "sequence" ? shareBar((value - low) / (high - low))
    : signedBar(value, high));
  const list = el("div", { class: "named", role: "group" });
  list.setAttribute("aria-label", label);
  values.forEach((value, j) => {
    const title = describeColumn(values, j, mode);
    list.append(el("span", { class: "name", title }, breakName(nameOfColumn(j))),
      Number.isNaN(value) ? el("small", {}, "missing") : Object.assign(bar(value), { title }));
  });
  return list;
}

// Longer rows are shown in part and typed as text.
export const MAX_FIELDS = 64;
const SHOWN = 14;

// Name up to n features of shown values (d,) that deviate by `least` or more, above and below.
export function findStandouts(values, least, n = 3) {
  const order = orderByDeviation(values, values.length).filter((j) => Math.abs(values[j]) >= least);
  const names = (some) => some.slice(0, n).map(nameOfColumn).join(", ");
  return { above: names(order.filter((j) => values[j] > 0)),
    below: names(order.filter((j) => values[j] < 0)) };
}

// Make a table of shown values (d,) that can be updated; a long row shows its largest deviations.
export function featureTable(model, values, extra = []) {
  const { low, high } = getDisplay();
  const d = model.facts.features;
  const shown = d <= MAX_FIELDS ? d : SHOWN;
  const body = el("tbody");
  const head = el("tr", {}, el("th", { scope: "col" }, "feature"),
    el("th", { scope: "col", class: "bar-head" }, "below | above average"),
    el("th", { scope: "col", class: "r" }, "value"),
    ...extra.map((column) => el("th", { scope: "col", class: "r" }, column.title)));
  const rows = Array.from({ length: shown }, () => {
    const cells = {
      name: el("th", { scope: "row" }), bar: el("i"), value: el("td", { class: "r" }),
      more: extra.map(() => el("td", { class: "r" })),
    };
    body.append(el("tr", {}, cells.name, el("td", { class: "bar-cell" },
      el("span", { class: "bar" }, cells.bar)), cells.value, ...cells.more));
    return cells;
  });

  function update(current) {
    const order = d <= MAX_FIELDS ? null : orderByDeviation(current, shown);
    rows.forEach((cells, i) => {
      const j = order ? order[i] : i;
      if (cells.name.textContent !== nameOfColumn(j)) fill(cells.name, breakName(nameOfColumn(j)));
      setBar(cells.bar, current[j], Math.max(high, -low));
      cells.value.textContent = number(model.centre[j] + model.scale[j] * current[j]);
      extra.forEach((column, c) => { cells.more[c].textContent = column.text(j); });
    });
  }
  update(values);
  const table = el("div", { class: "scroll" },
    el("table", { class: "features" }, el("thead", {}, head), body));
  return { table, update, partial: d > MAX_FIELDS };
}

function orderByDeviation(values, n) {
  const order = Array.from(values.keys());
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  return order.slice(0, n);
}
