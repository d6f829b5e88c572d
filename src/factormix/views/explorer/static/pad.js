// A pad to draw an image on, with mouse, finger or keys, in the pixels and values of the model.

import { el, soon } from "./dom.js";
import { getLook } from "./pictures.js";
import { theme } from "./colours.js";

const LARGEST = 300;

// Make a pad; `changed` is called after every stroke. Erased pixels have the value NaN.
export function drawingPad(changed) {
  const { shape, low, high } = getLook();
  const [height, width] = shape;
  const channels = shape[2] ?? 1;
  const values = new Float64Array(height * width * channels).fill(low);
  const unit = Math.max(1, Math.floor(LARGEST / Math.max(height, width)));
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
    soon(repaint);
    changed();
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
    soon(repaint);
  });
  canvas.addEventListener("blur", repaint);
  repaint();

  return {
    canvas, tool, values, repaint,
    set(next) {
      values.set(next);
      repaint();
      changed();
    },
    clear() {
      values.fill(low);
      repaint();
      changed();
    },
    // Dark on light becomes light on dark: photographs of digits are the other way round.
    invert() {
      values.forEach((value, i) => { values[i] = low + high - value; });
      repaint();
      changed();
    },
    // Move what is drawn so that its centre of mass is the middle, as collections of digits do.
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
      changed();
    },
  };
}

// Read an image file into the pixels and values of the model, in the browser.
export async function imageValues(file) {
  const { shape, low, high } = getLook();
  const [height, width] = shape;
  const channels = shape[2] ?? 1;
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is no image that this browser can read: give a PNG or JPEG file.`);
  }
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "black";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const values = new Float64Array(height * width * channels);
  for (let i = 0; i < height * width; i += 1) {
    const [r, g, b] = data.subarray(4 * i, 4 * i + 3);
    const shares = channels === 3 ? [r, g, b] : [0.299 * r + 0.587 * g + 0.114 * b];
    shares.forEach((v, c) => { values[channels * i + c] = low + ((high - low) * v) / 255; });
  }
  return values;
}
