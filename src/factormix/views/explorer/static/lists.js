// Rows of the data as buttons that open them.

import { el, number } from "./dom.js";
import { isImage, picture, reach } from "./pictures.js";
import { titled } from "./words.js";

export function rowButtons({ facts, rows }) {
  const d = rows.length / facts.numbers.length;
  const limit = reach(rows);
  return el("div", { class: "tiles" }, ...facts.numbers.map((row, i) => el("a", {
    class: "row-button", href: `#/row/${row}`,
  }, picture(rows.subarray(i * d, (i + 1) * d), { size: 76, limit, label: titled(row) }),
  el("span", {}, isImage() ? `no. ${row}` : `row ${row}`), el("small", {}, number(facts.scores[i])))));
}
