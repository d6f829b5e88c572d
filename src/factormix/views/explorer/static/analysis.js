// What the model says about one row: verdict, components, latent code, reconstruction, reasons.

import { el, number, percent, section } from "./dom.js";
import { fillBar, lean } from "./charts.js";
import { featureName } from "./features.js";
import { isImage, largest, picture, reach } from "./pictures.js";
import { WORDS, noun } from "./words.js";

const REASONS = 12;

// Show an analysis; `compact` leaves out the row itself, which the page shows already.
export function analysis(answer, context, { compact = false } = {}) {
  const { facts } = answer;
  const size = isImage() ? 150 : 220;
  const limit = Math.max(...[answer.row, answer.rebuilt, answer.centroid].map(reach));
  const pictures = [];
  if (!compact) pictures.push([picture(answer.row, { size, limit, label: `The ${noun()}` }), `The ${noun()} itself.`]);
  if (answer.filled) {
    pictures.push([picture(answer.filled, { size, limit, label: "Filled in" }), WORDS.filled]);
  }
  pictures.push([picture(answer.rebuilt, { size, limit, label: "Reconstruction" }), WORDS.rebuilt]);
  pictures.push([picture(answer.centroid, { size, limit, label: "Centroid of its component" }),
    `The centroid of component ${facts.component}, to which it belongs.`]);
  if (answer.z_scores && isImage()) {
    const strongest = Math.min(6, Math.max(3, largest(answer.z_scores)));
    pictures.push([picture(answer.z_scores, { size, mode: "signed", limit: strongest,
      label: "Reasons, pixel by pixel" }), WORDS.reasonsImage]);
  }
  return el("div", { class: "analysis" },
    verdict(facts, context),
    el("div", { class: "figures" }, ...pictures.map(([shown, caption]) =>
      el("figure", {}, shown, el("figcaption", {}, caption)))),
    answer.z_scores && !isImage() ? reasons(answer, context) : null,
    answer.filled && !isImage() ? filled(answer, context) : null,
    section("Which component it belongs to", WORDS.shares,
      el("table", { class: "shares" }, el("tbody", {}, ...facts.shares.map(([k, share]) =>
        el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#/component/${k}` }, `Component ${k}`)),
          el("td", { class: "bar-cell" }, fillBar(share)), el("td", { class: "r" }, percent(share))))))),
    facts.code.length ? section("Where it lies along the factors", WORDS.code,
      el("table", { class: "shares" }, el("tbody", {}, ...facts.code.map((value, j) =>
        el("tr", {}, el("th", { scope: "row" }, `Factor ${j + 1}`),
          el("td", { class: "bar-cell" }, lean(value, 4)),
          el("td", { class: "r" }, `${number(value, 3)} ± ${number(facts.code_deviation[j], 2)}`)))))) : null);
}

export function verdict(facts, context) {
  const outlying = facts.percentile < context.share;
  const crowd = facts.missing ? `${noun(true)} that the model invents, with the same values missing`
    : facts.among === "data" ? `the ${noun(true)} of your data` : `${noun(true)} that the model itself invents`;
  const share = percent(1 - facts.percentile);
  const less = share === "100%" ? "nearly all" : `${share} of`;
  return el("div", { class: `verdict ${outlying ? "out" : "in"}`, role: "status" },
    el("b", {}, outlying ? "Outlier" : "Usual"),
    el("p", {}, outlying
      ? `Less likely than ${facts.percentile === 0 ? "all" : less} ${crowd}.`
      : `More likely than ${percent(facts.percentile)} of ${crowd}, and so no outlier.`),
    el("p", { class: "soft" }, `Log-likelihood ${number(facts.log_likelihood, 6)}: ${WORDS.score}`));
}

// The values that were missing, as the model expects them.
function filled(answer, context) {
  const { model } = context;
  const gaps = Array.from(answer.row.keys()).filter((j) => Number.isNaN(answer.row[j]));
  return section("Filled in", WORDS.filled, el("div", { class: "scroll" },
    el("table", { class: "features" }, el("tbody", {}, ...gaps.slice(0, REASONS).map((j) =>
      el("tr", {}, el("th", { scope: "row" }, featureName(model, j)),
        el("td", { class: "r" }, number(model.centre[j] + model.scale[j] * answer.filled[j]),
          ` ± ${number(model.scale[j] * answer.doubt[j], 3)}`)))))));
}

// Two numbers in as many digits as tell them apart.
function apart(a, b) {
  let digits = 4;
  while (digits < 8 && a !== b && number(a, digits) === number(b, digits)) digits += 1;
  return [number(a, digits), number(b, digits)];
}

function reasons(answer, context) {
  const { model } = context;
  const z = answer.z_scores;
  const order = Array.from(z.keys()).filter((j) => !Number.isNaN(z[j]))
    .sort((a, b) => Math.abs(z[b]) - Math.abs(z[a]));
  const raw = (shown, j) => model.centre[j] + model.scale[j] * shown[j];
  return section("Reasons, feature by feature", WORDS.reasons, el("div", { class: "scroll" },
    el("table", { class: "features reasons" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "feature"),
        el("th", { scope: "col", class: "r" }, "value"),
        el("th", { scope: "col", class: "r" }, "expected"),
        el("th", { scope: "col", class: "bar-head" }, "too low | too high"),
        el("th", { scope: "col", class: "r" }, "deviations"))),
      el("tbody", {}, ...order.slice(0, REASONS).map((j) => el("tr", {},
        el("th", { scope: "row" }, featureName(model, j)),
        ...apart(raw(answer.row, j), raw(answer.expected, j)).map((one) => el("td", { class: "r" }, one)),
        el("td", { class: "bar-cell" }, lean(z[j], 6)),
        el("td", { class: "r" }, number(z[j], 3))))))));
}
