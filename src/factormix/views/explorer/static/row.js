// One row of the data, and what the model says about it.

import { el } from "./dom.js";
import { patiently } from "./api.js";
import { analysis } from "./analysis.js";
import { onThemeChange } from "./colours.js";
import { titled } from "./words.js";

export async function show(root, context, [which], signal) {
  const number = Number(which) || 0;
  root.replaceChildren(el("h1", {}, titled(number)), el("p", { class: "soft" }, "Looking at it …"));
  const answer = await patiently(`row/${number}`, signal, () => {});
  const last = context.state.data.rows - 1;
  const step = (by, text) => el("a", { class: "button",
    href: `#/row/${Math.min(last, Math.max(0, number + by))}` }, text);
  function draw() {
    root.replaceChildren(
      el("div", { class: "title-row" }, el("h1", {}, titled(number)), el("div", { class: "steps" },
        step(-1, "‹ Previous"), step(1, "Next ›"),
        el("a", { class: "button", href: "#/data" }, "All data"),
        el("a", { class: "button", href: `#/try/${number}` }, "Change it"))),
      analysis(answer, context));
  }
  draw();
  return onThemeChange(draw);
}
