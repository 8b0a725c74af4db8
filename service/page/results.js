// An answer: the query's tokens, then proponents and opponents.
import { h, copy, number, signed, toast } from "./dom.js";
import * as api from "./api.js";
import { inWords, paint, tokenLine } from "./tokens.js";
import { chips, openExample } from "./example.js";

const LEAD = 80; // characters shown before the first target token

export function renderAnswer(answer, request, { onFilter, status }) {
  const result = answer.results[0];
  const lines = result.inputs.map((i) => (i.tokens ? tokenLine(i.tokens) : h("p", { cls: "tokens" }, i.text)));
  const legend = h("span", { cls: "legend" });
  const words = h("p", { cls: "visually-hidden", "aria-live": "polite" });
  const resting = () => {
    legend.className = "legend";
    legend.replaceChildren("carries little", h("span", { cls: "ramp" }), "carries much");
    result.inputs.forEach((i, n) => i.tokens && paint(lines[n], i.tokens.map((t) => t.weight), { isSigned: false, label: "carries" }));
    words.textContent = result.inputs.filter((i) => i.tokens).map((i) => `Tokens that carry most: ${inWords(i.tokens, i.tokens.map((t) => t.weight))}.`).join(" ");
  };
  const driven = (hit) => {
    if (!hit.query_tokens) return;
    legend.className = "legend signed";
    legend.replaceChildren("against", h("span", { cls: "ramp" }), `for result ${hit.rank}`);
    result.inputs.forEach((i, n) => i.tokens && paint(lines[n], hit.query_tokens[n], { isSigned: true, label: `part of ${signed(hit.score)}` }));
    words.textContent = result.inputs.filter((i) => i.tokens).map((i, n) => `Result ${hit.rank} acts through: ${inWords(i.tokens, hit.query_tokens[n])}.`).join(" ");
  };
  resting();

  const hits = [...(result.proponents ?? []), ...(result.opponents ?? [])];
  const top = Math.max(...hits.map((x) => Math.abs(x.score)), Number.MIN_VALUE);
  const context = { request, answer, result, top, driven, resting, onFilter, status };
  const sides = [["pro", "Proponents", "training on them lowers the query’s loss", result.proponents], ["opp", "Opponents", "training on them raises it", result.opponents]].filter((s) => s[3]);
  return [
    h("section", { cls: "panel asked", "aria-label": "The query" },
      h("header", {}, h("h2", {}, result.inputs.some((i) => i.generated !== null) ? "What the model said" : "The query"), result.inputs.some((i) => i.tokens) && legend),
      result.inputs.map((i, n) => [i.sign < 0 ? h("p", { cls: "hint" }, "rather than") : null, lines[n]]), words,
      stats(answer, result),
      result.warnings.map((w) => h("p", { cls: "notice warn" }, w[0].toUpperCase() + w.slice(1) + "."))),
    h("div", { cls: "bar" }, h("p", { cls: "hint" }, how(answer)), exports_(answer, request)),
    hits.length ? h("div", { cls: sides.length > 1 ? "sides" : "sides one" }, sides.map((s) => side(s, context)))
      : h("div", { cls: "panel empty" }, h("h2", {}, "Nothing to rank"), h("p", {}, answer.n_allowed ? "No example moves this query’s loss." : "The filter leaves no example. Remove one of its conditions.")),
  ];
}

function stats(answer, result) {
  const targets = result.inputs.reduce((sum, i) => sum + i.n_targets, 0);
  const loss = result.inputs.reduce((sum, i) => sum + i.sign * i.loss, 0);
  const rows = [["Loss", `${number(loss)} nats`, "Summed over target tokens"], ["Targets", `${number(targets, 9)} of ${number(result.n_tokens, 9)} tokens`, "Underlined above"]];
  if (result.coverage !== null) rows.push(["Coverage", `${Math.round(result.coverage * 100)} %`, "Share of the query's gradient that the index can see"]);
  rows.push(["Time", `${number(answer.timing_ms.total)} ms`, Object.entries(answer.timing_ms).map(([k, v]) => `${k} ${number(v)} ms`).join("\n")]);
  return h("dl", { cls: "stats" }, rows.map(([k, v, title]) => h("div", { title }, h("dt", {}, k), h("dd", {}, v))));
}

const how = (a) => {
  const found = a.method === "exhaustive" ? `All ${number(a.n_allowed, 9)} examples scored` : `${number(a.n_candidates, 9)} candidates of ${number(a.n_allowed, 9)} examples scored`;
  return `${found} by ${a.score}${a.n_allowed < a.n_rows ? ` (${number(a.n_rows, 9)} in the store)` : ""} · generation ${a.generation}`;
};

function exports_(answer, request) {
  const button = (label, make) => h("button", { cls: "quiet small", type: "button", on: { click: () => copy(make(), label) } }, `Copy ${label}`);
  return h("div", { cls: "pairs" }, button("JSON", () => JSON.stringify(answer, null, 1)), button("CSV", () => csv(answer)), button("curl", () => api.curl(request)));
}

function csv(answer) {
  const rows = answer.results.flatMap((r) => [["proponent", r.proponents], ["opponent", r.opponents]].flatMap(([direction, hits]) => (hits ?? []).map((x) => [r.query ?? "sum", direction, x.rank, x.id, x.score, x.rescored ?? "", x.text, JSON.stringify(x.metadata)])));
  // a spreadsheet runs a cell that begins with = + - or @: numbers pass, texts are quoted as text
  const cell = (v) => (typeof v === "number" ? String(v) : `"${(/^[=+\-@\t\r]/.test(v) ? `'${v}` : String(v)).replaceAll('"', '""')}"`);
  return [["query", "direction", "rank", "id", answer.score, "rescored", "text", "metadata"], ...rows].map((r) => r.map(cell).join(",")).join("\r\n");
}

function side([cls, title, note, hits], context) {
  const list = h("ol", { cls: "hits" }, hits.map((x) => card(x, context)));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    const cards = [...list.children];
    const at = cards.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    cards[Math.min(Math.max(at + step, 0), cards.length - 1)].focus();
  });
  return h("section", { cls: `side ${cls}`, "aria-label": title }, h("header", {}, h("h2", {}, title), h("p", {}, note)),
    hits.length ? list : h("p", { cls: "notice" }, "None."));
}

function card(hit, context) {
  const text = h("p", { cls: "text" }, hit.target_start > LEAD ? `…${hit.text.slice(hit.target_start - LEAD)}` : hit.text);
  const show = hit.tokens ? () => own(text, hit.tokens) : null;
  const tokens = h("button", { cls: "quiet small", type: "button", title: "Recompute this example's gradient: which of its own tokens act?", on: { click: () => (show ? show() : rescoreOne(hit, text, tokens, context)) } }, "Its tokens");
  tokens.hidden = !context.answer.can_rescore && !hit.tokens;
  if (show) show();
  const value = hit.rescored ?? hit.score;
  return h("li", { cls: "hit", tabindex: "0", "aria-label": `Rank ${hit.rank}, score ${signed(hit.score)}`,
    on: { mouseenter: () => context.driven(hit), focusin: () => context.driven(hit), mouseleave: context.resting, focusout: context.resting } },
    h("div", { cls: "head" }, h("span", { cls: "rank" }, hit.rank), h("span", { cls: "meter", "aria-hidden": "true" }, h("span", { vars: { "--share": `${(100 * Math.abs(hit.score)) / context.top}%` } })),
      h("span", { cls: "score", title: hit.rescored === null ? "Score" : `Sketched ${signed(hit.score)}; by recomputed gradients ${signed(hit.rescored)}` }, signed(value), hit.rescored === null ? "" : " ∇")),
    text,
    h("div", { cls: "foot" }, h("span", { cls: "id" }, hit.id), chips(hit.metadata, context.onFilter),
      h("span", { cls: "actions" }, tokens, h("button", { cls: "quiet small", type: "button", "aria-label": `Open ${hit.id}`, on: { click: () => openExample(hit.id, context.onFilter) } }, "Open"))));
}

function own(text, tokens) {
  const line = tokenLine(tokens);
  paint(line, tokens.map((t) => t.weight), { isSigned: true, label: "part of the re-scored influence" });
  text.className = "text tokens";
  text.replaceChildren(...line.childNodes);
}

async function rescoreOne(hit, text, button, { request, status }) {
  button.disabled = true;
  button.textContent = "Computing…";
  try {
    const only = { field: "id", eq: hit.id };
    const filter = request.filter ? { and: [request.filter, only] } : only;
    const answer = await api.influence({ ...request, filter, top_k: 1, direction: "both", tokens: false, rescore: "gradients", rescore_n: 1 });
    const found = [...(answer.results[0].proponents ?? []), ...(answer.results[0].opponents ?? [])].find((x) => x.tokens);
    if (!found) throw new Error("No token scores came back.");
    own(text, found.tokens);
    hit.tokens = found.tokens;
    status(`Tokens of result ${hit.rank} that act most: ${inWords(found.tokens, found.tokens.map((t) => t.weight))}.`);
    button.hidden = true;
  } catch (problem) {
    button.textContent = "Its tokens";
    toast(problem.message);
  } finally {
    button.disabled = false;
  }
}
