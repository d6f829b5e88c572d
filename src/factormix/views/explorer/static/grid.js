// Many small pictures on one canvas, each in a frame whose colour is a number.

import { drawProfile, fromTile, getLook, isImage } from "./pictures.js";
import { theme } from "./colours.js";

// Draw tiles, (n, ...) in 256 steps, in cells of `size` CSS pixels, `cols` in a row.
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
  const atlas = isImage() ? atlasOf(tiles) : null;
  const length = tiles.length / tiles.shape[0];
  const { low, high } = getLook();
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
  return { step: step / ratio, tall: tall / ratio, gap: gap / ratio, rows, cols, n };
}

// The height of a cell over its width.
export function aspect() {
  const { shape } = getLook();
  return isImage() ? Math.min(2, Math.max(0.5, shape[0] / shape[1])) : 0.72;
}

const atlases = new WeakMap();

// All tiles in one hidden canvas, from which each is copied at any size.
function atlasOf(tiles) {
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
      const to = 4 * ((top + Math.floor(i / width)) * canvas.width + left + (i % width));
      const from = channels * (k * height * width + i);
      image.data[to] = tiles[from];
      image.data[to + 1] = tiles[from + (channels === 3 ? 1 : 0)];
      image.data[to + 2] = tiles[from + (channels === 3 ? 2 : 0)];
      image.data[to + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  const atlas = {
    canvas, width, height, at: (k) => [(k % cols) * width, Math.floor(k / cols) * height],
  };
  atlases.set(tiles, atlas);
  return atlas;
}
