// Rows as pictures: images pixel by pixel, other rows as bars or a line around the average.

import { el, number } from "./dom.js";
import { sequence, signed, theme } from "./colours.js";

let look = { kind: "line", shape: [1], low: -1, high: 1 };

// Take what `api/model` says about how rows are drawn.
export function setLook({ facts, centre, scale }) {
  look = { kind: facts.kind, shape: facts.shape, low: facts.low, high: facts.high,
    names: facts.feature_names, centre, scale };
}

export function isImage() {
  return look.kind === "image";
}

export function getLook() {
  return look;
}

// Make a canvas that shows a row; `size` is its height or width in CSS pixels, the larger one.
export function picture(values, { size = 96, mode = "value", limit, label = "" } = {}) {
  const canvas = el("canvas", { class: "picture", role: "img" });
  canvas.setAttribute("aria-label", label);
  const [height, width] = isImage() ? look.shape : [0.62, 1];
  const unit = size / Math.max(height, width);
  canvas.style.width = `${Math.round(unit * width)}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  if (isImage()) {
    canvas.width = look.shape[1];
    canvas.height = look.shape[0];
  } else {
    const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
    canvas.width = Math.round(unit * width * ratio);
    canvas.height = Math.round(unit * height * ratio);
  }
  if (look.kind === "bars") {
    canvas.addEventListener("pointermove", ({ offsetX }) => {
      const j = Math.floor((offsetX / canvas.clientWidth) * look.shape[0]);
      if (j >= 0 && j < look.shape[0]) canvas.title = spoken(canvas.values, j, mode);
    });
  }
  repaint(canvas, values, { mode, limit });
  return canvas;
}

// What a bar stands for, in words.
function spoken(values, j, mode) {
  const name = look.names?.[j] ?? `feature ${j}`;
  if (mode !== "value") return name;
  const value = look.centre[j] + look.scale[j] * values[j];
  return `${name}: ${Number.isNaN(value) ? "missing" : number(value)}`;
}

// The limit within which all of some shown values lie, so that rows side by side have one scale.
export function reach(values) {
  return Math.max(look.high, Math.min(largest(values), 6 * look.high));
}

// Draw a row anew on a canvas that `picture` made.
export function repaint(canvas, values, { mode = "value", limit } = {}) {
  canvas.values = values;
  if (isImage()) paintImage(canvas, values, mode, limit);
  else paintProfile(canvas, values, mode, limit);
}

function paintImage(canvas, values, mode, limit) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const image = context.createImageData(width, height);
  fill(image.data, values, look.shape.length === 3 ? 3 : 1, mode, limit);
  context.putImageData(image, 0, 0);
}

function fill(pixels, values, channels, mode, limit) {
  const [low, high] = limits(values, mode, limit);
  const factor = 255 / (high - low || 1);
  const colours = mode === "signed" ? signed() : mode === "sequence" ? sequence() : null;
  for (let i = 0, n = values.length / channels; i < n; i += 1) {
    if (Number.isNaN(values[channels * i])) {
      // Nothing is known here.
      [pixels[4 * i], pixels[4 * i + 1], pixels[4 * i + 2]] = [200, 110, 180];
    } else if (channels === 3 && !colours) {
      for (let c = 0; c < 3; c += 1) pixels[4 * i + c] = (values[3 * i + c] - low) * factor;
    } else {
      // A coloured scale has room for one number: the mean of the channels.
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
  return [look.low, look.high];
}

export function largest(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value) || 0);
  return most || 1;
}

// Shown values from the 256 steps of a tile.
export function fromTile(tile) {
  return Float32Array.from(tile, (step) => look.low + (step * (look.high - look.low)) / 255);
}

function paintProfile(canvas, values, mode, limit) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  let [low, high] = limits(values, mode, limit);
  if (mode === "value") {
    // A row may lie far beyond all means: it is drawn smaller, not cut off.
    high = limit ?? reach(values);
    low = -high;
  }
  drawProfile(context, values, { x: 0, y: 0, width, height }, [low, high], mode);
}

// Draw values as bars, if they are few, or as a line, into a box of a canvas.
export function drawProfile(context, values, box, [low, high], mode = "value") {
  const { x, y, width, height } = box;
  const n = values.length;
  const at = (value) => y + height * (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low));
  const ground = at(mode === "sequence" ? low : 0);
  context.fillStyle = theme("--line");
  context.fillRect(x, ground - 0.5, width, 1);
  if (look.kind === "bars") {
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
      // Nothing is known here: the line has a gap.
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
