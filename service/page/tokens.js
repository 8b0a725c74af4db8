// Tokens as coloured text. Unsigned: how much a position carries. Signed: for (proponent's colour) or against (opponent's).
import { h, number, signed } from "./dom.js";

const shown = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥");

export function tokenLine(tokens, attributes = {}) {
  const spans = tokens.map((t) => h("span", { cls: t.target ? "token target" : "token" }, shown(t.text)));
  return h("p", { cls: "tokens", ...attributes }, spans);
}

export function paint(line, values, { isSigned, label }) {
  const spans = line.querySelectorAll(".token");
  const top = Math.max(...values.map(Math.abs), Number.MIN_VALUE);
  spans.forEach((span, i) => {
    const value = values[i] ?? 0;
    const alpha = (0.56 * Math.sqrt(Math.abs(value) / top)).toFixed(3);
    const hue = !isSigned ? "--carry-rgb" : value >= 0 ? "--pro-rgb" : "--opp-rgb";
    span.style.backgroundColor = Math.abs(value) / top < 0.002 ? "transparent" : `rgb(var(${hue}) / ${alpha})`;
    span.title = `${label}: ${isSigned ? signed(value) : number(value)}`;
  });
}

// For those who do not see colours: the strongest tokens in words.
export function inWords(tokens, values) {
  const total = values.reduce((sum, v) => sum + Math.abs(v), 0) || 1;
  return values.map((v, i) => [Math.abs(v) / total, tokens[i].text.trim() || "space", v])
    .sort((a, b) => b[0] - a[0]).slice(0, 4)
    .map(([share, text, v]) => `${text} ${Math.round(share * 100)} %${v < 0 ? " against" : ""}`).join(", ");
}
