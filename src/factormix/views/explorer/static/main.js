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

const root = document.querySelector("#view");
const notice = document.querySelector("#notice");
// What views share: the model, the state of the server, and which rows are called outliers.
const context = { share: 0.01, model: null, state: null, onVersion: null, onTick: null };
let leave = null;
let running = new AbortController();

async function loadModel() {
  context.model = await ask("model");
  const { facts } = context.model;
  setLook(facts);
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
  say(now.problem);
  if (now.version !== before?.version && now.version > 0) {
    const first = !context.model;
    await loadModel();
    const view = root.dataset.view;
    if (first && before) await show();
    else if (context.onVersion) context.onVersion();
    else if (view === "map" || view === "data") await show();
    else if (before) say("The model has changed since: open the view again to see the newest.");
  } else if (root.dataset.view === "map" && !context.scored && now.data
    && now.data.done === now.data.rows) {
    context.scored = true;
    await show();
  }
  context.onTick?.(now);
}

function say(text) {
  notice.textContent = text ?? "";
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
  setInterval(() => look().catch(() => {}), LOOK_EVERY);
}

begin();
