// The data: how likely its rows are, and the most and the least likely ones.

import { counted, el, number, percent, problem, section } from "./dom.js";
import { ask, patiently } from "./api.js";
import { histogram } from "./charts.js";
import { rowButtons } from "./lists.js";
import { isImage } from "./pictures.js";
import { WORDS, noun } from "./words.js";

export async function show(root, context, [], signal) {
  if (!context.state.data) {
    root.replaceChildren(el("h1", {}, "Data"), el("p", { class: "lead" },
      "No data was given. Start the explorer with --data and the file of your rows, as in"),
    el("pre", {}, `factormix explore ${context.state.path} --data rows.npy`),
    el("p", { class: "soft" }, "to see which of its rows are usual and which are not."));
    return null;
  }
  const bar = el("progress", { max: 1, value: 0 });
  const waiting = el("p", { class: "soft", role: "status" });
  root.replaceChildren(el("h1", {}, "Data"), el("p", {}, `Scoring the ${noun(true)} …`), bar, waiting);
  const data = await patiently(`data?share=${context.share}`, signal, (text) => {
    waiting.textContent = text;
    const { done, rows } = context.state.data;
    bar.value = done / rows;
  });
  const [most, least] = await Promise.all([0, 1].map((which) =>
    ask(`data/extremes?n=12&least=${which}`, signal)));

  const chart = el("figure");
  const said = el("p", { role: "status" });
  function draw({ facts }) {
    chart.replaceChildren(histogram(facts.histogram, facts.threshold,
      `Histogram of the log-likelihoods of all ${noun(true)}`, noun(true)));
    const outside = facts.histogram.below;
    const note = outside ? ` ${counted(outside, `${noun()} lies`, `${noun(true)} lie`)} further to the left, down to ${number(facts.histogram.lowest)}.` : "";
    said.textContent = `${counted(facts.rows, noun())}, on average ${number(facts.histogram.mean)}. `
      + `Below ${number(facts.threshold)}, ${isImage() ? "an image" : "a row"} is called an outlier.${note}`;
  }
  draw(data);

  const output = el("output", {}, percent(context.share));
  const slider = el("input", {
    type: "range", id: "share", min: 0.1, max: 20, step: 0.1, value: 100 * context.share,
    oninput: () => { output.textContent = percent(slider.value / 100); },
    onchange: async () => {
      context.share = slider.value / 100;
      try {
        draw(await ask(`data?share=${context.share}`, signal));
      } catch (error) {
        if (!signal.aborted) chart.replaceChildren(problem(error));
      }
    },
  });
  const last = data.facts.rows - 1;
  const which = el("input", { type: "number", min: 0, max: last, value: 0, id: "row" });
  const form = el("form", { class: "inline", onsubmit: (event) => {
    event.preventDefault();
    location.hash = `#/row/${Math.min(last, Math.max(0, Number(which.value) | 0))}`;
  } }, el("label", { for: "row" }, `Look at ${noun()} `), which, el("button", {}, "Show"));

  root.replaceChildren(el("h1", {}, "Data"),
    section(`How likely the ${noun(true)} are`, WORDS.histogram, chart, said,
      el("div", { class: "inline" }, el("label", { for: "share" }, "Call outliers: "), slider, output),
      el("p", { class: "soft" }, WORDS.share),
      data.facts.incomplete ? el("p", { class: "soft" },
        `${counted(data.facts.incomplete, noun())} of these have values missing. ${WORDS.incomplete}`) : null),
    section(`Least likely ${noun(true)}`, `${WORDS.least} Click one to see why.`, rowButtons(least)),
    section(`Most likely ${noun(true)}`, WORDS.most, rowButtons(most)),
    form);
  return null;
}
