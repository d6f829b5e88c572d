// The analysis of one row: verdict, components, latent code, reconstruction and reasons.

import { el, number, percent, section } from "./dom.js";
import { namedPicture, shareBar, signedBar } from "./charts.js";
import { isImage, largest, nameOfColumn, sharedLimit } from "./pictures.js";
import { TEXTS, rowNoun } from "./texts.js";

const REASONS = 12;

// Show an analysis; `compact` leaves out the row, where the page shows it already.
export function showAnalysis(answer, context, { compact = false } = {}) {
  const { facts } = answer;
  const size = isImage() ? 150 : 220;
  const limit = Math.max(...[answer.row, answer.reconstruction, answer.centroid].map(sharedLimit));
  const pictures = [];
  if (!compact) pictures.push([namedPicture(answer.row, { size, limit, label: `The ${rowNoun()}` }), `The ${rowNoun()}.`]);
  if (answer.imputed) {
    pictures.push([namedPicture(answer.imputed, { size, limit, label: "Filled in" }), TEXTS.imputed]);
  }
  pictures.push([namedPicture(answer.reconstruction, { size, limit, label: "Reconstruction" }), TEXTS.reconstruction]);
  pictures.push([namedPicture(answer.centroid, { size, limit, label: "Centroid of its component" }),
    `The centroid of component ${facts.component}, to which the ${rowNoun()} belongs.`]);
  if (answer.z_scores && isImage()) {
    const strongest = Math.min(6, Math.max(3, largest(answer.z_scores)));
    pictures.push([namedPicture(answer.z_scores, { size, mode: "signed", limit: strongest,
      label: "Reasons, pixel by pixel" }), TEXTS.reasonsImage]);
  }
  return el("div", { class: "analysis" },
    verdict(facts, context),
    el("div", { class: "figures" }, ...pictures.map(([shown, caption]) =>
      el("figure", {}, shown, el("figcaption", {}, caption)))),
    answer.z_scores && !isImage() ? reasonsTable(answer, context) : null,
    answer.imputed && !isImage() ? imputedTable(answer, context) : null,
    section("Which component it belongs to", TEXTS.shares,
      el("table", { class: "shares" }, el("tbody", {}, ...facts.shares.map(([k, share]) =>
        el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#/component/${k}` }, `Component ${k}`)),
          el("td", { class: "bar-cell" }, shareBar(share)), el("td", { class: "r" }, percent(share))))))),
    facts.code.length ? section("Where it lies along the factors", TEXTS.code,
      el("table", { class: "shares" }, el("tbody", {}, ...facts.code.map((value, j) =>
        el("tr", {}, el("th", { scope: "row" }, `Factor ${j + 1}`),
          el("td", { class: "bar-cell" }, signedBar(value, 4)),
          el("td", { class: "r" }, `${number(value, 3)} ± ${number(facts.code_deviation[j], 2)}`)))))) : null);
}

function verdict(facts, context) {
  const outlying = facts.percentile < context.share;
  const others = facts.missing ? `${rowNoun(true)} drawn from the model, with the same values missing`
    : facts.among === "data" ? `the ${rowNoun(true)} of your data` : `${rowNoun(true)} drawn from the model`;
  const share = percent(1 - facts.percentile);
  const less = share === "100%" ? "nearly all" : `${share} of`;
  return el("div", { class: `verdict ${outlying ? "out" : "in"}`, role: "status" },
    el("b", {}, outlying ? "Outlier" : "Usual"),
    el("p", {}, outlying
      ? `Less likely than ${facts.percentile === 0 ? "all" : less} ${others}.`
      : `More likely than ${percent(facts.percentile)} of ${others}.`),
    el("p", { class: "soft" }, `Log-likelihood ${number(facts.log_likelihood, 6)}: ${TEXTS.score}`));
}

// The missing values, as the model expects them.
function imputedTable(answer, context) {
  const { model } = context;
  const gaps = Array.from(answer.row.keys()).filter((j) => Number.isNaN(answer.row[j]));
  return section("Filled in", TEXTS.imputed, el("div", { class: "scroll" },
    el("table", { class: "features" }, el("tbody", {}, ...gaps.slice(0, REASONS).map((j) =>
      el("tr", {}, el("th", { scope: "row" }, nameOfColumn(j)),
        el("td", { class: "r" }, number(model.centre[j] + model.scale[j] * answer.imputed[j]),
          ` ± ${number(model.scale[j] * answer.imputed_deviation[j], 3)}`)))))));
}

// Format two numbers with enough digits to show that they differ.
function formatApart(a, b) {
  let digits = 4;
  while (digits < 8 && a !== b && number(a, digits) === number(b, digits)) digits += 1;
  return [number(a, digits), number(b, digits)];
}

function reasonsTable(answer, context) {
  const { model } = context;
  const z = answer.z_scores;
  const order = Array.from(z.keys()).filter((j) => !Number.isNaN(z[j]))
    .sort((a, b) => Math.abs(z[b]) - Math.abs(z[a]));
  const raw = (shown, j) => model.centre[j] + model.scale[j] * shown[j];
  return section("Reasons, feature by feature", TEXTS.reasons, el("div", { class: "scroll" },
    el("table", { class: "features reasons" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "feature"),
        el("th", { scope: "col", class: "r" }, "value"),
        el("th", { scope: "col", class: "r" }, "expected"),
        el("th", { scope: "col", class: "bar-head" }, "too low | too high"),
        el("th", { scope: "col", class: "r" }, "deviations"))),
      el("tbody", {}, ...order.slice(0, REASONS).map((j) => el("tr", {},
        el("th", { scope: "row" }, nameOfColumn(j)),
        ...formatApart(raw(answer.row, j), raw(answer.expected, j)).map((one) => el("td", { class: "r" }, one)),
        el("td", { class: "bar-cell" }, signedBar(z[j], 6)),
        el("td", { class: "r" }, number(z[j], 3))))))));
}
