// Training: the curves of likelihood and components, and the centroids at each save.

import { el, number, section } from "./dom.js";
import { ask } from "./api.js";
import { drawCurves } from "./charts.js";
import { drawGrid, onThemeChange } from "./pictures.js";
import { TEXTS } from "./texts.js";

export async function showTraining(root, context, [], signal) {
  const status = el("p", { class: "lead", role: "status" });
  const charts = el("div", { class: "charts" });
  const canvas = el("canvas", { class: "map still", role: "img" });
  const caption = el("p", { class: "soft" });
  const slider = el("input", { type: "range", min: 0, max: 0, value: 0, step: 1, id: "save" });
  const follow = el("input", { type: "checkbox", checked: true, id: "follow" });
  const holder = el("div", { class: "map-scroll" }, canvas);
  const centroids = section("Centroids", TEXTS.training,
    el("div", { class: "inline" }, el("label", { for: "save" }, "Save "), slider,
      el("label", {}, follow, " follow the newest")), holder, caption);
  let saves = [];
  let shown = null;

  slider.addEventListener("input", () => {
    follow.checked = Number(slider.value) === saves.length - 1;
    draw();
  });
  follow.addEventListener("change", draw);

  async function draw() {
    if (!saves.length) return;
    if (follow.checked) slider.value = String(saves.length - 1);
    const save = saves[Number(slider.value)];
    if (!save) return;
    try {
      if (shown?.facts.version !== save.version) {
        shown = await ask(`training/${save.version}`, signal);
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
      + `${facts.in_use} in use.${part} Save ${Number(slider.value) + 1} of ${saves.length} that the explorer has seen.`;
  }

  async function refresh() {
    const { facts } = await ask("training", signal);
    saves = facts.snapshots;
    slider.max = String(Math.max(0, saves.length - 1));
    slider.disabled = saves.length < 2;
    status.textContent = sentence(facts);
    const { curves: history } = facts;
    centroids.hidden = Boolean(context.model?.facts.images);
    if (centroids.hidden) {
      const lines = [{ name: "batches", values: history.bits_per_dim, kind: "first" }];
      charts.replaceChildren(section("Bits per dimension", TEXTS.bits,
        drawCurves(history.step, lines, TEXTS.bits, { xLabel: "steps" })));
      return;
    }
    // Within less than one epoch, only steps have whole numbers.
    const epochs = history.epoch.every((e) => e !== null) && history.epoch.at(-1) - history.epoch[0] >= 1;
    const x = epochs ? history.epoch : history.step;
    const xLabel = epochs ? "epochs" : "steps";
    const lines = [{ name: "training rows", values: history.log_likelihood, kind: "first" }];
    if (history.held_out.some((v) => v !== null)) {
      lines.push({ name: "held-out rows", values: history.held_out, kind: "second" });
    }
    const counts = [{ name: "in use", values: history.components_in_use, kind: "second" }];
    if (history.components.some((v) => v !== null)) {
      counts.unshift({ name: "all", values: history.components, kind: "first" });
    }
    charts.replaceChildren(
      section("Likelihood", TEXTS.curve, drawCurves(x, lines, TEXTS.curve, { xLabel })),
      section("Components", TEXTS.components, drawCurves(x, counts, TEXTS.components, { xLabel, whole: true })));
    await draw();
  }

  root.replaceChildren(el("h1", {}, "Training"), status, centroids, charts);
  await refresh();
  const stopWatching = onThemeChange(draw);
  context.onVersion = () => refresh().catch(() => {});
  context.onTick = (state) => { status.textContent = sentence(state); };
  return () => {
    stopWatching();
    context.onVersion = context.onTick = null;
  };
}

function sentence(state) {
  if (!state.version) return `Waiting for ${state.path}: it appears when training first saves it.`;
  const ago = state.saved < 90 ? `${Math.round(state.saved)} s` : state.saved < 5400
    ? `${Math.round(state.saved / 60)} min` : `${number(state.saved / 3600, 2)} h`;
  if (state.finished) return `Training is finished. ${state.path} was saved ${ago} ago.`;
  return `Training is not finished. ${state.path} was saved ${ago} ago; this page follows every new save.`;
}
