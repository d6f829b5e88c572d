// Where to begin: the views by their address, and an eye on the model.

import { counted, el, problem } from "./dom.js";
import { ask, state } from "./api.js";
import { setLook } from "./pictures.js";
import * as map from "./map.js";
import * as component from "./component.js";
import * as data from "./data.js";
import * as row from "./row.js";
import * as attempt from "./try.js";
import * as training from "./training.js";

const VIEWS = { map, component, data, row, try: attempt, training };
const TABS = { row: "data" };
const LOOK_EVERY = 1000;
const CHANGED = "The model has changed since.";

const root = document.querySelector("#view");
const notice = document.querySelector("#notice");
// What views share: the model, the state of the server, and which rows are called outliers.
const context = { share: 0.01, model: null, state: null, onVersion: null, onTick: null, onScored: null };
context.again = () => again();
let leave = null;
let running = new AbortController();
let stale = false;

async function loadModel() {
  context.model = await ask("model");
  const { facts } = context.model;
  setLook(context.model);
  document.title = `${facts.path} – factormix explorer`;
  document.querySelector("#model-name").textContent = facts.path;
  document.querySelector("#model-facts").textContent =
    `${counted(facts.components, "component")}, ${counted(facts.factors, "factor")} each, `
    + counted(facts.features, "feature");
}

async function show() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  leave?.();
  leave = null;
  if (stale) say(null);
  stale = false;
  let [, name, ...rest] = location.hash.split("/");
  if (!(name in VIEWS)) name = "map";
  // Before the first save of a training there is nothing but the training to see.
  if (!context.model && name !== "training") name = "training";
  for (const tab of document.querySelectorAll("#tabs a")) {
    const here = tab.hash === `#/${TABS[name] ?? name}`;
    if (here) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  root.dataset.view = "";
  try {
    const cleanup = await VIEWS[name].show(root, context, rest, signal);
    if (signal.aborted) cleanup?.();
    else {
      leave = cleanup;
      root.dataset.view = name;
    }
  } catch (error) {
    if (signal.aborted) return;
    root.replaceChildren(el("h1", {}, "This cannot be shown"), problem(error),
      el("p", {}, el("a", { href: "#/map" }, "To the map")));
    root.dataset.view = "problem";
  }
}

// Show the same view anew, and let who uses the keyboard go on where they were.
async function again() {
  const node = document.activeElement;
  let place = null;
  if (root.contains(node) && node !== root) {
    place = node.id ? `#${node.id}` : node.matches("canvas.map") ? "canvas.map"
      : node.name ? `[name="${node.name}"][value="${node.value}"]` : null;
  }
  await show();
  if (place) root.querySelector(place)?.focus({ preventScroll: true });
}

async function look() {
  if (document.hidden && context.model) return;
  let now;
  try {
    now = await state();
  } catch (error) {
    say(error.message);
    return;
  }
  const before = context.state;
  context.state = now;
  say(now.problem ?? (stale ? CHANGED : null));
  if (now.version !== before?.version && now.version > 0) {
    const first = !context.model;
    await loadModel();
    const view = root.dataset.view;
    // Who has asked for another view gets it now; who has not goes on watching the training.
    const wanted = location.hash.split("/")[1];
    if (first && wanted && wanted !== "training") await show();
    else if (context.onVersion) context.onVersion();
    else if (view === "map" || view === "data") await again();
    else if (before) {
      stale = true;
      say(CHANGED);
    }
  } else if (context.onScored && !context.scored && now.data && now.data.done === now.data.rows) {
    context.scored = true;
    await context.onScored();
  }
  context.onTick?.(now);
}

function say(text) {
  // Who reads by ear is told what is new, and not the same again and again.
  if (notice.dataset.said === (text ?? "")) return;
  notice.dataset.said = text ?? "";
  notice.replaceChildren(text ?? "");
  if (text === CHANGED) notice.append(" ", el("button", { onclick: again }, "Show the newest"));
  notice.hidden = !text;
}

async function begin() {
  try {
    context.state = await state();
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
    // The address tells the view: it must not change.
    event.preventDefault();
    root.focus();
  });
  // A file that misses its place must not take the page away.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
  setInterval(() => look().catch(() => {}), LOOK_EVERY);
}

begin();
