// A row as a table: every feature with a bar around the average and its value in its own units.

import { el, number } from "./dom.js";
import { getLook } from "./pictures.js";

export const FEW = 64;
const SHOWN = 14;

export function featureName(model, j) {
  return model.facts.feature_names?.[j] ?? `feature ${j}`;
}

// Name the features of shown values (d,) that stand out most, above and below the middle.
export function outstanding(model, values, least, n = 3) {
  const order = deviating(values, values.length).filter((j) => Math.abs(values[j]) >= least);
  const names = (some) => some.slice(0, n).map((j) => featureName(model, j)).join(", ");
  return { above: names(order.filter((j) => values[j] > 0)),
    below: names(order.filter((j) => values[j] < 0)) };
}

// Make a table of shown values (d,) that can be updated. Long rows show what deviates most.
export function featureTable(model, values, extra = []) {
  const { low, high } = getLook();
  const d = model.facts.features;
  const shown = d <= FEW ? d : SHOWN;
  const body = el("tbody");
  const head = el("tr", {}, el("th", { scope: "col" }, "feature"),
    el("th", { scope: "col", class: "bar-head" }, "below | above average"),
    el("th", { scope: "col", class: "r" }, "value"),
    ...extra.map((column) => el("th", { scope: "col", class: "r" }, column.title)));
  const rows = Array.from({ length: shown }, () => {
    const cells = {
      name: el("th", { scope: "row" }), bar: el("i"), value: el("td", { class: "r" }),
      more: extra.map(() => el("td", { class: "r" })),
    };
    body.append(el("tr", {}, cells.name, el("td", { class: "bar-cell" },
      el("span", { class: "bar" }, cells.bar)), cells.value, ...cells.more));
    return cells;
  });

  function update(current) {
    const order = d <= FEW ? null : deviating(current, shown);
    const reach = Math.max(high, -low);
    rows.forEach((cells, i) => {
      const j = order ? order[i] : i;
      const share = Math.max(-1, Math.min(1, current[j] / reach));
      cells.name.textContent = featureName(model, j);
      cells.bar.className = share < 0 ? "below" : "above";
      cells.bar.style.left = `${50 + Math.min(0, 50 * share)}%`;
      cells.bar.style.width = `${Math.abs(50 * share)}%`;
      cells.value.textContent = number(model.centre[j] + model.scale[j] * current[j]);
      extra.forEach((column, c) => { cells.more[c].textContent = column.text(j); });
    });
  }
  update(values);
  const table = el("div", { class: "scroll" },
    el("table", { class: "features" }, el("thead", {}, head), body));
  return { table, update, partial: d > FEW };
}

function deviating(values, n) {
  const order = Array.from(values.keys());
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  return order.slice(0, n);
}
