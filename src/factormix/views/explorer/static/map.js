// The map: every component as a picture, in frames coloured by weight, likelihood or outliers.

import { el, fill, number, onNextFrame, percent } from "./dom.js";
import { ask } from "./api.js";
import { findStandouts, namedPicture } from "./charts.js";
import {
  aspect, colourOf, drawGrid, fromTile, isImage, legendBar, nameOfColumn, onThemeChange, sequence, setPixel,
} from "./pictures.js";
import { TEXTS } from "./texts.js";

const MODES = [
  { key: "weights", title: "Weight", word: "weight", text: percent },
  { key: "likelihood", title: "Likelihood", word: "likelihood", text: (v) => number(v) },
  { key: "outliers", title: "Outlier share", word: "outliers", text: percent },
];
let chosen = "weights";
let current = 0;
let zoomed = null;

export async function showMap(root, context, [], signal) {
  const ratio = measureRatio(root);
  const query = () => `map?share=${context.share}&ratio=${ratio}`;
  let map = await ask(query(), signal);
  const n = map.order.length;
  const length = map.tiles.length / n;
  current = Math.min(current, n - 1);
  let [size, layout] = [0, null];
  const canvas = el("canvas", { tabIndex: 0, class: "map", role: "application" });
  canvas.setAttribute("aria-label",
    `Map of ${n} components. Arrow keys move, Enter opens a component.`);
  const holder = el("div", { class: "map-holder" }, canvas, el("div", { class: "cursor" }));
  const cursor = holder.lastChild;
  const scroller = el("div", { class: "map-scroll" }, holder);
  const legend = el("div");
  const card = el("aside", { class: "card preview" });
  card.setAttribute("aria-live", "polite");
  const sentence = el("p", { class: "soft mode-word" });
  const zoom = el("input", { type: "range", min: 6, max: 96, step: 1, id: "zoom" });

  function values() {
    return map[chosen] ?? map.weights;
  }

  function range() {
    const known = Array.from(values()).filter(Number.isFinite).sort((a, b) => a - b);
    // One extreme component must not turn all others into one colour.
    const low = chosen === "likelihood" ? known[Math.floor(0.05 * known.length)] : 0;
    const high = known[Math.ceil((n > 50 ? 0.98 : 1) * (known.length - 1))];
    return [low, high > low ? high : known.at(-1), known.at(-1)];
  }

  function draw() {
    const [low, high, most] = range();
    const colours = sequence();
    layout = drawGrid(canvas, {
      tiles: map.tiles, order: map.order, cols: map.facts.cols, size,
      frames: (k) => colourOf(colours, values()[k], low, high),
      dimmed: (k) => !map.used[k],
    });
    const mode = MODES.find((one) => one.key === chosen);
    fill(legend, legendBar(colours, mode.text(low), `${high < most ? "≥ " : ""}${mode.text(high)}`));
    sentence.textContent = TEXTS[mode.word];
    mark();
  }

  function mark() {
    const [x, y] = [current % layout.cols, Math.floor(current / layout.cols)];
    cursor.style.transform = `translate(${x * layout.step}px, ${y * layout.tall}px)`;
    cursor.style.width = `${layout.step - layout.gap}px`;
    cursor.style.height = `${layout.tall - layout.gap}px`;
    const k = map.order[current];
    const tile = map.tiles.subarray(k * length, (k + 1) * length);
    const facts = [["Weight", percent(map.weights[k])]];
    if (map.rows) facts.push([isImage() ? "Images" : "Rows", map.rows[k].toLocaleString("en")]);
    if (map.likelihood) facts.push(["Likelihood", number(map.likelihood[k])]);
    if (map.outliers) facts.push(["Outlier share", percent(map.outliers[k])]);
    card.replaceChildren(
      el("h2", {}, `Component ${k}`),
      tilePicture(map, tile),
      ...describeStandouts(context.model, tile),
      el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      map.used[k] ? "" : el("p", { class: "soft" }, "Not in use: it holds almost no data."),
      el("a", { class: "button", href: `#/component/${k}` }, "Open"),
    );
  }

  function move(cell) {
    if (cell < 0 || cell >= n) return;
    current = cell;
    mark();
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / layout.step);
    const y = Math.floor((event.clientY - box.top) / layout.tall);
    const cell = y * layout.cols + x;
    return x >= 0 && x < layout.cols && cell < n ? cell : -1;
  }

  // The name of the column whose bar, or point of the line, is under the pointer.
  function nameColumn(event, cell) {
    if (isImage() || cell < 0 || length !== context.model.facts.features) return "";
    const left = canvas.getBoundingClientRect().left + (cell % layout.cols) * layout.step;
    const wide = layout.step - layout.gap - 2 * layout.rim;
    const j = Math.floor((length * (event.clientX - left - layout.rim)) / wide);
    return j >= 0 && j < length ? nameOfColumn(j) : "";
  }

  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.cols, ArrowDown: layout.cols };
    if (event.key in steps) move(current + steps[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(n - 1);
    else if (event.key === "Enter" || event.key === " ") open();
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (event.pointerType === "mouse" && cell >= 0 && cell !== current) {
      current = cell;
      mark();
    }
    canvas.title = nameColumn(event, cell);
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell < 0) return;
    current = cell;
    open();
  });
  function open() {
    location.hash = `#/component/${map.order[current]}`;
  }

  const modes = el("fieldset", { class: "choice" }, el("legend", {}, "Colour of the frames"),
    ...MODES.map((mode) => el("label", {}, el("input", {
      type: "radio", name: "mode", value: mode.key, checked: mode.key === chosen,
      disabled: !map[mode.key],
      onchange: () => { chosen = mode.key; draw(); },
    }), mode.title)));
  if (!map[chosen]) {
    chosen = "weights";
    modes.querySelector("input").checked = true;
  }
  const hint = map.likelihood ? null : el("p", { class: "soft", id: "colour-hint" },
    context.state.data ? "Likelihood and outlier share become available when all rows are scored."
      : "Start with --data to colour by likelihood or outlier share.");
  zoom.addEventListener("input", () => {
    size = zoomed = Number(zoom.value);
    onNextFrame(draw);
  });

  fill(root, el("h1", {}, "Map of components"),
    el("p", { class: "lead" }, isImage() ? TEXTS.map : TEXTS.profileMap),
    el("div", { class: "toolbar" }, modes,
      el("label", { class: "zoom" }, "Size of the pictures ", zoom), legend),
    sentence, hint,
    el("div", { class: "with-side" }, scroller, card));

  // Make the pictures as large as fits into the window.
  function fit() {
    const across = (scroller.clientWidth - 8) / map.facts.cols;
    const high = mapHeight() / (map.facts.rows * aspect());
    // The canvas has at most 14 million pixels of the page. Many pictures scroll rather than shrink.
    const most = Math.max(8, Math.sqrt(14e6 / (n * aspect())));
    const fitting = Math.max(6, Math.min(most, across, Math.max(high, Math.min(across, 40))));
    const largest = Math.floor(Math.min(most, Math.max(fitting, n > 12 ? 128 : 300)));
    // A size that was chosen stays when the view is drawn again.
    size = Math.min(zoomed ?? Math.floor(fitting), largest);
    zoom.max = String(largest);
    zoom.value = String(size);
    draw();
  }
  fit();
  const onResize = () => onNextFrame(fit);
  addEventListener("resize", onResize);
  performance.mark("map drawn");
  context.scored = Boolean(map.likelihood);
  context.onScored = async () => {
    const now = await ask(query(), signal);
    if (now.facts.version !== map.facts.version || !now.likelihood) return;
    map = now;
    MODES.forEach((mode) => { modes.querySelector(`[value=${mode.key}]`).disabled = !map[mode.key]; });
    hint?.remove();
    draw();
  };
  const stopWatching = onThemeChange(draw);
  return () => {
    stopWatching();
    removeEventListener("resize", onResize);
    context.onScored = null;
  };
}

function mapHeight() {
  return Math.max(320, 0.72 * innerHeight);
}

// Measure the width of the map over its height, in pictures.
function measureRatio(root) {
  const { paddingLeft, paddingRight } = getComputedStyle(root);
  // The map has its own padding of 4 pixels, and in a wide window a card of 15rem and a gap beside it.
  const beside = matchMedia("(max-width: 46rem)").matches ? 8 : 8 + 16.25 * 16;
  const width = root.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) - beside;
  return ((Math.max(100, width) * aspect()) / mapHeight()).toFixed(2);
}

const NOTICEABLE = 0.3;

// Name the features by which a component of a table stands out.
function describeStandouts(model, tile) {
  if (isImage() || tile.length !== model.facts.features) return [];
  const { above, below } = findStandouts(fromTile(tile), NOTICEABLE);
  return [above && el("p", { class: "soft" }, `Above average: ${above}.`),
    below && el("p", { class: "soft" }, `Below average: ${below}.`)].filter(Boolean);
}

// Draw the picture of a component from its tile of the map.
function tilePicture(map, tile) {
  if (!isImage()) return namedPicture(fromTile(tile), { size: 200, label: "Centroid" });
  const [, height, width] = map.tiles.shape;
  const channels = map.tiles.shape[3] ?? 1;
  const canvas = el("canvas", { class: "picture", width, height });
  canvas.style.width = "160px";
  canvas.style.aspectRatio = `${width} / ${height}`;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i += 1) setPixel(image.data, i, tile, channels, i);
  context.putImageData(image, 0, 0);
  return canvas;
}
