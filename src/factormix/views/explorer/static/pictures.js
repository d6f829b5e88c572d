// Draw rows as pictures: images pixel by pixel, other rows as bars or a line around the average.

import { el, number } from "./dom.js";

let display = { kind: "line", shape: [1], low: -1, high: 1 };

// Set how rows are drawn from the answer of `api/model`.
export function setDisplay({ facts, centre, scale }) {
  display = { kind: facts.kind, shape: facts.shape, low: facts.low, high: facts.high,
    names: facts.feature_names, centre, scale };
}

export function isBars() {
  return display.kind === "bars";
}

export function isImage() {
  return display.kind === "image";
}

export function getDisplay() {
  return display;
}

// Make a canvas that shows a row; `size` is its larger side in CSS pixels.
export function picture(values, { size = 96, mode = "value", limit, label = "" } = {}) {
  const canvas = el("canvas", { class: "picture", role: "img" });
  canvas.setAttribute("aria-label", label);
  const [height, width] = isImage() ? display.shape : [0.62, 1];
  const unit = size / Math.max(height, width);
  canvas.style.width = `${Math.round(unit * width)}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  if (isImage()) {
    canvas.width = display.shape[1];
    canvas.height = display.shape[0];
  } else {
    const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
    canvas.width = Math.round(unit * width * ratio);
    canvas.height = Math.round(unit * height * ratio);
  }
  if (!isImage()) {
    canvas.addEventListener("pointermove", ({ offsetX }) => {
      const j = columnAt(canvas, offsetX);
      if (j >= 0) canvas.title = describeColumn(canvas.values, j, mode);
    });
  }
  repaint(canvas, values, { mode, limit });
  return canvas;
}

// The column whose bar, or point of the line, lies at a distance from the left; -1 for none.
function columnAt(canvas, offsetX) {
  const j = Math.floor((offsetX / canvas.clientWidth) * display.shape[0]);
  return j >= 0 && j < display.shape[0] ? j : -1;
}

export function nameOfColumn(j) {
  return display.names?.[j] ?? `feature ${j}`;
}

// Name a column, with its value in a picture of a row.
export function describeColumn(values, j, mode) {
  const name = nameOfColumn(j);
  if (mode !== "value") return name;
  const value = display.centre[j] + display.scale[j] * values[j];
  return `${name}: ${Number.isNaN(value) ? "missing" : number(value)}`;
}

// Put a line below a picture that names the column under the pointer, the finger or the arrow keys.
export function addReadout(canvas, mode = "value", hint = "") {
  if (isImage()) return canvas;
  const readout = el("output", { class: "soft readout" }, hint);
  let chosen = -1;
  const show = (j) => {
    if (j < 0) return;
    chosen = j;
    readout.textContent = describeColumn(canvas.values, j, mode);
  };
  for (const kind of ["pointermove", "pointerdown"]) {
    canvas.addEventListener(kind, ({ offsetX }) => show(columnAt(canvas, offsetX)));
  }
  canvas.tabIndex = 0;
  canvas.addEventListener("keydown", (event) => {
    const last = display.shape[0] - 1;
    const next = { ArrowLeft: Math.max(0, chosen - 1), ArrowRight: Math.min(last, chosen + 1),
      Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
  canvas.onRepaint = () => show(chosen);
  return el("div", {}, canvas, readout);
}

// The limit of a scale that rows side by side can share.
export function sharedLimit(values) {
  return Math.max(display.high, Math.min(largest(values), 6 * display.high));
}

// Draw another row on a canvas that `picture` made.
export function repaint(canvas, values, { mode = "value", limit } = {}) {
  canvas.values = values;
  if (isImage()) paintImage(canvas, values, mode, limit);
  else paintProfile(canvas, values, mode, limit);
  canvas.onRepaint?.();
}

function paintImage(canvas, values, mode, limit) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const image = context.createImageData(width, height);
  // A picture of one number for each pixel of a colour image is possible too.
  fillPixels(image.data, values, values.length === 3 * width * height ? 3 : 1, mode, limit);
  context.putImageData(image, 0, 0);
}

function fillPixels(pixels, values, channels, mode, limit) {
  const [low, high] = limits(values, mode, limit);
  const factor = 255 / (high - low || 1);
  const colours = mode === "signed" ? signed() : mode === "sequence" ? sequence() : null;
  for (let i = 0, n = values.length / channels; i < n; i += 1) {
    if (Number.isNaN(values[channels * i])) {
      // A missing value.
      [pixels[4 * i], pixels[4 * i + 1], pixels[4 * i + 2]] = [200, 110, 180];
    } else if (channels === 3 && !colours) {
      for (let c = 0; c < 3; c += 1) pixels[4 * i + c] = (values[3 * i + c] - low) * factor;
    } else {
      // A colour scale shows one number: the mean of the channels.
      let value = values[channels * i];
      if (channels === 3) value = (value + values[3 * i + 1] + values[3 * i + 2]) / 3;
      const step = Math.min(255, Math.max(0, Math.round((value - low) * factor)));
      const [r, g, b] = colours ? colours[step] : [step, step, step];
      pixels[4 * i] = r;
      pixels[4 * i + 1] = g;
      pixels[4 * i + 2] = b;
    }
    pixels[4 * i + 3] = 255;
  }
}

export function limits(values, mode, limit) {
  if (mode === "signed") {
    const most = limit ?? largest(values);
    return [-most, most];
  }
  if (mode === "sequence") {
    if (limit) return limit;
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }
  return [display.low, display.high];
}

// The limits between which a profile is drawn.
export function profileLimits(values, mode, limit) {
  if (mode !== "value") return limits(values, mode, limit);
  // A row far beyond all means is drawn smaller, not cut off.
  const high = limit ?? sharedLimit(values);
  return [-high, high];
}

export function largest(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value) || 0);
  return most || 1;
}

// Convert the 256 levels of a tile to shown values.
export function fromTile(tile) {
  return Float32Array.from(tile, (step) => display.low + (step * (display.high - display.low)) / 255);
}

function paintProfile(canvas, values, mode, limit) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  drawProfile(context, values, { x: 0, y: 0, width, height }, profileLimits(values, mode, limit), mode);
}

// Draw values as bars or as a line into a box of a canvas.
export function drawProfile(context, values, box, [low, high], mode = "value") {
  const { x, y, width, height } = box;
  const n = values.length;
  const at = (value) => y + height * (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low));
  const ground = at(mode === "sequence" ? low : 0);
  context.fillStyle = theme("--line");
  context.fillRect(x, ground - 0.5, width, 1);
  if (display.kind === "bars") {
    const step = width / n;
    for (let i = 0; i < n; i += 1) {
      const value = values[i];
      if (Number.isNaN(value)) continue;
      context.fillStyle = barColour(value, mode);
      const top = Math.min(at(value), ground);
      const size = Math.max(1, Math.abs(at(value) - ground));
      context.fillRect(x + i * step + 0.1 * step, top, Math.max(1, 0.8 * step), size);
    }
    return;
  }
  context.strokeStyle = mode === "sequence" ? theme("--third") : theme("--accent");
  context.lineWidth = Math.max(1, height / 90);
  context.beginPath();
  let broken = true;
  for (let i = 0; i < n; i += 1) {
    const place = x + ((i + 0.5) * width) / n;
    if (Number.isNaN(values[i])) {
      // A missing value leaves a gap in the line.
      broken = true;
      continue;
    }
    if (broken) context.moveTo(place, at(values[i]));
    else context.lineTo(place, at(values[i]));
    broken = false;
  }
  context.stroke();
}

function barColour(value, mode) {
  if (mode === "sequence") return theme("--third");
  return value < 0 ? theme("--below") : theme("--above");
}

// Draw tiles (n, ...) of 256 levels on one canvas, in framed cells of `size` CSS pixels.
export function drawGrid(canvas, { tiles, order, cols, size, frames, dimmed }) {
  const n = order.length;
  const rows = Math.ceil(n / cols);
  const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
  const step = Math.max(1, Math.round(size * ratio));
  const tall = Math.max(1, Math.round(step * aspect()));
  canvas.width = cols * step;
  canvas.height = rows * tall;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = step < tiles.shape[2];
  const gap = step >= 24 ? Math.min(4 * ratio, Math.max(1, Math.round(step / 28))) : step >= 8 ? 1 : 0;
  const rim = step >= 16 ? Math.min(7 * ratio, Math.max(2, Math.round(step / 14))) : step >= 8 ? 1 : 0;
  const atlas = isImage() ? makeAtlas(tiles) : null;
  const length = tiles.length / tiles.shape[0];
  const { low, high } = getDisplay();
  for (let cell = 0; cell < n; cell += 1) {
    const k = order[cell];
    const x = (cell % cols) * step;
    const y = Math.floor(cell / cols) * tall;
    context.fillStyle = frames ? frames(k) : theme("--line");
    context.fillRect(x, y, step - gap, tall - gap);
    const box = {
      x: x + rim, y: y + rim, width: step - gap - 2 * rim, height: tall - gap - 2 * rim,
    };
    context.globalAlpha = dimmed?.(k) ? 0.35 : 1;
    if (atlas) {
      const [sx, sy] = atlas.at(k);
      context.drawImage(atlas.canvas, sx, sy, atlas.width, atlas.height, box.x, box.y, box.width,
        box.height);
    } else {
      context.fillStyle = theme("--page");
      context.fillRect(box.x, box.y, box.width, box.height);
      const inner = { x: box.x + 1, y: box.y + 1, width: box.width - 2, height: box.height - 2 };
      const tile = fromTile(tiles.subarray(k * length, (k + 1) * length));
      drawProfile(context, tile, inner, [low, high]);
    }
    context.globalAlpha = 1;
  }
  return { step: step / ratio, tall: tall / ratio, gap: gap / ratio, rim: rim / ratio, rows, cols, n };
}

// The height of a cell over its width.
export function aspect() {
  const { shape } = getDisplay();
  return isImage() ? Math.min(2, Math.max(0.5, shape[0] / shape[1])) : 0.72;
}

// Copy grey or coloured pixel `from` of an array to pixel `to` of an RGBA image.
export function setPixel(rgba, to, values, channels, from) {
  for (let c = 0; c < 3; c += 1) {
    rgba[4 * to + c] = values[channels * from + (channels === 3 ? c : 0)];
  }
  rgba[4 * to + 3] = 255;
}

const atlases = new WeakMap();

// Draw all tiles on one hidden canvas, from which each is copied at any size.
function makeAtlas(tiles) {
  if (atlases.has(tiles)) return atlases.get(tiles);
  const [n, height, width] = tiles.shape;
  const channels = tiles.shape[3] ?? 1;
  const cols = Math.ceil(Math.sqrt(n));
  const canvas = new OffscreenCanvas(cols * width, Math.ceil(n / cols) * height);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let k = 0; k < n; k += 1) {
    const left = (k % cols) * width;
    const top = Math.floor(k / cols) * height;
    for (let i = 0; i < height * width; i += 1) {
      const to = (top + Math.floor(i / width)) * canvas.width + left + (i % width);
      const from = k * height * width + i;
      setPixel(image.data, to, tiles, channels, from);
    }
  }
  context.putImageData(image, 0, 0);
  const atlas = {
    canvas, width, height, at: (k) => [(k % cols) * width, Math.floor(k / cols) * height],
  };
  atlases.set(tiles, atlas);
  return atlas;
}

const SEQUENCE = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39",
  "#fde725"];
const LIGHT = ["#1f4e9c", "#5b8fd1", "#b4cdea", "#f4f4f2", "#f2c1a6", "#dd7350", "#a32622"];
const DARK = ["#8ab8ff", "#4d7fc4", "#2b456b", "#1b1f24", "#6e3524", "#d0603c", "#ffab8a"];

const dark = matchMedia("(prefers-color-scheme: dark)");

function table(stops) {
  const rgb = stops.map((text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (rgb.length - 1);
    const low = Math.min(Math.floor(place), rgb.length - 2);
    return rgb[low].map((value, c) => value + (place - low) * (rgb[low + 1][c] - value));
  });
}

const TABLES = { sequence: table(SEQUENCE), light: table(LIGHT), dark: table(DARK) };

export function sequence() {
  return TABLES.sequence;
}

export function signed() {
  return dark.matches ? TABLES.dark : TABLES.light;
}

export function css([r, g, b]) {
  return `rgb(${Math.round(r)} ${Math.round(g)} ${Math.round(b)})`;
}

// The CSS colour of a value between low and high.
export function colourOf(colours, value, low, high) {
  if (!Number.isFinite(value)) return theme("--line");
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return css(colours[Math.round(255 * Math.min(1, Math.max(0, share)))]);
}

// A bar of colours between the texts of its ends.
export function legendBar(colours, low, high) {
  const bar = el("span", { class: "ramp" });
  const stops = [0, 64, 128, 192, 255].map((i) => css(colours[i])).join(", ");
  bar.style.background = `linear-gradient(to right, ${stops})`;
  return el("div", { class: "legend-bar" }, el("span", {}, low), bar, el("span", {}, high));
}

export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function onThemeChange(action) {
  dark.addEventListener("change", action);
  return () => dark.removeEventListener("change", action);
}
