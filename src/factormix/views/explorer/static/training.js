// Training: how the likelihood rises, how components come and go, and how their pictures form.

import { el, number, section } from "./dom.js";
import { ask } from "./api.js";
import { curves } from "./charts.js";
import { onThemeChange } from "./colours.js";
import { drawGrid } from "./grid.js";
import { WORDS } from "./words.js";

export async function show(root, context, [], signal) {
  const status = el("p", { class: "lead", role: "status" });
  const charts = el("div", { class: "charts" });
  const canvas = el("canvas", { class: "map still", role: "img" });
  const caption = el("p", { class: "soft" });
  const slider = el("input", { type: "range", min: 0, max: 0, value: 0, step: 1, id: "moment" });
  const follow = el("input", { type: "checkbox", checked: true, id: "follow" });
  const holder = el("div", { class: "map-scroll" }, canvas);
  let moments = [];
  let shown = null;
  let training = null;

  slider.addEventListener("input", () => {
    follow.checked = Number(slider.value) === moments.length - 1;
    draw();
  });
  follow.addEventListener("change", draw);

  async function draw() {
    if (!moments.length) return;
    if (follow.checked) slider.value = String(moments.length - 1);
    const moment = moments[Number(slider.value)];
    if (!moment) return;
    try {
      if (shown?.facts.version !== moment.version) {
        shown = await ask(`training/${moment.version}`, signal);
      }
    } catch {
      return;
    }
    const { facts } = shown;
    const size = Math.max(12, Math.min(facts.shown > 12 ? 72 : 150, Math.floor(holder.clientWidth / facts.cols)));
    drawGrid(canvas, { tiles: shown.tiles, order: Array.from({ length: facts.shown }, (_, i) => i),
      cols: facts.cols, size });
    canvas.setAttribute("aria-label", `Centroids after ${facts.step} steps`);
    const part = facts.shown < facts.components ? ` The ${facts.shown} heaviest are shown.` : "";
    caption.textContent = `After ${facts.step.toLocaleString("en")} steps: ${facts.components} components, `
      + `${facts.in_use} in use.${part} Moment ${Number(slider.value) + 1} of ${moments.length} seen by this page.`;
  }

  async function refresh() {
    training = await ask("training", signal);
    const { facts } = training;
    moments = facts.snapshots;
    slider.max = String(Math.max(0, moments.length - 1));
    slider.disabled = moments.length < 2;
    status.textContent = sentence(facts);
    const { curves: history } = facts;
    const epochs = history.epoch.every((e) => e !== null) && history.epoch.at(-1) > 0;
    const x = epochs ? history.epoch : history.step;
    const xLabel = epochs ? "passes over the data" : "steps";
    const lines = [{ name: "rows of training", values: history.log_likelihood, kind: "first" }];
    if (history.held_out.some((v) => v !== null)) {
      lines.push({ name: "held-out rows", values: history.held_out, kind: "second" });
    }
    const counts = [{ name: "in use", values: history.components_in_use, kind: "second" }];
    if (history.components.some((v) => v !== null)) {
      counts.unshift({ name: "in all", values: history.components, kind: "first" });
    }
    charts.replaceChildren(
      section("Likelihood", WORDS.curve, curves(x, lines, WORDS.curve, { xLabel })),
      section("Components", WORDS.components, curves(x, counts, WORDS.components, { xLabel })));
    await draw();
  }

  root.replaceChildren(el("h1", {}, "Training"), status,
    section("Centroids", WORDS.training,
      el("div", { class: "inline" }, el("label", { for: "moment" }, "Moment "), slider,
        el("label", {}, follow, " follow the newest")), holder, caption),
    charts);
  await refresh();
  const quiet = onThemeChange(draw);
  context.onVersion = () => refresh().catch(() => {});
  context.onTick = (state) => { status.textContent = sentence(state); };
  return () => {
    quiet();
    context.onVersion = context.onTick = null;
  };
}

function sentence(state) {
  if (!state.version) return `Waiting for ${state.path}: it appears when training first saves it.`;
  const ago = state.saved < 90 ? `${Math.round(state.saved)} s` : state.saved < 5400
    ? `${Math.round(state.saved / 60)} min` : `${number(state.saved / 3600, 2)} h`;
  if (state.finished) return `Training is finished. ${state.path} was saved ${ago} ago.`;
  return `Training is not finished: ${state.path} was saved ${ago} ago, and the page follows every new save.`;
}
