// Try it: a row of one's own, drawn, typed or dropped, and what the model says about it.

import { el, fill, problem } from "./dom.js";
import { ask, send } from "./api.js";
import { analysis } from "./analysis.js";
import { onThemeChange } from "./colours.js";
import { drawingPad, imageValues } from "./pad.js";
import { getLook, isImage } from "./pictures.js";
import { csvValues, rowForm } from "./rowform.js";
import { noun } from "./words.js";

const PAUSE = 120;

export async function show(root, context, [which], signal) {
  const { model } = context;
  const result = el("div", { class: "result" });
  let timer = 0;
  let asked = new AbortController();
  let answer = null;

  function changed() {
    clearTimeout(timer);
    timer = setTimeout(judge, PAUSE);
  }

  async function judge() {
    asked.abort();
    asked = new AbortController();
    const mine = asked.signal;
    try {
      const values = row.get();
      if (values.every(Number.isNaN)) throw new Error("Give at least one value.");
      answer = await send("analyse", values, mine);
      if (!mine.aborted && !signal.aborted) draw();
    } catch (error) {
      if (!mine.aborted && !signal.aborted) result.replaceChildren(problem(error));
    }
  }

  function draw() {
    if (answer) result.replaceChildren(analysis(answer, context, { compact: isImage() }));
  }

  const row = isImage() ? padRow(changed) : formRow(model, changed);
  const complaint = el("p", { class: "problem", role: "alert", hidden: true });
  function complain(error) {
    complaint.textContent = error?.message ?? "";
    complaint.hidden = !error;
  }

  async function take(file) {
    complain(null);
    if (!file) return;
    try {
      const csv = /\.(csv|tsv|txt)$/i.test(file.name);
      if (!csv && !isImage()) throw new Error(`${file.name} is no CSV file: this model reads rows of numbers.`);
      row.set(csv ? await csvValues(file, model) : await imageValues(file));
    } catch (error) {
      complain(error);
    }
  }

  async function fetchRow(path) {
    complain(null);
    try {
      const found = await ask(path, signal);
      row.set(found.values
        ?? Float64Array.from(found.samples, (v, j) => model.centre[j] + model.scale[j] * v));
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
  }

  const file = el("input", { type: "file", id: "file", accept: isImage() ? "image/*,.csv" : ".csv",
    onchange: () => { take(file.files[0]); file.value = ""; } });
  const zone = el("div", { class: "dropzone" }, row.node,
  el("p", { class: "inline" }, el("label", { for: "file" },
    isImage() ? "Drop an image here, or choose one: " : "Drop a CSV file here, or choose one: "), file));
  const starts = el("div", { class: "buttons" },
    el("button", { onclick: () => fetchRow(`samples?n=1&noise=0&seed=${1 + Math.floor(1e6 * Math.random())}`) },
      "Let the model invent one"),
    context.state.data ? el("button", { onclick: () => fetchRow(
      `row/${Math.floor(context.state.data.rows * Math.random())}`) }, `A random ${noun()} of the data`) : null);

  fill(root, el("h1", {}, "Try it"), el("p", { class: "lead" }, row.lead),
    el("div", { class: "halves" }, el("div", {}, zone, starts, complaint), result));
  result.append(el("p", { class: "soft" }, row.waiting));
  if (which !== undefined) await fetchRow(`row/${Number(which) || 0}`);
  else if (!isImage()) row.set(model.centre);
  // Wherever on the page a file is let go, it is taken.
  const over = () => zone.classList.add("over");
  const out = (event) => { if (!event.relatedTarget) zone.classList.remove("over"); };
  const drop = (event) => {
    zone.classList.remove("over");
    take(event.dataTransfer.files[0]);
  };
  const heard = { dragover: over, dragleave: out, drop };
  Object.entries(heard).forEach(([kind, hear]) => addEventListener(kind, hear));
  const quiet = onThemeChange(draw);
  return () => {
    quiet();
    Object.entries(heard).forEach(([kind, hear]) => removeEventListener(kind, hear));
    clearTimeout(timer);
    asked.abort();
  };
}

function formRow(model, changed) {
  const form = rowForm(model, changed);
  return {
    ...form,
    lead: "Type a row, or drop a CSV file with one, and see what the model makes of it."
      + " Leave a value empty, and the model fills it in.",
    waiting: "What the model says about the row appears here.",
  };
}

function padRow(changed) {
  const pad = drawingPad(changed);
  const colour = getLook().shape.length === 3;
  const tools = [["draw", "Draw"], ["rub", "Rub out"], ["erase", "Erase a region"]];
  const choice = el("fieldset", { class: "choice" }, el("legend", {}, "Tool"),
    ...tools.map(([name, title]) => el("label", {}, el("input", {
      type: "radio", name: "tool", value: name, checked: name === "draw",
      onchange: () => { pad.tool.name = name; },
    }), title)));
  const size = el("input", { type: "range", id: "pen", min: 0.5, max: Math.max(4, getLook().shape[0] / 6),
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
    lead: "Draw an image, or drop one, and see what the model makes of it."
      + " Erase a region, and the model fills it in.",
    waiting: "Draw something: what the model says about it appears here.",
  };
}
