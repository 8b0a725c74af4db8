// One training example in a dialog: full text, figures, neighbours.
import { $, h, copy, number } from "./dom.js";
import * as api from "./api.js";

const dialog = () => $("example");

export async function openExample(id, onFilter) {
  const box = dialog();
  box.replaceChildren(h("article", {}, head(id), h("div", { cls: "skeleton line" })));
  if (!box.open) box.showModal();
  try {
    const found = await api.example(id, 6);
    box.replaceChildren(content(found, onFilter));
  } catch (problem) {
    box.replaceChildren(h("article", {}, head(id), h("p", { cls: "notice error" }, problem.message)));
  }
}

function head(id) {
  return h("header", {}, h("h2", { id: "example-title" }, id),
    h("button", { cls: "quiet small", type: "button", on: { click: () => dialog().close() } }, "Close"));
}

function content(e, onFilter) {
  const stats = [["Target tokens", number(e.n_tokens)], ["Loss", `${number(e.loss)} nats`], ["Self-influence", number(e.self_influence)], ["Kind", e.kind], ["Position", number(e.position, 9)]];
  return h("article", {},
    head(e.id),
    e.excluded && h("p", { cls: "notice warn" }, `It never appears in results: ${e.excluded}.`),
    h("div", { cls: "full", tabindex: "0", role: "region", "aria-label": "Full text" }, e.text),
    h("dl", { cls: "stats" }, stats.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v)))),
    h("div", { cls: "chips" }, chips(e.metadata, onFilter && ((field, value) => { dialog().close(); onFilter(field, value); }))),
    h("div", { cls: "row" }, h("button", { cls: "quiet small", type: "button", on: { click: () => copy(e.text, "Text") } }, "Copy text"),
      h("button", { cls: "quiet small", type: "button", on: { click: () => copy(JSON.stringify(e, null, 1), "JSON") } }, "Copy JSON")),
    e.neighbours?.length ? h("section", {}, h("h3", {}, "Neighbours"), h("p", { cls: "hint" }, "Examples whose sketches point the same way: training on them would have much the same effect."),
      h("ul", { cls: "neighbours" }, e.neighbours.map((n) => h("li", {}, h("button", { type: "button", on: { click: () => openExample(n.id, onFilter) } }, h("b", {}, n.score.toFixed(2)), h("span", {}, n.text)))))) : null);
}

export function chips(metadata, onFilter) {
  return Object.entries(metadata).map(([field, value]) => {
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    const label = [h("i", {}, `${field} `), h("b", {}, text.length > 60 ? `${text.slice(0, 59)}…` : text)];
    const filters = onFilter && value !== null && typeof value !== "object";
    return filters ? h("button", { cls: "chip", type: "button", title: `Only examples with ${field} = ${text}`, on: { click: () => onFilter(field, value) } }, label) : h("span", { cls: "chip" }, label);
  });
}
