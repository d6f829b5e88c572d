// One component: its pictures, a slider for each factor, samples, and the nearest rows.

import { el, fill, number, onNextFrame, percent, section } from "./dom.js";
import { ask, askUntilReady } from "./api.js";
import { featureTable, findStandouts, namedPicture, stackedBar } from "./charts.js";
import { rowButtons } from "./data.js";
import {
  addReadout, isBars, isImage, largest, onThemeChange, picture, repaint, sharedLimit,
} from "./pictures.js";
import { TEXTS, rowNoun } from "./texts.js";

const KINDS = ["first", "second", "third", "fourth", "fifth"];

export async function showComponent(root, context, [which], signal) {
  const k = which === undefined ? context.last ?? context.model.facts.heaviest : Number(which);
  const component = await ask(`component/${k}`, signal);
  context.last = k;
  const { facts, mean, loadings } = component;
  const d = mean.length;
  const l = facts.explained.length;
  const columns = Array.from({ length: l }, (_, j) => loadings.subarray(j * d, (j + 1) * d));
  const limit = largest(loadings);
  const z = new Float32Array(l);
  const live = new Float32Array(mean);

  const big = picture(mean, { size: isImage() ? 260 : 420, label: "The row that the sliders make" });
  const table = isImage() ? null : featureTable(context.model, mean, [{
    title: "usual spread",
    text: (j) => `± ${number(component.deviation[j] * context.model.scale[j], 3)}`,
  }]);
  const sliders = columns.map((column, j) => slider(j, column));

  function redraw() {
    const start = performance.now();
    live.set(mean);
    for (let j = 0; j < l; j += 1) {
      const column = columns[j];
      if (z[j]) for (let i = 0; i < d; i += 1) live[i] += z[j] * column[i];
    }
    repaint(big, live);
    table?.update(live);
    // Read by benchmarks/explorer.py.
    big.dataset.milliseconds = (performance.now() - start).toFixed(2);
  }

  function slider(j, column) {
    const out = el("output", {}, "0");
    const input = el("input", {
      type: "range", min: -3, max: 3, step: 0.05, value: 0, id: `factor-${j}`,
      oninput: () => {
        z[j] = Number(input.value);
        out.textContent = number(z[j], 3);
        onNextFrame(redraw);
      },
    });
    return {
      set(value) {
        input.value = String(value);
        z[j] = Number(input.value);
        out.textContent = number(z[j], 3);
      },
      row: el("div", { class: "slider" },
        picture(column, { size: 56, mode: "signed", limit, label: `Loadings of factor ${j + 1}` }),
        el("label", { for: `factor-${j}` }, el("b", {}, `Factor ${j + 1}`),
          el("small", {}, ` explains ${percent(facts.explained[j])}`)), input, out,
        describeFactor(column)),
    };
  }

  const parts = [
    ...facts.explained.map((share, j) => ({
      name: `factor ${j + 1}: ${percent(share)}`, short: percent(share), share, kind: KINDS[j % KINDS.length],
    })),
    { name: `noise: ${percent(facts.noise)}`, short: percent(facts.noise), share: facts.noise, kind: "noise" },
  ];
  const sampleBox = el("div");
  let seed = 1;
  async function drawSamples() {
    try {
      const ways = await Promise.all([0, 1].map((noise) =>
        ask(`component/${k}/samples?n=8&noise=${noise}&seed=${seed}`, signal)));
      const limit = Math.max(...ways.map(({ samples }) => sharedLimit(samples)));
      sampleBox.replaceChildren(...ways.map(({ samples }, noise) => el("div", { class: "strip" },
        el("h3", {}, noise ? "With noise" : "Without noise"),
        el("div", { class: "tiles" }, ...split(samples, d).map((values, i) =>
          picture(values, { size: 84, limit, label: `Sample ${i + 1}` }))))));
    } catch (error) {
      if (!signal.aborted) sampleBox.replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }
  const nearest = el("div");
  async function listNearest() {
    if (!context.state.data) {
      fill(nearest, el("p", { class: "soft" }, "Start with --data to see them."));
      return;
    }
    try {
      const found = await askUntilReady(`component/${k}/nearest`, signal, (text) => {
        nearest.replaceChildren(el("p", { class: "soft" }, text));
      });
      nearest.replaceChildren(found.facts.numbers.length ? rowButtons(found)
        : el("p", { class: "soft" }, "No rows of the data belong to this component."));
    } catch (error) {
      if (!signal.aborted) nearest.replaceChildren(el("p", { class: "soft" }, error.message));
    }
  }

  const n = context.model.facts.components;
  const go = el("input", { type: "number", min: 0, max: n - 1, value: k, id: "which",
    onchange: () => { location.hash = `#/component/${Math.min(n - 1, Math.max(0, Number(go.value) | 0))}`; } });
  const step = (by) => el("a", { class: "button", href: `#/component/${(k + by + n) % n}` },
    by < 0 ? "‹ Previous" : "Next ›");
  const kind = isImage() ? "" : isBars() ? "Bars" : "Line";
  fill(root,
    el("div", { class: "title-row" }, el("h1", {}, `Component ${k}`),
      el("div", { class: "steps" }, step(-1), el("label", { for: "which" }, "Number "), go, step(1))),
    el("p", { class: "lead" },
      `One of ${n.toLocaleString("en")} typical kinds of ${rowNoun(true)}. It holds ${percent(facts.weight)} of all data`,
      facts.in_use ? "." : ": it is not in use."),
    section("Move along the factors",
      l ? TEXTS.factors : "This model has no factors: its components have diagonal covariances.",
      el("div", { class: "mover" },
        el("div", { class: "stage" }, addReadout(big, "value", TEXTS.readout),
          el("div", { class: "buttons" },
            el("button", { onclick: () => { sliders.forEach((s) => s.set(0)); redraw(); } }, "Back to the centroid"),
            el("button", { onclick: () => { sliders.forEach((s) => s.set(drawNormal())); redraw(); } }, "Random position"))),
        el("div", { class: "sliders" }, ...sliders.map((s) => s.row))),
      table ? el("h3", {}, table.partial ? "The features that deviate most" : "Feature by feature") : null,
      table ? el("p", { class: "soft" }, TEXTS.features) : null,
      table?.table),
    section("How much each factor explains", TEXTS.explained,
      stackedBar(parts, parts.map((part) => part.name).join(", ")),
      el("p", { class: "legend" }, ...parts.map((part) =>
        el("span", { class: `key ${part.kind}` }, part.name)))),
    el("section", {}, el("h2", {}, "Mean, precision and loadings"),
      el("div", { class: "figures" },
        figure(namedPicture(mean, { size: 150, label: "Centroid" }), TEXTS.centroid),
        figure(namedPicture(component.precision.map(Math.log), {
          size: 150, mode: "sequence", limit: bulkLimits(component.precision.map(Math.log)), label: "Precision",
        }),
          TEXTS[`precision${kind}`]),
        figure(namedPicture(component.deviation, { size: 150, mode: "sequence",
          limit: isImage() ? null : [0, largest(component.deviation)], label: "Spread" }),
          TEXTS.deviation)),
      l ? el("div", { class: "figures" }, ...columns.map((column, j) => figure(
          namedPicture(column, { size: 150, mode: "signed", limit, label: `Loadings of factor ${j + 1}` }),
          j === 0 ? TEXTS[`loadings${kind}`] : `Loadings of factor ${j + 1}.`))) : null),
    section("Samples", TEXTS.samples, sampleBox,
      el("div", { class: "buttons" },
        el("button", { onclick: () => { seed += 1; drawSamples(); } }, "Draw again"))),
    section(`Nearest real ${rowNoun(true)}`, TEXTS.nearest, nearest),
  );
  drawSamples();
  listNearest();
  return onThemeChange(context.reload);
}

const NOTICEABLE = 0.4;

// Name the features of a table that a factor raises and lowers.
function describeFactor(column) {
  if (isImage()) return null;
  const { above, below } = findStandouts(column, NOTICEABLE * largest(column));
  const higher = above && `higher ${above}`;
  const lower = below && `lower ${below}`;
  if (!above && !below) return null;
  return el("small", { class: "moves" }, `to the right: ${[higher, lower].filter(Boolean).join("; ")}`);
}

// The limits between which all but 4% of the values lie.
function bulkLimits(values) {
  const sorted = Array.from(values).sort((a, b) => a - b);
  const [low, high] = [0.02, 0.98].map((q) => sorted[Math.round(q * (sorted.length - 1))]);
  // Leave room so that the lowest bar is visible.
  const below = isImage() ? 0 : 0.08 * (high - low);
  return high > low ? [low - below, high] : [low - 0.5, high + 0.5];
}

function figure(shown, caption) {
  return el("figure", {}, shown, el("figcaption", {}, caption));
}

function split(values, d) {
  return Array.from({ length: values.length / d }, (_, i) => values.subarray(i * d, (i + 1) * d));
}

function drawNormal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
