// Try it: draw, type or drop a row, and see its analysis.

import { el, fill, problem } from "./dom.js";
import { ask, send } from "./api.js";
import { showAnalysis } from "./analysis.js";
import { makeDropzone, makeForm, makePad, readCsv, readImage } from "./inputs.js";
import { getDisplay, isImage, onThemeChange } from "./pictures.js";
import { rowNoun } from "./texts.js";

const PAUSE_MILLISECONDS = 120;

export async function showTry(root, context, [which], signal) {
  const { model } = context;
  const result = el("div", { class: "result" });
  let timer = 0;
  let asked = new AbortController();
  let answer = null;

  function onChange() {
    clearTimeout(timer);
    timer = setTimeout(analyse, PAUSE_MILLISECONDS);
  }

  async function analyse() {
    asked.abort();
    asked = new AbortController();
    const current = asked.signal;
    try {
      const values = row.get();
      if (values.every(Number.isNaN)) throw new Error("Give at least one value.");
      answer = await send("analyse", values, current);
      if (!current.aborted && !signal.aborted) draw();
    } catch (error) {
      if (!current.aborted && !signal.aborted) result.replaceChildren(problem(error));
    }
  }

  function draw() {
    if (answer) result.replaceChildren(showAnalysis(answer, context, { compact: isImage() }));
  }

  const row = isImage() ? imageInput(onChange) : tableInput(model, onChange);
  const complaint = el("p", { class: "problem", role: "alert", hidden: true });
  function showComplaint(error) {
    complaint.textContent = error?.message ?? "";
    complaint.hidden = !error;
  }

  async function readFile(file) {
    showComplaint(null);
    if (!file) return;
    try {
      const csv = /\.(csv|tsv|txt)$/i.test(file.name);
      if (!csv && !isImage()) throw new Error(`${file.name} is not a CSV file: this model reads rows of numbers.`);
      row.set(csv ? await readCsv(file, model) : await readImage(file));
    } catch (error) {
      showComplaint(error);
    }
  }

  async function fetchRow(path) {
    showComplaint(null);
    try {
      const found = await ask(path, signal);
      row.set(found.values
        ?? Float64Array.from(found.samples, (v, j) => model.centre[j] + model.scale[j] * v));
    } catch (error) {
      if (!signal.aborted) showComplaint(error);
    }
  }

  const zone = makeDropzone(row.node, `Drop ${isImage() ? "an image" : "a CSV file"} here, or choose one: `,
    isImage() ? "image/*,.csv" : ".csv", readFile);
  const starts = el("div", { class: "buttons" },
    el("button", { onclick: () => fetchRow(`samples?n=1&noise=0&seed=${1 + Math.floor(1e6 * Math.random())}`) },
      `A random ${rowNoun()} of the model`),
    context.state.data ? el("button", { onclick: () => fetchRow(
      `row/${Math.floor(context.state.data.rows * Math.random())}`) }, `A random ${rowNoun()} of the data`) : null);

  fill(root, el("h1", {}, "Try it"), el("p", { class: "lead" }, row.lead),
    el("div", { class: "halves" }, el("div", {}, zone.node, starts, complaint), result));
  result.append(el("p", { class: "soft" }, row.waiting));
  if (which !== undefined) await fetchRow(`row/${Number(which) || 0}`);
  else if (!isImage()) row.set(model.centre);
  const stopWatching = onThemeChange(draw);
  return () => {
    stopWatching();
    zone.stop();
    clearTimeout(timer);
    asked.abort();
  };
}

function tableInput(model, onChange) {
  const form = makeForm(model, onChange);
  return {
    ...form,
    lead: "Type a row, or drop a CSV file with one, and the model analyses it."
      + " Leave a value empty, and the model fills it in.",
    waiting: "The analysis of the row appears here.",
  };
}

function imageInput(onChange) {
  const pad = makePad(onChange);
  const colour = getDisplay().shape.length === 3;
  const tools = [["draw", "Draw"], ["rub", "Rub out"], ["erase", "Erase a region"]];
  const choice = el("fieldset", { class: "choice" }, el("legend", {}, "Tool"),
    ...tools.map(([name, title]) => el("label", {}, el("input", {
      type: "radio", name: "tool", value: name, checked: name === "draw",
      onchange: () => { pad.tool.name = name; },
    }), title)));
  const size = el("input", { type: "range", id: "pen", min: 0.5, max: Math.max(4, getDisplay().shape[0] / 6),
    step: 0.1, value: pad.tool.radius, oninput: () => { pad.tool.radius = Number(size.value); } });
  const paint = colour ? el("input", { type: "color", id: "paint", value: "#ffffff", oninput: () => {
    pad.tool.colour = [1, 3, 5].map((i) => parseInt(paint.value.slice(i, i + 2), 16) / 255);
  } }) : null;
  return {
    node: el("div", {}, pad.canvas, choice,
      el("div", { class: "inline" }, el("label", { for: "pen" }, "Size "), size,
        paint ? el("label", { for: "paint" }, "Colour ") : null, paint,
        el("button", { onclick: () => pad.centre() }, "Centre"),
        el("button", { onclick: () => pad.invert() }, "Invert"),
        el("button", { onclick: () => pad.clear() }, "Clear"))),
    set: (values) => pad.set(values),
    get: () => pad.values,
    lead: "Draw or drop an image, and the model analyses it."
      + " Erase a region, and the model fills it in.",
    waiting: "Draw something: its analysis appears here.",
  };
}
