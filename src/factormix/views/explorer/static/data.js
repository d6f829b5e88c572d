// The data: how likely its rows are, the most and the least likely ones, and one row in detail.

import { countOf, el, number, percent, problem, section } from "./dom.js";
import { showAnalysis } from "./analysis.js";
import { ask, askUntilReady } from "./api.js";
import { drawHistogram } from "./charts.js";
import { isImage, onThemeChange, picture, sharedLimit } from "./pictures.js";
import { TEXTS, rowNoun, rowTitle } from "./texts.js";

export async function showData(root, context, [], signal) {
  if (!context.state.data) {
    root.replaceChildren(el("h1", {}, "Data"), el("p", { class: "lead" },
      "No data was given. Start the explorer with --data and a file of rows to see which of them are usual and which are not:"),
    el("pre", {}, `factormix explore ${context.state.path} --data rows.npy`));
    return null;
  }
  const bar = el("progress", { max: 1, value: 0 });
  const waiting = el("p", { class: "soft", role: "status" });
  root.replaceChildren(el("h1", {}, "Data"), el("p", {}, `Scoring the ${rowNoun(true)} …`), bar, waiting);
  const data = await askUntilReady(`data?share=${context.share}`, signal, (text) => {
    waiting.textContent = text;
    const { done, rows } = context.state.data;
    bar.value = done / rows;
  });
  const [most, least] = await Promise.all([0, 1].map((which) =>
    ask(`data/extremes?n=12&least=${which}`, signal)));

  const chart = el("figure");
  const summary = el("p", { role: "status" });
  function draw({ facts }) {
    chart.replaceChildren(drawHistogram(facts.histogram, facts.threshold,
      `Histogram of the log-likelihoods of all ${rowNoun(true)}`, rowNoun(true)));
    const outside = facts.histogram.below;
    const note = outside ? ` ${countOf(outside, `more ${rowNoun()} lies`, `more ${rowNoun(true)} lie`)} to the left, down to ${number(facts.histogram.lowest)}.` : "";
    summary.textContent = `${countOf(facts.rows, rowNoun())} with a mean log-likelihood of ${number(facts.histogram.mean)}. `
      + `Below ${number(facts.threshold)}, ${isImage() ? "an image" : "a row"} counts as an outlier.${note}`;
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
  } }, el("label", { for: "row" }, `Look at ${rowNoun()} `), which, el("button", {}, "Show"));

  root.replaceChildren(el("h1", {}, "Data"),
    section(`How likely the ${rowNoun(true)} are`, TEXTS.histogram, chart, summary,
      el("div", { class: "inline" }, el("label", { for: "share" }, "Outliers: "), slider, output),
      el("p", { class: "soft" }, TEXTS.share),
      data.facts.incomplete ? el("p", { class: "soft" },
        `${countOf(data.facts.incomplete, `${rowNoun()} has`, `${rowNoun(true)} have`)} missing values. ${TEXTS.incomplete}`) : null),
    section(`Least likely ${rowNoun(true)}`, `${TEXTS.least} ${data.facts.left_out ? `${TEXTS.leftOut} ` : ""}Click one to see why.`, rowButtons(least)),
    section(`Most likely ${rowNoun(true)}`, TEXTS.most, rowButtons(most)),
    form);
  return null;
}

export async function showRow(root, context, [which], signal) {
  const index = Number(which) || 0;
  root.replaceChildren(el("h1", {}, rowTitle(index)), el("p", { class: "soft" }, "Analysing …"));
  const answer = await askUntilReady(`row/${index}`, signal, () => {});
  const last = context.state.data.rows - 1;
  const step = (by, text) => el("a", { class: "button",
    href: `#/row/${Math.min(last, Math.max(0, index + by))}` }, text);
  function draw() {
    root.replaceChildren(
      el("div", { class: "title-row" }, el("h1", {}, rowTitle(index, answer.facts.name)), el("div", { class: "steps" },
        step(-1, "‹ Previous"), step(1, "Next ›"),
        el("a", { class: "button", href: "#/data" }, "All data"),
        el("a", { class: "button", href: `#/try/${index}` }, "Change it"))),
      showAnalysis(answer, context));
  }
  draw();
  return onThemeChange(draw);
}

export function rowButtons({ facts, rows }) {
  const d = rows.length / facts.numbers.length;
  const limit = sharedLimit(rows);
  return el("div", { class: "tiles" }, ...facts.numbers.map((row, i) => el("a", {
    class: "row-button", href: `#/row/${row}`,
  }, picture(rows.subarray(i * d, (i + 1) * d), { size: 76, limit, label: rowTitle(row, facts.names?.[i]) }),
  facts.names ? el("b", { class: "row-name" }, facts.names[i]) : null,
  el("span", {}, isImage() ? `no. ${row}` : `row ${row}`), el("small", {}, number(facts.scores[i])))));
}
