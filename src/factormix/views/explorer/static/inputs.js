// Inputs for a row: a pad to draw an image on, a form for numbers, and files.

import { el, onNextFrame } from "./dom.js";
import { MAX_FIELDS } from "./charts.js";
import { getDisplay, nameOfColumn, theme } from "./pictures.js";

const PAD_SIZE = 300;

// Make a pad for mouse, finger or keys; `onChange` is called after every stroke. Erased pixels are NaN.
export function makePad(onChange) {
  const { shape, low, high } = getDisplay();
  const [height, width] = shape;
  const channels = shape[2] ?? 1;
  const values = new Float64Array(height * width * channels).fill(low);
  const unit = Math.max(1, Math.floor(PAD_SIZE / Math.max(height, width)));
  const canvas = el("canvas", { class: "pad", tabIndex: 0, role: "application",
    width: width * unit, height: height * unit });
  canvas.setAttribute("aria-label",
    "Drawing pad. Arrow keys move the pen, space lifts or lowers it.");
  const tool = { name: "draw", radius: Math.max(0.8, Math.max(height, width) / 22), colour: [1, 1, 1] };
  const pen = { x: Math.floor(width / 2), y: Math.floor(height / 2), down: false, keys: false };
  let last = null;

  function repaint() {
    const context = canvas.getContext("2d");
    const small = new OffscreenCanvas(width, height);
    const image = new ImageData(width, height);
    const missing = [];
    for (let i = 0; i < width * height; i += 1) {
      for (let c = 0; c < 3; c += 1) {
        const value = values[channels * i + (channels === 3 ? c : 0)];
        image.data[4 * i + c] = (255 * (value - low)) / (high - low);
      }
      if (Number.isNaN(values[channels * i])) missing.push(i);
      image.data[4 * i + 3] = 255;
    }
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    context.fillStyle = theme("--erased");
    for (const i of missing) {
      context.fillRect((i % width) * unit, Math.floor(i / width) * unit, unit, unit);
    }
    if (pen.keys && document.activeElement === canvas) {
      context.strokeStyle = pen.down ? theme("--mark") : theme("--accent");
      context.lineWidth = 2;
      context.strokeRect(pen.x * unit - 1, pen.y * unit - 1, unit + 2, unit + 2);
    }
  }

  function dab(x, y) {
    const reach = tool.name === "erase" ? 1.6 * tool.radius : tool.radius;
    for (let j = Math.floor(y - reach - 1); j <= y + reach + 1; j += 1) {
      for (let i = Math.floor(x - reach - 1); i <= x + reach + 1; i += 1) {
        if (i < 0 || j < 0 || i >= width || j >= height) continue;
        const cover = Math.min(1, Math.max(0, reach + 0.5 - Math.hypot(i + 0.5 - x, j + 0.5 - y)));
        if (cover > 0) touch(channels * (j * width + i), cover);
      }
    }
  }

  function touch(at, cover) {
    for (let c = 0; c < channels; c += 1) {
      const now = Number.isNaN(values[at + c]) ? low : values[at + c];
      if (tool.name === "erase") values[at + c] = cover > 0.5 ? NaN : values[at + c];
      else if (tool.name === "rub") values[at + c] = now + cover * (low - now);
      else {
        const ink = low + (high - low) * tool.colour[c];
        values[at + c] = channels === 1 ? Math.max(now, low + cover * (ink - low))
          : now + cover * (ink - now);
      }
    }
  }

  function stroke(x, y) {
    const from = last ?? [x, y];
    const steps = Math.max(1, Math.ceil(2 * Math.hypot(x - from[0], y - from[1])));
    for (let s = 1; s <= steps; s += 1) {
      dab(from[0] + ((x - from[0]) * s) / steps, from[1] + ((y - from[1]) * s) / steps);
    }
    last = [x, y];
    onNextFrame(repaint);
    onChange();
  }

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * width,
      ((event.clientY - box.top) / box.height) * height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pen.keys = false;
    last = null;
    stroke(...at(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons && last) stroke(...at(event));
  });
  canvas.addEventListener("pointerup", () => { last = null; });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === " ") {
      pen.down = !pen.down;
      last = null;
    } else if (event.key in moves) {
      const [dx, dy] = moves[event.key];
      pen.x = Math.min(width - 1, Math.max(0, pen.x + dx));
      pen.y = Math.min(height - 1, Math.max(0, pen.y + dy));
    } else return;
    event.preventDefault();
    pen.keys = true;
    if (pen.down) stroke(pen.x + 0.5, pen.y + 0.5);
    onNextFrame(repaint);
  });
  canvas.addEventListener("blur", repaint);
  repaint();

  return {
    canvas, tool, values, repaint,
    set(next) {
      values.set(next);
      repaint();
      onChange();
    },
    clear() {
      values.fill(low);
      repaint();
      onChange();
    },
    // Turn dark strokes on light paper into light strokes on dark.
    invert() {
      values.forEach((value, i) => { values[i] = low + high - value; });
      repaint();
      onChange();
    },
    // Move the centre of mass to the middle, as collections of digits do.
    centre() {
      let [mass, mx, my] = [0, 0, 0];
      for (let i = 0; i < width * height; i += 1) {
        const value = values[channels * i] - low || 0;
        mass += value;
        mx += value * (i % width);
        my += value * Math.floor(i / width);
      }
      if (!mass) return;
      const dx = Math.round((width - 1) / 2 - mx / mass);
      const dy = Math.round((height - 1) / 2 - my / mass);
      const before = values.slice();
      values.fill(low);
      for (let y = 0; y < height; y += 1) {
        for (let x = 0; x < width; x += 1) {
          const [fx, fy] = [x - dx, y - dy];
          if (fx < 0 || fy < 0 || fx >= width || fy >= height) continue;
          for (let c = 0; c < channels; c += 1) {
            values[channels * (y * width + x) + c] = before[channels * (fy * width + fx) + c];
          }
        }
      }
      repaint();
      onChange();
    },
  };
}

// A place to drop a file, which may be dropped anywhere on the page, or to choose one.
export function makeDropzone(content, label, accept, readFile) {
  const file = el("input", { type: "file", id: "file", accept,
    onchange: () => { readFile(file.files[0]); file.value = ""; } });
  const node = el("div", { class: "dropzone" }, content,
    el("p", { class: "inline" }, el("label", { for: "file" }, label), file));
  const listeners = {
    dragover: () => node.classList.add("over"),
    dragleave: (event) => { if (!event.relatedTarget) node.classList.remove("over"); },
    drop: (event) => {
      node.classList.remove("over");
      readFile(event.dataTransfer.files[0]);
    },
  };
  Object.entries(listeners).forEach(([kind, listener]) => addEventListener(kind, listener));
  return {
    node,
    stop: () => Object.entries(listeners).forEach(([kind, listener]) => removeEventListener(kind, listener)),
  };
}

// Read an image file into red, green, blue and opacity, in its own size or another; clear parts are black.
export async function readPixels(file, size) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  } catch {
    throw new Error(`${file.name} is not an image that this browser can read: give a PNG or JPEG file.`);
  }
  const [height, width] = size ?? [bitmap.height, bitmap.width];
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "black";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return { data: context.getImageData(0, 0, width, height).data, height, width };
}

// Read an image file into the pixels and values of the model.
export async function readImage(file) {
  const { shape, low, high } = getDisplay();
  const [height, width] = shape;
  const channels = shape[2] ?? 1;
  const { data } = await readPixels(file, [height, width]);
  const values = new Float64Array(height * width * channels);
  for (let i = 0; i < height * width; i += 1) {
    const [r, g, b] = data.subarray(4 * i, 4 * i + 3);
    const shares = channels === 3 ? [r, g, b] : [0.299 * r + 0.587 * g + 0.114 * b];
    shares.forEach((v, c) => { values[channels * i + c] = low + ((high - low) * v) / 255; });
  }
  return values;
}

// Make a form for a row of numbers; `onChange` is called after every change.
export function makeForm(model, onChange) {
  const d = model.facts.features;
  return d <= MAX_FIELDS ? fields(model, d, onChange) : paste(d, onChange);
}

function fields(model, d, onChange) {
  const inputs = Array.from({ length: d }, (_, j) => el("input", {
    type: "number", step: "any", id: `value-${j}`, oninput: onChange,
  }));
  let shown = [];
  const body = inputs.map((input, j) => el("label", { for: `value-${j}` },
    el("span", {}, nameOfColumn(j)), input));
  return {
    node: el("div", { class: "fields" }, ...body),
    set(values) {
      shown = formatValues(values);
      inputs.forEach((input, j) => { input.value = shown[j].text; });
      onChange();
    },
    get: () => Float64Array.from(inputs, (input, j) => parseCell(input.value, shown[j])),
  };
}

function paste(d, onChange) {
  const area = el("textarea", { rows: 6, id: "values", spellcheck: false, oninput: onChange });
  let shown = [];
  return {
    node: el("div", {}, el("label", { for: "values" },
      `${d.toLocaleString("en")} numbers, split by commas, spaces or lines`), area),
    set(values) {
      shown = formatValues(values);
      area.value = shown.map(({ text }) => text).join(", ");
      onChange();
    },
    get() {
      const cells = area.value.trim().split(area.value.includes(",") ? /\s*,\s*/ : /[\s;]+/);
      if (cells.length !== d) throw new Error(`A row of this model has ${d} values, not ${cells.length}.`);
      return Float64Array.from(cells, (cell, j) => parseCell(cell, shown[j]));
    },
  };
}

// Show six digits, and keep the exact value for the computation.
function formatValues(values) {
  return Array.from(values, (value) => (
    { value, text: Number.isNaN(value) ? "" : String(Number(value.toPrecision(6))) }));
}

function parseCell(text, shown) {
  return text.trim() === shown?.text ? shown.value : parseNumber(text);
}

function parseNumber(cell) {
  const text = cell.trim();
  if (text === "" || /^(nan|na|null)$/i.test(text)) return NaN;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error(`"${text.slice(0, 30)}" is not a number.`);
  return value;
}

// Read the first row of a CSV file; with names in the first line, columns may be in any order.
export async function readCsv(file, model) {
  if (file.size > 20e6) throw new Error(`${file.name} is too large for one row: give a file with that row alone.`);
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
  return Float64Array.from(cells, parseNumber);
}
