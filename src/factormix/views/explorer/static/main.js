// The entry point: shows the view that the address names, and polls the state of the model.

import { countOf, el, problem } from "./dom.js";
import { ask, fetchState } from "./api.js";
import { setDisplay } from "./pictures.js";
import { showMap } from "./map.js";
import { showComponent } from "./component.js";
import { showData, showRow } from "./data.js";
import { showText } from "./text.js";
import { showTry } from "./try.js";
import { showTraining } from "./training.js";
import { describeImages, showImage, showSamples } from "./images.js";

const VIEWS = {
  map: showMap, component: showComponent, data: showData, row: showRow, try: showTry,
  training: showTraining, text: showText, samples: showSamples, image: showImage,
};
// The views of a model of whole images, the first of which is shown first; a model of rows has the others.
const IMAGE_VIEWS = ["samples", "image", "training"];
const ROW_VIEWS = ["map", "component", "data", "row", "text", "try", "training"];
const TABS = { row: "data" };
const POLL_MILLISECONDS = 1000;
const CHANGED = "There is a newer model.";

const root = document.querySelector("#view");
const notice = document.querySelector("#notice");
// Shared by all views: the model, the state of the server, and the share of outliers.
const context = { share: 0.01, model: null, state: null, onVersion: null, onTick: null, onScored: null };
context.reload = reload;
let leave = null;
let running = new AbortController();
let stale = false;

function views() {
  return context.model?.facts.images ? IMAGE_VIEWS : ROW_VIEWS;
}

async function loadModel() {
  context.model = await ask("model");
  const { facts } = context.model;
  setDisplay(context.model);
  for (const tab of document.querySelectorAll("#tabs a")) {
    tab.hidden = !views().includes(tab.hash.slice(2)) || (tab.hash === "#/text" && !facts.text);
  }
  document.title = `${facts.path} – factormix explorer`;
  document.querySelector("#model-name").textContent = facts.path;
  document.querySelector("#model-facts").textContent = facts.images ? describeImages(facts.images)
    : `${countOf(facts.components, "component")}, ${countOf(facts.factors, "factor")} each, `
    + countOf(facts.features, "feature");
}

async function show() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  leave?.();
  leave = null;
  if (stale) notify(null);
  stale = false;
  let [, name, ...rest] = location.hash.split("/");
  if (!views().includes(name)) [name] = views();
  // Before training first saves a model, only the training view has something to show.
  if (!context.model && name !== "training") name = "training";
  for (const tab of document.querySelectorAll("#tabs a")) {
    const here = tab.hash === `#/${TABS[name] ?? name}`;
    if (here) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  root.dataset.view = "";
  try {
    const cleanup = await VIEWS[name](root, context, rest, signal);
    if (signal.aborted) cleanup?.();
    else {
      leave = cleanup;
      root.dataset.view = name;
    }
  } catch (error) {
    if (signal.aborted) return;
    root.replaceChildren(el("h1", {}, "This cannot be shown"), problem(error),
      el("p", {}, el("a", { href: `#/${views()[0]}` }, `To the ${views()[0]}`)));
    root.dataset.view = "problem";
  }
}

// Show the same view again, and keep the keyboard focus where it is.
async function reload() {
  const node = document.activeElement;
  let place = null;
  if (root.contains(node) && node !== root) {
    place = node.id ? `#${node.id}` : node.matches("canvas.map") ? "canvas.map"
      : node.name ? `[name="${node.name}"][value="${node.value}"]` : null;
  }
  await show();
  if (place) root.querySelector(place)?.focus({ preventScroll: true });
}

async function poll() {
  if (document.hidden && context.model) return;
  let now;
  try {
    now = await fetchState();
  } catch (error) {
    notify(error.message);
    return;
  }
  context.state = now;
  notify(now.problem ?? (stale ? CHANGED : null));
  // Compared with the model that is loaded, so that a request that failed is made again.
  if (now.version > 0 && now.version !== context.model?.facts.version) {
    const first = !context.model;
    await loadModel();
    const view = root.dataset.view;
    // Show the view that was asked for before there was a model.
    const wanted = location.hash.split("/")[1];
    if (first && wanted && wanted !== "training") await show();
    else if (context.onVersion) context.onVersion();
    else if (view === "map" || view === "data") await reload();
    else {
      stale = true;
      notify(CHANGED);
    }
  } else if (context.onScored && !context.scored && now.data && now.data.done === now.data.rows) {
    context.scored = true;
    await context.onScored();
  }
  context.onTick?.(now);
}

function notify(text) {
  // A screen reader should not read the same text again and again.
  if (notice.dataset.text === (text ?? "")) return;
  notice.dataset.text = text ?? "";
  notice.replaceChildren(text ?? "");
  if (text === CHANGED) notice.append(" ", el("button", { onclick: reload }, "Show the newest model"));
  notice.hidden = !text;
}

async function start() {
  try {
    context.state = await fetchState();
    if (context.state.version > 0) await loadModel();
    await show();
  } catch (error) {
    root.replaceChildren(problem(error));
  }
  addEventListener("hashchange", async () => {
    await show();
    scrollTo(0, 0);
    root.focus({ preventScroll: true });
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    // The address names the view: it must not change.
    event.preventDefault();
    root.focus();
  });
  // A file dropped outside the drop zone must not replace the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
  setInterval(() => poll().catch(() => {}), POLL_MILLISECONDS);
}

start();
