// Light or dark: the system's choice until the reader makes one.
const root = document.documentElement;
const read = () => { try { return localStorage.getItem("eogp-theme"); } catch { return null; } };
const chosen = read();
if (chosen) root.dataset.theme = chosen;

export function bindTheme(button) {
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("eogp-theme", root.dataset.theme); } catch { /* private window: not remembered */ }
  });
}
const button = document.getElementById("theme");
if (button) bindTheme(button);
