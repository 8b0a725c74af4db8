// The page: form, filters, views, and the states in between.
import { $, h, number, radio, size } from "./dom.js";
import * as api from "./api.js";
import { renderAnswer } from "./results.js";
import { chips, openExample } from "./example.js";

const form = $("form");
const state = { info: null, filters: [], running: null, last: null };
const classifies = () => state.info?.model.task === "sequence-classification";
const status = (text) => { $("status").textContent = text; };

// --- what is asked

function kindChanged() {
  const kind = radio(form, "kind");
  for (const fields of form.querySelectorAll(".fields")) fields.hidden = fields.dataset.kind !== kind;
}

function addTurn(role = "user", content = "") {
  const select = h("select", { "aria-label": "Role" }, ["user", "assistant", "system"].map((r) => h("option", { value: r, selected: r === role }, r)));
  const area = h("textarea", { rows: 1, "aria-label": "Text of the turn" });
  area.value = content;
  const turn = h("div", { cls: "turn" }, select, area, h("button", { cls: "remove", type: "button", "aria-label": "Remove this turn", on: { click: () => turn.remove() } }, "×"));
  $("turns").append(turn);
  return turn;
}

function readTurns() {
  return [...$("turns").children].map((t) => ({ role: t.querySelector("select").value, content: t.querySelector("textarea").value })).filter((m) => m.content);
}

function readQuery() {
  const kind = radio(form, "kind");
  if (kind === "text" && classifies()) return { text: $("text").value, label: /^\d+$/.test($("label").value) ? Number($("label").value) : $("label").value };
  if (kind === "text") return { text: $("text").value };
  if (kind === "messages") return { messages: readTurns(), ...($("generate-chat").checked ? { generate: {} } : {}) };
  return { prompt: $("prompt").value, ...($("generate").checked ? { generate: {} } : { completion: $("completion").value }) };
}

function missing(query) {
  if ("text" in query && !query.text) return ["text", "Write a text first."];
  if (query.label === "") return ["label", "Write the class that the model gave."];
  if ("messages" in query && !query.messages.length) return ["add-turn", "Write a turn of the chat first."];
  if ("prompt" in query && query.generate && !query.prompt) return ["prompt", "Write a prompt first."];
  if ("prompt" in query && !query.generate && !query.completion) return ["completion", "Write what the model said, or let it answer."];
  return null;
}

function readRequest() {
  const query = readQuery();
  const request = { queries: [query], top_k: Math.max(1, Math.round(Number($("top-k").value) || 10)), score: radio(form, "score"), direction: radio(form, "direction"), tokens: true };
  const parts = state.filters.map(([field, value]) => ({ field, eq: value }));
  if (parts.length) request.filter = parts.length === 1 ? parts[0] : { and: parts };
  if ($("contrast").value && "prompt" in query) request.contrast = [{ prompt: query.prompt, completion: $("contrast").value }];
  if ($("truncation").value !== "error") request.truncation = $("truncation").value;
  if ($("candidates").value) request.candidates = { recall: 0.95 };
  if ($("rescore").checked) request.rescore = "gradients";
  return request;
}

function fill(query) {
  const kind = query.text !== undefined ? "text" : query.messages ? "messages" : "completion";
  radio(form, "kind", kind);
  if (kind === "text") { $("text").value = query.text; $("label").value = query.label ?? ""; }
  if (kind === "messages") {
    $("turns").replaceChildren();
    for (const m of query.messages) addTurn(m.role, m.content);
    $("generate-chat").checked = Boolean(query.generate);
  }
  if (kind === "completion") {
    $("prompt").value = query.prompt ?? "";
    $("completion").value = query.completion ?? "";
    $("generate").checked = Boolean(query.generate);
    $("completion").disabled = $("generate").checked;
  }
  kindChanged();
}

// --- the answer

async function ask() {
  const request = readRequest();
  const gap = missing(request.queries[0]);
  if (gap) {
    $(gap[0]).focus();
    show(h("p", { cls: "notice warn" }, gap[1]));
    status(gap[1]);
    return;
  }
  state.running?.abort();
  const running = (state.running = new AbortController());
  remember(request);
  busy(true);
  show(skeleton(request.direction));
  status("Working…");
  try {
    const answer = await api.influence(request, running.signal);
    answer.can_rescore = Boolean(state.info?.rescore);
    state.last = { request, answer };
    const result = answer.results[0];
    show(...renderAnswer(answer, request, { onFilter: addFilter, status }));
    status(`${result.proponents?.length ?? 0} proponents and ${result.opponents?.length ?? 0} opponents.`);
    if (matchMedia("(max-width: 720px)").matches) $("answer").scrollIntoView({ block: "start" });
  } catch (problem) {
    if (problem.name !== "AbortError") failed(problem, ask);
  } finally {
    if (state.running === running) busy(false);
  }
}

const show = (...parts) => $("answer").replaceChildren(...parts);

function busy(on) {
  $("ask").disabled = on;
  $("ask").firstElementChild.textContent = on ? "Working…" : "Ask";
  $("answer").setAttribute("aria-busy", String(on));
}

function skeleton(direction) {
  const column = () => h("div", { cls: "hits" }, Array.from({ length: 4 }, () => h("div", { cls: "skeleton tall" })));
  return h("div", { "aria-hidden": "true" }, h("div", { cls: "skeleton line" }), h("div", { cls: direction === "both" ? "sides" : "sides one", vars: { "margin-top": "20px" } }, column(), direction === "both" ? column() : null));
}

// Overload is not an error of the reader's: say so, count down, and ask again.
function failed(problem, again, place = $("answer")) {
  if (problem.status === 401) $("key").hidden = false;
  const overload = [429, 503, 504, 0].includes(problem.status);
  const left = h("span");
  const retry = h("button", { cls: "quiet", type: "button" }, "Try again");
  const box = h("div", { cls: overload ? "notice warn" : "notice error", role: "alert" }, h("h2", {}, problem.status === 429 ? "Many are asking at once" : problem.title ?? "Something went wrong"), h("p", {}, problem.message),
    problem.errors?.length > 1 ? h("ul", {}, problem.errors.map((e) => h("li", {}, `${e.field}: ${e.message}`))) : null,
    h("p", { cls: "faint" }, [problem.code && `Code ${problem.code}`, problem.request_id && `request ${problem.request_id}`].filter(Boolean).join(" · ")),
    h("div", { cls: "row" }, problem.status === 401 ? h("button", { cls: "quiet", type: "button", on: { click: askKey } }, "Enter an API key") : retry, left));
  place.replaceChildren(box);
  status(problem.message);
  let timer;
  retry.addEventListener("click", () => { clearInterval(timer); again(); });
  if (overload && problem.retry) {
    let seconds = problem.retry;
    const tick = () => {
      if (!box.isConnected) return clearInterval(timer);
      left.textContent = seconds > 0 ? `Asking again in ${seconds} s` : "";
      if (seconds-- <= 0) { clearInterval(timer); again(); }
    };
    tick();
    timer = setInterval(tick, 1000);
  }
}

// Something to click at once, made of this store's own examples: their last word becomes what the model said.
async function suggestions() {
  const { rows } = state.info.store;
  const pages = await Promise.all([0.13, 0.5, 0.87].map((at) => api.examples("position", Math.floor(at * rows), 8).catch(() => ({ examples: [] }))));
  return pages.map((p) => p.examples.map((e) => e.text.trim()).filter((t) => t.length < 90 && /\S\s+\S+$/.test(t) && !t.includes("\n"))[0]).filter(Boolean)
    .map((text) => { const at = text.search(/\s\S+$/); return { prompt: text.slice(0, at), completion: text.slice(at) }; });
}

async function welcome() {
  const tries = classifies() ? [] : await suggestions();
  const label = (q) => q.prompt + q.completion;
  show(h("div", { cls: "panel empty" }, h("h2", {}, "Ask about anything the model said"),
    h("p", {}, "You get the training examples that pushed the model towards saying it, and those that pushed it away. Point at a result to see which tokens it acts through."),
    h("div", { cls: "chips" }, tries.map((q) => h("button", { cls: "chip", type: "button", on: { click: () => { fill(q); ask(); } } }, label(q))))));
}

// --- filters

function addFilter(field, value) {
  state.filters = state.filters.filter(([f]) => f !== field);
  state.filters.push([field, value]);
  drawFilters();
  select("ask");
  if (state.last) ask();
}

function drawFilters() {
  $("filters").hidden = !state.filters.length;
  $("filters").replaceChildren(...state.filters.map(([field, value]) => h("button", { cls: "chip on", type: "button", "aria-label": `Remove the filter ${field} = ${value}`,
    on: { click: () => { state.filters = state.filters.filter(([f]) => f !== field); drawFilters(); if (state.last) ask(); } } }, `${field} `, h("b", {}, String(value)), "  ×")));
}

// --- the address remembers the question, so that it can be sent to a colleague

function remember(request) {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(request))}`);
}

function recall() {
  try {
    const request = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    fill(request.queries[0]);
    radio(form, "score", request.score ?? "influence");
    radio(form, "direction", request.direction ?? "both");
    $("top-k").value = request.top_k ?? 10;
    $("contrast").value = request.contrast?.[0]?.completion ?? "";
    state.filters = (request.filter?.and ?? (request.filter ? [request.filter] : [])).filter((f) => f.field && "eq" in f).map((f) => [f.field, f.eq]);
    drawFilters();
    return true;
  } catch {
    return false;
  }
}

// --- unusual examples

async function unusual(more) {
  const list = $("unusual");
  const order = radio($("view-unusual"), "order");
  const offset = more ? list.children.length : 0;
  if (!more) list.replaceChildren(...Array.from({ length: 4 }, () => h("li", { cls: "skeleton tall", "aria-hidden": "true" })));
  try {
    const page = await api.examples(order, offset, 20);
    const top = more ? Number(list.dataset.top) : Math.max(...page.examples.map((e) => e[order === "loss" ? "loss" : "self_influence"] ?? 0), Number.MIN_VALUE);
    list.dataset.top = top;
    const cards = page.examples.map((e, i) => stored(e, offset + i + 1, order, top));
    more ? list.append(...cards) : list.replaceChildren(...cards);
    $("more-unusual").hidden = offset + page.examples.length >= page.total;
    status(`${offset + page.examples.length} of ${page.total} examples.`);
  } catch (problem) {
    $("more-unusual").hidden = true;
    const place = h("li");
    list.replaceChildren(place);
    failed(problem, () => unusual(false), place);
  }
}

function stored(e, rank, order, top) {
  const value = order === "loss" ? e.loss : e.self_influence;
  return h("li", { cls: "hit" }, h("div", { cls: "head" }, h("span", { cls: "rank" }, rank), h("span", { cls: "meter", "aria-hidden": "true" }, h("span", { vars: { "--share": `${Math.min(100, (100 * (value ?? 0)) / top)}%` } })),
    h("span", { cls: "score" }, order === "loss" ? `${number(e.loss)} nats` : number(e.self_influence))),
    h("p", { cls: "text" }, e.text), h("div", { cls: "foot" }, h("span", { cls: "id" }, e.id), chips(e.metadata, addFilter),
      h("span", { cls: "actions" }, h("button", { cls: "quiet small", type: "button", "aria-label": `Open ${e.id}`, on: { click: () => openExample(e.id, addFilter) } }, "Open"))));
}

// --- views, key, start

function select(name) {
  for (const view of ["ask", "unusual"]) {
    const on = view === name;
    $(`tab-${view}`).setAttribute("aria-selected", String(on));
    $(`tab-${view}`).tabIndex = on ? 0 : -1;
    $(`view-${view}`).hidden = !on;
  }
  if (name === "unusual" && !$("unusual").children.length) unusual(false);
}

function askKey() {
  const dialog = $("key-dialog");
  $("key-input").value = "";
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "ok" || !$("key-input").value) return;
    api.setKey($("key-input").value.trim());
    start();
  }, { once: true });
}

async function start() {
  try {
    const info = (state.info = await api.info());
    const { model, store } = info;
    $("facts").replaceChildren(h("b", {}, model.name), ` · ${size(model.parameters)} parameters · `, h("b", {}, number(store.rows, 9)), ` examples at ${number(store.bytes_per_example, 9)} bytes`);
    $("key").hidden = !info.authentication;
    $("rescore").disabled = !info.rescore;
    $("rescore-hint").hidden = info.rescore;
    $("top-k").max = info.limits.max_top_k;
    form.querySelector(".kinds").hidden = classifies();
    $("label-field").hidden = !classifies();
    if (classifies()) radio(form, "kind", "text");
    kindChanged();
    if (recall()) ask();
    else welcome();
  } catch (problem) {
    failed(problem, start);
  }
}

form.addEventListener("change", (event) => {
  if (event.target.name === "kind") kindChanged();
  if (event.target.id === "generate") $("completion").disabled = $("generate").checked;
  if (["score", "direction"].includes(event.target.name) && state.last) ask();
});
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
form.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) { event.preventDefault(); select("ask"); form.querySelector(".fields:not([hidden]) textarea").focus(); }
  if (event.key === "Escape") form.querySelector("details.more").open = false;
});
document.addEventListener("click", (event) => { const more = form.querySelector("details.more"); if (more.open && !more.contains(event.target)) more.open = false; });
$("add-turn").addEventListener("click", () => addTurn($("turns").children.length % 2 ? "assistant" : "user").querySelector("textarea").focus());
$("view-unusual").addEventListener("change", () => unusual(false));
$("more-unusual").addEventListener("click", () => unusual(true));
$("key").addEventListener("click", askKey);
for (const view of ["ask", "unusual"]) $(`tab-${view}`).addEventListener("click", () => select(view));
document.querySelector(".views").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const other = $("tab-ask").getAttribute("aria-selected") === "true" ? "unusual" : "ask";
  select(other);
  $(`tab-${other}`).focus();
});
for (const box of document.querySelectorAll("dialog")) box.addEventListener("click", (event) => { if (event.target === box) box.close("cancel"); });
addTurn("user");
addTurn("assistant");
kindChanged();
start();
