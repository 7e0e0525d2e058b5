// Building elements. Text only ever becomes text: nothing here, or anywhere in the page, parses
// a string as markup, and the Content-Security-Policy (Trusted Types) would refuse it.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  panel: "M4 6h16M4 12h16M4 18h10",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5v5M8 13.5v5",
  download: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 20h14",
  send: "M12 19V5M5.5 11.5L12 5l6.5 6.5",
  stop: "M8 8h8v8H8z",
  down: "M12 5v14M5.5 12.5L12 19l6.5-6.5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 12a8 8 0 1 1-2.4-5.7M20 4v4h-4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M11 10.5h.01M15 10.5h.01M8 14h8",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M18.4 5.6l-1.1 1.1M6.7 17.3l-1.1 1.1",
  dark: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  warning: "M12 4l9 16H3zM12 10v4.5M12 17.4v.1",
};

/** Return the element with this id. */
export const $ = (id) => document.getElementById(id);

/**
 * Return a new element. `attributes`: `class`, `text`, `on` (event -> handler), `data`, properties
 * by name for true/false, anything else as an attribute; null and undefined are left out.
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return a new SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [type, run] of Object.entries(value)) element.addEventListener(type, run);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return an icon, hidden from screen readers: its button carries the name. */
export function icon(name) {
  return s("svg", { viewBox: "0 0 24 24", class: "glyph", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** Return a button that shows only an icon. */
export function iconButton(name, label, run, attributes = {}) {
  return h("button", { type: "button", class: "icon small", "aria-label": label, title: label, on: { click: run }, ...attributes }, icon(name));
}

/** Put the icons into the static elements that name one. */
export function placeIcons(root) {
  for (const element of root.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
}

/** Show a short message; with `action` [label, handler] it stays longer and can be answered. */
export function toast(text, action) {
  const item = h("div", { class: "toast" }, h("span", { text }));
  const close = () => item.remove();
  if (action) {
    const [label, run] = action;
    item.append(h("button", { type: "button", class: "text", text: label, on: { click: () => (close(), run()) } }));
  }
  $("toasts").append(item);
  while ($("toasts").children.length > 3) $("toasts").firstChild.remove();
  setTimeout(close, action ? 8000 : 2500);
}

/** Tell a screen reader something that the eye sees anyway. */
export function announce(text) {
  $("announce").textContent = text;
}

/** Copy text; where the clipboard is closed (plain HTTP to another machine), the old way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
}
