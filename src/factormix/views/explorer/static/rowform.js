// A row of numbers to type, to paste or to read from a CSV file.

import { el } from "./dom.js";
import { FEW, featureName } from "./features.js";

// Make a form for a row; `changed` is called with every change.
export function rowForm(model, changed) {
  const d = model.facts.features;
  return d <= FEW ? fields(model, d, changed) : paste(d, changed);
}

function fields(model, d, changed) {
  const inputs = Array.from({ length: d }, (_, j) => el("input", {
    type: "number", step: "any", id: `value-${j}`, oninput: changed,
  }));
  let shown = [];
  const body = inputs.map((input, j) => el("label", { for: `value-${j}` },
    el("span", {}, featureName(model, j)), input));
  return {
    node: el("div", { class: "fields" }, ...body),
    set(values) {
      shown = written(values);
      inputs.forEach((input, j) => { input.value = shown[j].text; });
      changed();
    },
    get: () => Float64Array.from(inputs, (input, j) => read(input.value, shown[j])),
  };
}

function paste(d, changed) {
  const area = el("textarea", { rows: 6, id: "values", spellcheck: false, oninput: changed });
  let shown = [];
  return {
    node: el("div", {}, el("label", { for: "values" },
      `${d.toLocaleString("en")} numbers, split by commas, spaces or lines`), area),
    set(values) {
      shown = written(values);
      area.value = shown.map(({ text }) => text).join(", ");
      changed();
    },
    get() {
      const cells = area.value.trim().split(area.value.includes(",") ? /\s*,\s*/ : /[\s;]+/);
      if (cells.length !== d) throw new Error(`A row of this model has ${d} values, not ${cells.length}.`);
      return Float64Array.from(cells, (cell, j) => read(cell, shown[j]));
    },
  };
}

// Values as they are written: six digits are enough to read, and not enough to compute with.
function written(values) {
  return Array.from(values, (value) => (
    { value, text: Number.isNaN(value) ? "" : String(Number(value.toPrecision(6))) }));
}

function read(text, shown) {
  return text.trim() === shown?.text ? shown.value : numeric(text);
}

function numeric(cell) {
  const text = cell.trim();
  if (text === "" || /^(nan|na|null)$/i.test(text)) return NaN;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error(`"${text.slice(0, 30)}" is not a number.`);
  return value;
}

// Read the first row of a CSV file; names in its first line put the columns in order.
export async function csvValues(file, model) {
  if (file.size > 20e6) throw new Error(`${file.name} is too large for one row: cut it out first.`);
  const lines = (await file.text()).split(/\r?\n/).filter((line) => line.trim());
  if (!lines.length) throw new Error(`${file.name} is empty.`);
  const separator = ["\t", ";", ","].find((one) => lines[0].includes(one)) ?? ",";
  const rows = lines.slice(0, 2).map((line) => line.split(separator)
    .map((cell) => cell.trim().replace(/^"(.*)"$/, "$1")));
  const named = rows[0].some((cell) => cell && Number.isNaN(Number(cell)));
  if (named && !rows[1]) throw new Error(`${file.name} has names but no row below them.`);
  let cells = named ? rows[1] : rows[0];
  const names = model.facts.feature_names;
  if (named && names) {
    const lacking = names.find((name) => !rows[0].includes(name));
    if (lacking !== undefined) throw new Error(`${file.name} has no column "${lacking}".`);
    cells = names.map((name) => cells[rows[0].indexOf(name)]);
  }
  const d = model.facts.features;
  if (cells.length !== d) throw new Error(`A row of this model has ${d} values, not ${cells.length}.`);
  return Float64Array.from(cells, numeric);
}
