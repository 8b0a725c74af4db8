// Elements without innerHTML: every text from the store or the model becomes a text node, so nothing in it can run.
export const $ = (id) => document.getElementById(id);

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name === "cls" ? "class" : name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export const number = (x, digits = 3) => {
  if (x === null || x === undefined) return "–";
  const a = Math.abs(x);
  if (a !== 0 && (a >= 1e9 || a < 1e-3)) return x.toExponential(2).replace("e+", "e");
  return x.toLocaleString("en", a >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
};
export const size = (n) => (n >= 1e9 ? `${number(n / 1e9)} B` : n >= 1e6 ? `${number(n / 1e6)} M` : n >= 1e3 ? `${number(n / 1e3)} K` : number(n, 9));
export const signed = (x) => (x > 0 ? "+" : "") + number(x).replace("-", "−");

let hide;
export function toast(text) {
  const box = $("toast");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(hide);
  hide = setTimeout(() => box.classList.remove("shown"), 2200);
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard permission, or plain http on another host
    const area = h("textarea", { cls: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(`${what} copied`);
}

export function radio(form, name, value) {
  const inputs = [...form.querySelectorAll(`input[name="${name}"]`)];
  if (value !== undefined) for (const i of inputs) i.checked = i.value === value;
  return inputs.find((i) => i.checked)?.value;
}
