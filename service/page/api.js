// The HTTP API. Every failure becomes a Problem: {status, code, title, detail, request_id, retry}.
let key = null;
try { key = sessionStorage.getItem("eogp-key"); } catch { /* no storage: the key lives as long as the page */ }

export class Problem extends Error {
  constructor(body, retry) {
    super(body.detail ?? "The request failed.");
    Object.assign(this, body);
    this.retry = retry;
  }
}

export function setKey(value) {
  key = value || null;
  try { value ? sessionStorage.setItem("eogp-key", value) : sessionStorage.removeItem("eogp-key"); } catch { /* as above */ }
}
export const hasKey = () => key !== null;

async function call(path, options = {}) {
  const headers = { ...(options.headers ?? {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ status: 0, code: "unreachable", title: "The server cannot be reached", detail: "No answer came. It may be restarting; try again." }, 3);
  }
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({ status: response.status, code: "unknown", title: `Status ${response.status}`, detail: response.statusText }));
  throw new Problem(body, Number(response.headers.get("Retry-After")) || null);
}

export const info = () => call("/v1/info");
export const influence = (request, signal) =>
  call("/v1/influence", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request), signal });
export const examples = (order, offset, limit) => call(`/v1/examples?${new URLSearchParams({ order, offset, limit })}`);
export const example = (id, neighbours) => call(`/v1/examples/${encodeURIComponent(id)}?neighbours=${neighbours}`);

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
export const curl = (request) =>
  [`curl ${location.origin}/v1/influence`, key ? "-H 'Authorization: Bearer YOUR_KEY'" : null, "-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(request))}`]
    .filter(Boolean).join(" \\\n  ");
