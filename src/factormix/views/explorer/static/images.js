// Whole images: samples at every depth, and an image with its surprise and erased regions filled.

import { countOf, el, fill, number, problem, section } from "./dom.js";
import { askUntilReady } from "./api.js";
import { makeDropzone, makePad, readPixels } from "./inputs.js";
import { drawGrid, legendBar, onThemeChange, picture, sequence, setDisplay } from "./pictures.js";
import { TEXTS } from "./texts.js";

const CELL = 140;
// The samples that were shown last appear again when the view does.
const asked = { height: 32, width: 32, seed: 1 };

const count = (value) => Math.round(value).toLocaleString("en");
const newSeed = () => 1 + Math.floor(1e6 * Math.random());

// What the header says of the model.
export function describeImages({ depth, kinds, scales, channels }) {
  const colours = { 1: "grey images", 3: "colour images" }[channels] ?? `images of ${channels} channels`;
  return `${colours}, depth ${depth}, ${countOf(kinds, "kind")} in ${countOf(scales, "scale")}`;
}

export async function showSamples(root, context, [], signal) {
  const { depth, max_side: most, size: only } = context.model.facts.images;
  if (only) [asked.height, asked.width] = only;
  const status = el("p", { class: "soft", role: "status" });
  const gallery = el("div");
  const side = (name) => el("input", { type: "number", id: name, min: 1, max: most, step: 1,
    value: asked[name], required: true, disabled: Boolean(only) });
  const [height, width] = [side("height"), side("width")];
  const again = el("button", { id: "again" }, "Draw again");
  let drawn = null;

  async function draw() {
    again.disabled = true;
    try {
      const path = `images/samples?height=${asked.height}&width=${asked.width}&seed=${asked.seed}`;
      drawn = await askUntilReady(path, signal, (text) => { status.textContent = text; });
      status.textContent = "";
      paint();
    } catch (error) {
      if (!signal.aborted) fill(status, problem(error));
    }
    again.disabled = false;
  }

  function paint() {
    if (!drawn) return;
    const cols = gallery.clientWidth < 720 ? 4 : 8;
    const size = Math.min(CELL, Math.floor(gallery.clientWidth / cols));
    fill(gallery, Array.from({ length: depth + 1 }, (_, i) => {
      const tiles = drawn[`depth${i}`];
      const [n, h, w] = tiles.shape;
      // Thumbnails of other proportions, because a side is odd, have the frames of the images.
      setDisplay({ facts: { ...context.model.facts, shape: [asked.height, asked.width] } });
      const canvas = el("canvas", { class: "map still", role: "img" });
      canvas.setAttribute("aria-label", `${countOf(n, "sample")} of ${h} by ${w} pixels`);
      drawGrid(canvas, { tiles, order: Array.from({ length: n }, (_, k) => k), cols, size });
      return section(`${depth ? `Depth ${i}: ` : ""}${h} × ${w} pixels`,
        !depth ? TEXTS.raster : i ? TEXTS.finer : only ? TEXTS.wholeThumbnails : TEXTS.thumbnails, canvas);
    }));
  }

  fill(root, el("h1", {}, "Samples"), el("p", { class: "lead" }, only ? TEXTS.oneSizeSamples : TEXTS.imageSamples),
    el("form", { class: "inline", onsubmit: (event) => {
      event.preventDefault();
      Object.assign(asked, { height: Number(height.value), width: Number(width.value), seed: newSeed() });
      draw();
    } }, el("label", {}, "Height ", height), el("label", {}, "Width ", width), again),
    status, gallery);
  await draw();
  // A model in training has new samples.
  context.onVersion = draw;
  addEventListener("resize", paint);
  const stopWatching = onThemeChange(paint);
  return () => {
    context.onVersion = null;
    removeEventListener("resize", paint);
    stopWatching();
  };
}

export async function showImage(root, context, [], signal) {
  const { facts } = context.model;
  const { depth, channels, max_pixels: most, max_erased: mostErased, eight_bit: whole, size: only } = facts.images;
  const title = el("h1", {}, "Image");
  if (channels !== 1 && channels !== 3) {
    fill(root, title, problem({ message: `The model has images of ${channels} channels, and this page reads`
      + " grey and colour images." }));
    return null;
  }
  const status = el("div", { role: "status" });
  const shown = el("div");
  let pad = null;
  // Ends the requests about an image when another one follows.
  let current = new AbortController();

  async function readFile(file) {
    if (!file) return;
    try {
      const { data, height, width } = await readPixels(file);
      if (height * width > most) {
        throw new Error(`${file.name} has ${height} × ${width} pixels, and at most ${count(most)}`
          + " are read: make it smaller, or cut a part out.");
      }
      current.abort();
      current = new AbortController();
      fill(status);
      show(file.name, data, height, width, current.signal);
    } catch (error) {
      fill(status, problem(error));
    }
  }

  // Send an image until the answer is there; a waiting message or an error is shown at a place.
  async function request(path, body, place, ended) {
    try {
      const answer = await askUntilReady(`images/${path}`, ended, (text) => { place.textContent = text; }, body);
      fill(place);
      return answer;
    } catch (error) {
      if (!ended.aborted) fill(place, problem(error));
      return null;
    }
  }

  async function show(name, data, height, width, ended) {
    const [pixels, converted] = takeChannels(data, channels);
    const size = `height=${height}&width=${width}`;
    const { low, high } = facts;
    const setShape = (h, w) => setDisplay({ facts: { ...facts, shape: channels === 3 ? [h, w, 3] : [h, w] } });
    setShape(height, width);
    const values = Float64Array.from(pixels, (v) => (whole ? v : low + ((high - low) * v) / 255));
    pad = makePad(() => {});
    pad.tool.name = "erase";
    pad.tool.radius = Math.min(pad.tool.radius, 6);
    pad.set(values);
    const brush = el("input", { type: "range", id: "pen", min: 0.5, max: 12, step: 0.1,
      value: pad.tool.radius, oninput: () => { pad.tool.radius = Number(brush.value); } });
    const map = el("figure", {}, el("p", { class: "soft", role: "status" }, "Computing the surprise …"));
    const progress = el("div", { class: "soft", role: "status" });
    const found = el("div");

    async function fillErased() {
      const body = new Uint8Array(pixels.length + height * width);
      body.set(pixels);
      for (let i = 0; i < height * width; i += 1) body[pixels.length + i] = Number.isNaN(pad.values[channels * i]);
      button.disabled = true;
      progress.textContent = "Filling …";
      const answer = await request(`fill?${size}&seed=${newSeed()}`, body, progress, ended);
      button.disabled = false;
      if (!answer) return;
      const [n, h, w] = answer.draws.shape;
      const length = answer.mean.length;
      setShape(h, w);
      const one = (from, caption) => el("figure", {}, picture(from, { size: 200, label: caption }),
        el("figcaption", {}, caption));
      fill(found, el("div", { class: "figures" }, one(answer.mean, `Mean of ${n} draws`),
        ...Array.from({ length: n }, (_, i) => one(
          answer.draws.subarray(i * length, (i + 1) * length), `Draw ${i + 1}`))));
    }

    const button = el("button", { id: "fill", onclick: fillErased }, "Fill");
    fill(shown, el("h2", {}, `${name}, ${height} × ${width} pixels${converted ? ", converted to grey" : ""}`),
      el("div", { class: "pair" }, el("figure", {}, pad.canvas, el("figcaption", { class: "soft" }, "The image")), map),
      section("Erase and fill", `${TEXTS.erase} At most ${count(mostErased)} pixels are filled at once.`,
        el("div", { class: "inline" }, el("label", { for: "pen" }, "Brush "), brush, button,
          el("button", { onclick: () => pad.set(values) }, "Restore")), progress, found));
    const answer = await request(`surprise?${size}`, pixels, map.firstChild, ended);
    setShape(height, width);
    if (answer) drawSurprise(map, answer, { height, width });
  }

  function drawSurprise(map, { facts: { bits, bits_per_dim: perDim, low, high, most: highest }, bits: values }, { height, width }) {
    const canvas = picture(values, { mode: "sequence", limit: [low, high],
      label: `Surprise, ${number(perDim, 3)} bits per dimension` });
    canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      const x = Math.min(width - 1, Math.floor((offsetX / canvas.clientWidth) * width));
      const y = Math.min(height - 1, Math.floor((offsetY / canvas.clientHeight) * height));
      canvas.title = `row ${y}, column ${x}: ${number(values[y * width + x], 3)} bits`;
    });
    fill(map, canvas, el("figcaption", { class: "soft" }, depth ? `${TEXTS.surprise} ${TEXTS.shared}` : TEXTS.surprise,
      legendBar(sequence(), `${number(low, 3)} bits`, `${high < highest ? "≥ " : ""}${number(high, 3)} bits`),
      el("p", { class: "total" }, el("b", {}, `${number(perDim, 4)} bits per dimension`),
        `, ${count(bits)} bits in all${whole ? `; without a model ${count(8 * height * width * channels)}` : ""}.`)));
  }

  const sizes = only ? TEXTS.oneSize.replace("SIZE", only.join(" × "))
    : TEXTS.anyImage.replace("LIMIT", count(most));
  const zone = makeDropzone([status, el("p", {}, sizes)], "Drop an image here, or choose one: ", "image/*", readFile);
  fill(root, title, el("p", { class: "lead" }, TEXTS.image), zone.node, shown);
  const stopWatching = onThemeChange(() => pad?.repaint());
  signal.addEventListener("abort", () => current.abort());
  return () => {
    zone.stop();
    stopWatching();
  };
}

// The 8-bit values of a grey or colour image, from red, green, blue and opacity, and whether colours were lost.
function takeChannels(data, channels) {
  const n = data.length / 4;
  const pixels = new Uint8Array(n * channels);
  let converted = false;
  for (let i = 0; i < n; i += 1) {
    const [r, g, b] = data.subarray(4 * i, 4 * i + 3);
    if (channels === 3) pixels.set([r, g, b], 3 * i);
    else pixels[i] = Math.round(0.299 * r + 0.587 * g + 0.114 * b);
    converted ||= channels === 1 && (r !== g || g !== b);
  }
  return [pixels, converted];
}
