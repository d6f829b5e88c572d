// The texts of activations: components by their tokens, search, and the tokens of a document.

import { countOf, el, fill, number, percent, problem, section } from "./dom.js";
import { ask, askUntilReady } from "./api.js";
import { shareBar, signedBar } from "./charts.js";
import { colourOf, onThemeChange, signed } from "./pictures.js";
import { TEXTS } from "./texts.js";

const ROWS = 100;
const LIMIT = 3;

export async function showText(root, context, [kind, ...rest], signal) {
  if (!context.model.facts.text) {
    root.replaceChildren(el("h1", {}, "Text"), el("p", { class: "lead" },
      "The data has no texts. Start the explorer with --data and a folder that collect has written."));
    return null;
  }
  if (kind === "document") return showDocument(root, rest, signal);
  const waiting = el("p", { class: "soft", role: "status" });
  root.replaceChildren(el("h1", {}, "Text"), el("p", {}, "Reading the activations …"), waiting);
  const path = kind === "token" ? `text/token?q=${encodeURIComponent(decode(rest[0]))}`
    : kind === "component" ? `text/component/${Number(rest[0]) || 0}` : "text";
  const { facts } = await askUntilReady(path, signal, (text) => { waiting.textContent = text; });
  if (kind === "token") showFound(root, decode(rest[0]), facts);
  else if (kind === "component") showRegion(root, facts);
  else showRegions(root, facts);
  return null;
}

// The text of a part of the address; it may have been written by hand.
function decode(text = "") {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function searchForms() {
  const form = (id, label, type, toHash) => {
    const input = el("input", { id, type, ...(type === "number" ? { min: 0, step: 1 } : {}), required: true });
    return el("form", { class: "inline", onsubmit: (event) => {
      event.preventDefault();
      location.hash = toHash(input.value);
    } }, el("label", { for: id }, `${label} `), input, el("button", {}, "Show"));
  };
  return el("div", { class: "toolbar", role: "search" },
    form("find-token", "Token", "text", (text) => `#/text/token/${encodeURIComponent(text)}`),
    form("find-component", "Component", "number", (k) => `#/text/component/${Number(k)}`),
    form("find-document", "Document", "number", (d) => `#/text/document/${Number(d)}`));
}

function regionsTable(regions, found) {
  const heads = ["component", ...(found ? ["of this token"] : []), "tokens", "purity", "for 90%", "frequent tokens"];
  return el("div", { class: "scroll" }, el("table", { class: "regions" },
    el("thead", {}, el("tr", {}, ...heads.map((head, i) =>
      el("th", { scope: "col", class: i && i < heads.length - 1 ? "r" : "" }, head)))),
    el("tbody", {}, ...regions.map((one) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: `#/text/component/${one.component}` }, String(one.component))),
      found ? el("td", { class: "r" }, countOf(one.found, "row")) : null,
      el("td", { class: "r" }, one.rows.toLocaleString("en")),
      el("td", { class: "r" }, percent(one.purity)),
      el("td", { class: "r" }, countOf(one.tokens_90, "token")),
      el("td", {}, one.tokens.join(", ")))))));
}

function showRegions(root, facts) {
  const table = el("div");
  let shown = ROWS;
  let sorted = facts.regions;
  const more = el("button", { onclick: () => { shown += ROWS; draw(); } }, "Show more");
  function draw() {
    fill(table, regionsTable(sorted.slice(0, shown)));
    more.hidden = shown >= sorted.length;
  }
  const order = el("select", { id: "order", onchange: () => {
    sorted = [...facts.regions].sort((a, b) => (order.value === "component" ? a.component - b.component
      : (b[order.value] ?? -1) - (a[order.value] ?? -1)));
    draw();
  } }, ...[["rows", "number of tokens"], ["purity", "purity"], ["component", "number"]].map(([value, text]) =>
    el("option", { value }, text)));
  draw();
  root.replaceChildren(el("h1", {}, "Text"),
    el("p", {}, `${countOf(facts.rows, "token")} of ${countOf(facts.documents, "document")}, layer ${facts.layer}.`),
    searchForms(), section("Components and their tokens", TEXTS.regions,
      el("div", { class: "inline" }, el("label", { for: "order" }, "Sort by "), order), table, more));
}

function showFound(root, text, facts) {
  const names = facts.tokens.slice(0, 12).map((name) => `“${name}”`).join(", ");
  root.replaceChildren(el("h1", {}, `Token “${text}”`), searchForms(),
    facts.tokens.length
      ? section(`${countOf(facts.rows, "row")} in ${countOf(facts.n_components, "component")}`,
        facts.exact ? `The components that hold ${names}.`
          : `No token is exactly that; these begin with it: ${names}${facts.tokens.length > 12 ? " and others" : ""}.`,
        regionsTable(facts.components, true))
      : el("p", { role: "status" }, "No token of the data begins with that."),
    el("p", {}, el("a", { href: "#/text" }, "All components")));
}

function contextList(contexts) {
  return el("ol", { class: "contexts" }, ...contexts.map((one) => el("li", {},
    `${one.before}${one.token.startsWith(" ") ? " " : ""}`,
    el("a", { href: `#/text/document/${one.document}/${one.position}` }, one.token.trim()), one.after,
    el("small", {}, ` ${number(one.value, 3)}`))));
}

function showRegion(root, facts) {
  const k = facts.component;
  root.replaceChildren(el("div", { class: "title-row" }, el("h1", {}, `Component ${k} in texts`),
    el("a", { class: "button", href: `#/component/${k}` }, "Its picture and factors")), searchForms(),
  facts.rows ? el("p", {}, `${countOf(facts.rows, "token")}, ${percent(facts.share)} of all; purity ${percent(facts.purity)}; `
    + `${countOf(facts.tokens_90, "different token")} for 90% of them.`)
    : el("p", { role: "status" }, "No token of the data belongs to this component."),
  facts.rows ? section("Frequent tokens", "Their shares of the component's rows.",
    el("table", { class: "shares" }, el("tbody", {}, ...facts.shares.map(([name, share]) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: `#/text/token/${encodeURIComponent(name)}` }, name)),
      el("td", { class: "bar-cell" }, shareBar(share)), el("td", { class: "r" }, percent(share))))))) : null,
  facts.rows ? section("Typical contexts", TEXTS.contexts, contextList(facts.contexts)) : null,
  facts.rows && facts.factors.length ? section("Factors", TEXTS.ends, ...facts.factors.map((ends, j) =>
    el("div", {}, el("h3", {}, `Factor ${j + 1}`), el("div", { class: "ends" },
      ...[["Low end", ends.low], ["High end", ends.high]].map(([name, contexts]) =>
        el("div", {}, el("small", {}, name), contextList(contexts))))))) : null);
}

async function showDocument(root, [which, place], signal) {
  const d = Math.max(0, Math.trunc(Number(which)) || 0);
  const answer = await ask(`text/document/${d}`, signal);
  const { facts, components, shares, codes } = answer;
  const T = facts.pieces.length;
  const m = components.shape[1];
  const l = codes.shape[1];
  const detail = el("div", { role: "status" });
  let selected = -1;
  let choice = null;
  // The codes of all tokens in the component of the selected one, once they have arrived.
  let along = null;
  const buttons = facts.pieces.map((piece, t) => el("button", { onclick: () => select(t) }, piece));

  function paint() {
    buttons.forEach((button, t) => {
      if (!along) { button.style.background = ""; return; }
      const colour = colourOf(signed(), along.codes[t * l + Number(choice.value)], -LIMIT, LIMIT);
      // The code of a token of another component has little meaning here.
      button.style.background = colour.replace(")", ` / ${(0.1 + 0.9 * along.own[t]).toFixed(3)})`);
    });
  }

  async function select(t) {
    [selected, along] = [t, null];
    paint();
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === t)));
    history.replaceState(null, "", `#/text/document/${d}/${facts.positions[t]}`);
    const k = components[t * m];
    const listed = Array.from({ length: m }, (_, i) => [components[t * m + i], shares[t * m + i]])
      .filter(([, share], i) => i === 0 || share >= 0.0005);
    choice = el("select", { id: "along", onchange: paint },
      ...Array.from({ length: l }, (_, j) => el("option", { value: j }, `Factor ${j + 1}`)));
    fill(detail,
      el("h2", {}, `“${facts.names[t]}” at position ${facts.positions[t]}`),
      el("table", { class: "shares" }, el("tbody", {}, ...listed.map(([one, share]) => el("tr", {},
        el("th", { scope: "row" }, el("a", { href: `#/text/component/${one}` }, `Component ${one}`)),
        el("td", { class: "bar-cell" }, shareBar(share)), el("td", { class: "r" }, percent(share)))))),
      l ? section(`Along the text, in component ${k}`, TEXTS.along,
        el("div", { class: "inline" }, el("label", { for: "along" }, "Factor "), choice)) : null,
      l ? section("Its code", TEXTS.code.split(". The second")[0] + ".",
        el("table", { class: "shares codes" }, el("tbody", {}, ...Array.from({ length: l }, (_, j) => el("tr", {},
          el("th", { scope: "row" }, `Factor ${j + 1}`),
          el("td", { class: "bar-cell" }, signedBar(codes[t * l + j], LIMIT + 1)),
          el("td", { class: "r" }, number(codes[t * l + j], 3))))))) : null,
      el("p", {}, el("a", { href: `#/row/${facts.rows[t]}` }, `Row ${facts.rows[t]} of the data`)));
    if (!l) return;
    try {
      const inside = await ask(`text/document/${d}?component=${k}`, signal);
      // Another token may have been selected in the meantime.
      if (selected !== t) return;
      along = inside;
      paint();
    } catch (error) {
      if (!signal.aborted && selected === t) detail.append(problem(error));
    }
  }

  root.replaceChildren(el("h1", {}, `Document ${d}`), searchForms(),
    el("p", { class: "soft" }, `${TEXTS.document} ${countOf(T, "token")}.`),
    el("p", { class: "reading" }, ...buttons), detail,
    el("div", { class: "steps" },
      d > 0 ? el("a", { class: "button", href: `#/text/document/${d - 1}` }, "Previous document") : null,
      d + 1 < facts.documents ? el("a", { class: "button", href: `#/text/document/${d + 1}` }, "Next document") : null));
  const at = facts.positions.indexOf(Number(place));
  if (place !== undefined && at >= 0) await select(at);
  return onThemeChange(paint);
}
