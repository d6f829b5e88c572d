// Rows of the data as buttons that open them.

import { el, number } from "./dom.js";
import { picture } from "./pictures.js";

export function rowButtons({ facts, rows }) {
  const d = rows.length / facts.numbers.length;
  return el("div", { class: "tiles" }, ...facts.numbers.map((row, i) => el("a", {
    class: "row-button", href: `#/row/${row}`,
  }, picture(rows.subarray(i * d, (i + 1) * d), { size: 76, label: `Row ${row}` }),
  el("span", {}, `row ${row}`), el("small", {}, number(facts.scores[i])))));
}
