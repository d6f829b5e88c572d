// One component: its pictures, a slider for each factor, samples, and the nearest rows.

import { el, fill, number, percent, section, soon } from "./dom.js";
import { ask, patiently } from "./api.js";
import { stacked } from "./charts.js";
import { onThemeChange } from "./colours.js";
import { featureTable, outstanding } from "./features.js";
import { isImage, largest, picture, reach, repaint } from "./pictures.js";
import { rowButtons } from "./lists.js";
import { WORDS, noun } from "./words.js";

const KINDS = ["first", "second", "third", "fourth", "fifth"];

export async function show(root, context, [which], signal) {
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
    const begun = performance.now();
    live.set(mean);
    for (let j = 0; j < l; j += 1) {
      const column = columns[j];
      if (z[j]) for (let i = 0; i < d; i += 1) live[i] += z[j] * column[i];
    }
    repaint(big, live);
    table?.update(live);
    // What a move costs, for whoever wants to measure it.
    big.dataset.milliseconds = (performance.now() - begun).toFixed(2);
  }

  function slider(j, column) {
    const out = el("output", {}, "0");
    const input = el("input", {
      type: "range", min: -3, max: 3, step: 0.05, value: 0, id: `factor-${j}`,
      oninput: () => {
        z[j] = Number(input.value);
        out.textContent = number(z[j], 3);
        soon(redraw);
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
        moves(context.model, column)),
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
      const limit = Math.max(...ways.map(({ samples }) => reach(samples)));
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
      const found = await patiently(`component/${k}/nearest`, signal, (text) => {
        nearest.replaceChildren(el("p", { class: "soft" }, text));
      });
      nearest.replaceChildren(found.facts.numbers.length ? rowButtons(found)
        : el("p", { class: "soft" }, "No row of the data belongs to this component."));
    } catch (error) {
      if (!signal.aborted) nearest.replaceChildren(el("p", { class: "soft" }, error.message));
    }
  }

  const n = context.model.facts.components;
  const go = el("input", { type: "number", min: 0, max: n - 1, value: k, id: "which",
    onchange: () => { location.hash = `#/component/${Math.min(n - 1, Math.max(0, Number(go.value) | 0))}`; } });
  const step = (by) => el("a", { class: "button", href: `#/component/${(k + by + n) % n}` },
    by < 0 ? "‹ Previous" : "Next ›");
  const loadingWord = isImage() ? WORDS.loadings : WORDS.loadingsProfile;
  fill(root,
    el("div", { class: "title-row" }, el("h1", {}, `Component ${k}`),
      el("div", { class: "steps" }, step(-1), el("label", { for: "which" }, "Number "), go, step(1))),
    el("p", { class: "lead" },
      `One of ${n.toLocaleString("en")} typical kinds of ${noun(true)}. ${percent(facts.weight)} of all data belongs to it`,
      facts.in_use ? "." : ": it is not in use."),
    section("Move along the factors",
      l ? WORDS.factors : "This model has no factors: its components are plain Gaussians.",
      el("div", { class: "mover" },
        el("div", { class: "stage" }, big,
          el("div", { class: "buttons" },
            el("button", { onclick: () => { sliders.forEach((s) => s.set(0)); redraw(); } }, "Back to the centroid"),
            el("button", { onclick: () => { sliders.forEach((s) => s.set(gauss())); redraw(); } }, "Random position"))),
        el("div", { class: "sliders" }, ...sliders.map((s) => s.row))),
      table ? el("h3", {}, table.partial ? "The features that deviate most" : "Feature by feature") : null,
      table ? el("p", { class: "soft" }, WORDS.features) : null,
      table?.table),
    section("How much each factor explains", WORDS.explained,
      stacked(parts, parts.map((part) => part.name).join(", ")),
      el("p", { class: "legend" }, ...parts.map((part) =>
        el("span", { class: `key ${part.kind}` }, part.name)))),
    el("section", {}, el("h2", {}, "What is known about it"),
      el("div", { class: "figures" },
        figure(picture(mean, { size: 150, label: "Centroid" }), WORDS.centroid),
        figure(picture(component.precision.map(Math.log), {
          size: 150, mode: "sequence", limit: bulk(component.precision.map(Math.log)), label: "Precision",
        }),
          isImage() ? WORDS.precision : WORDS.precisionProfile),
        figure(picture(component.deviation, { size: 150, mode: "sequence",
          limit: isImage() ? null : [0, largest(component.deviation)], label: "Spread" }),
          WORDS.deviation)),
      l ? el("div", { class: "figures" }, ...columns.map((column, j) => figure(
          picture(column, { size: 150, mode: "signed", limit, label: `Loadings of factor ${j + 1}` }),
          j === 0 ? loadingWord : `Loadings of factor ${j + 1}.`))) : null),
    section("Samples", WORDS.samples, sampleBox,
      el("div", { class: "buttons" },
        el("button", { onclick: () => { seed += 1; drawSamples(); } }, "Draw again"))),
    section(`Nearest real ${noun(true)}`, WORDS.nearest, nearest),
  );
  drawSamples();
  listNearest();
  return onThemeChange(context.again);
}

const NOTICEABLE = 0.4;

// What a factor does to a row of a table, in words.
function moves(model, column) {
  if (isImage()) return null;
  const { above, below } = outstanding(model, column, NOTICEABLE * largest(column));
  const more = above && `more ${above}`;
  const less = below && `less ${below}`;
  return el("small", { class: "moves" }, `to the right: ${[more, less].filter(Boolean).join("; ")}`);
}

// The limits between which all but a few values lie.
function bulk(values) {
  const sorted = Array.from(values).sort((a, b) => a - b);
  const [low, high] = [0.02, 0.98].map((q) => sorted[Math.round(q * (sorted.length - 1))]);
  // The lowest bar is to be seen as well.
  const below = isImage() ? 0 : 0.08 * (high - low);
  return high > low ? [low - below, high] : [low - 0.5, high + 0.5];
}

function figure(shown, caption) {
  return el("figure", {}, shown, el("figcaption", {}, caption));
}

export function split(values, d) {
  return Array.from({ length: values.length / d }, (_, i) => values.subarray(i * d, (i + 1) * d));
}

function gauss() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
