// The API's description, drawn from /openapi.json: no third-party script, no network.
import { $, h, copy } from "./dom.js";

const schemaOf = (doc, node) => (node?.$ref ? doc.components.schemas[node.$ref.split("/").pop()] : node);
const nameOf = (node) => node?.$ref?.split("/").pop();

function typeOf(node) {
  if (!node) return "";
  if (node.$ref) return nameOf(node);
  if (node.anyOf) return [...new Set(node.anyOf.map(typeOf))].join(" or ");
  if (node.const !== undefined) return JSON.stringify(node.const);
  if (node.enum) return node.enum.map((v) => JSON.stringify(v)).join(" or ");
  if (node.type === "array") return `list of ${typeOf(node.items) || "values"}`;
  const low = node.minimum ?? node.exclusiveMinimum;
  const high = node.maximum ?? node.exclusiveMaximum;
  const range = [low !== undefined && `from ${low}`, high !== undefined && Math.abs(high) < 1e15 && `to ${high}`, node.maxLength && `at most ${node.maxLength.toLocaleString("en")} characters`].filter(Boolean).join(" ");
  return `${node.type ?? "any value"}${range ? `, ${range}` : ""}`;
}

const inner = (node) => (node?.anyOf ?? [node]).flatMap((n) => (n?.$ref ? [n] : n?.items ? inner(n.items) : [])).filter(Boolean);

function properties(doc, schema, seen) {
  return h("ul", { cls: "properties" }, Object.entries(schema.properties ?? {}).map(([name, node]) => {
    const nested = inner(node).filter((n) => !seen.includes(nameOf(n)));
    const fallback = node.default !== undefined && node.default !== null ? `; default ${JSON.stringify(node.default)}` : "";
    return h("li", {}, h("div", {}, h("code", {}, name), schema.required?.includes(name) && h("span", { cls: "must" }, "required"), h("span", { cls: "type" }, typeOf(node) + fallback)),
      h("div", {}, node.description ?? ""),
      nested.map((n) => h("details", {}, h("summary", {}, `Fields of ${nameOf(n)}`), properties(doc, schemaOf(doc, n), [...seen, nameOf(n)]))));
  }));
}

function body(doc, title, node) {
  const schema = schemaOf(doc, node);
  return schema?.properties ? [h("h3", {}, title), schema.description && h("p", {}, schema.description), properties(doc, schema, [nameOf(node)])] : null;
}

function operation(doc, path, method, op) {
  const sent = op.requestBody?.content["application/json"]?.schema;
  const got = op.responses["200"]?.content?.["application/json"]?.schema;
  const examples = schemaOf(doc, sent)?.examples ?? [];
  const curl = (data) => `curl ${location.origin}${path}${method === "post" ? data ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(data).replaceAll("'", "'\\''")}'` : " -X POST" : ""}`;
  return h("section", { cls: "panel op", id: op.operationId }, h("header", {}, h("span", { cls: "method" }, method.toUpperCase()), h("code", {}, path), h("h2", {}, op.summary)),
    op.description && h("p", {}, op.description),
    op.parameters?.length ? h("ul", { cls: "properties" }, op.parameters.map((p) => h("li", {}, h("div", {}, h("code", {}, p.name), p.required && h("span", { cls: "must" }, "required"), h("span", { cls: "type" }, typeOf(p.schema) + (p.schema.default !== undefined ? `; default ${JSON.stringify(p.schema.default)}` : ""))), h("div", {}, p.description ?? p.schema.description ?? "")))) : null,
    (examples.length ? examples : [null]).map((e) => h("div", {}, h("pre", { tabindex: "0" }, curl(e)), h("div", { cls: "row end" }, h("button", { cls: "quiet small", type: "button", on: { click: () => copy(curl(e), "curl") } }, "Copy")))),
    sent && h("details", { open: true }, h("summary", {}, "Request"), body(doc, nameOf(sent), sent)),
    got && h("details", {}, h("summary", {}, "Answer"), body(doc, nameOf(got), got)),
    h("div", { cls: "statuses" }, Object.entries(op.responses).map(([status, r]) => h("span", { cls: "chip", title: r.description }, status))));
}

function errors(doc) {
  return h("section", { cls: "panel", id: "errors" }, h("h2", {}, "Errors"), h("p", {}, "Every error is a problem document (RFC 9457, application/problem+json) with a stable code."),
    h("div", { cls: "scroll", tabindex: "0", role: "region", "aria-label": "Table of errors" }, h("table", { cls: "errors" }, h("thead", {}, h("tr", {}, ["Code", "Status", "Meaning", "What to do"].map((t) => h("th", { scope: "col" }, t)))),
      h("tbody", {}, doc["x-errors"].map((e) => h("tr", { id: `error-${e.code}` }, h("td", {}, h("code", {}, e.code)), h("td", {}, e.status), h("td", {}, e.title), h("td", {}, e.remedy)))))));
}

async function start() {
  const doc = await (await fetch("/openapi.json")).json();
  const all = Object.entries(doc.paths).flatMap(([path, ops]) => Object.entries(ops).map(([method, op]) => [path, method, op])).filter(([path]) => path !== "/influence");
  $("contents").replaceChildren(h("h2", {}, "Addresses"), ...all.map(([path, method, op]) => h("a", { href: `#${op.operationId}` }, h("span", { cls: "method" }, method.toUpperCase()), path)), h("h2", {}, "More"), h("a", { href: "#errors" }, "Errors"));
  $("reference").replaceChildren(h("section", { cls: "panel" }, h("h1", {}, doc.info.title === "eogp" ? "HTTP API" : doc.info.title), h("p", {}, doc.info.description.replaceAll(/(?<!\n)\n(?!\n)/g, " "))), ...all.map((o) => operation(doc, ...o)), errors(doc));
  if (location.hash) { const target = location.hash; location.hash = ""; location.hash = target; }
}
start().catch((error) => $("reference").replaceChildren(h("p", { cls: "notice error" }, `The description cannot be loaded: ${error.message}`)));
