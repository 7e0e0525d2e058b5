// Keys. Single letters work outside text fields only, and can be switched off.

import { $, h } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const FIXED = [
  ["Enter", "Send"],
  ["Shift + Enter", "New line"],
  ["Esc", "Stop the answer; close what is open"],
];

/** Install the keys; `keys`: [key, what it does, run]. `escape()` is called for Esc. */
export function installShortcuts(keys, escape) {
  const byKey = new Map(keys.map(([key, , run]) => [key, run]));
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") escape();
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || !loadSettings().singleKeys) return;
    const run = byKey.get(event.key);
    if (!run) return;
    event.preventDefault();
    run();
  });
  $("keys").append(...[...FIXED, ...keys].flatMap(([key, text]) => [
    h("dt", {}, ...key.split(" + ").flatMap((part, i) => [i ? " + " : "", h("kbd", { text: part })])),
    h("dd", { text }),
  ]));
  $("single-keys").checked = loadSettings().singleKeys;
  $("single-keys").addEventListener("change", () => saveSettings({ ...loadSettings(), singleKeys: $("single-keys").checked }));
  $("help").addEventListener("click", showHelp);
  $("help-close").addEventListener("click", () => $("help-dialog").close());
}

export function showHelp() {
  $("help-dialog").showModal();
}

function isTyping(element) {
  return element.matches("textarea, select, input:not([type=checkbox]):not([type=range])");
}
