// Starts the page: views, theme, menus, keys.

import { Chat } from "./chat.js";
import { $, icon, placeIcons, toast } from "./dom.js";
import { installKeyDialog } from "./keys.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { Panels } from "./panels.js";
import { installShortcuts, showHelp } from "./shortcuts.js";

const THEMES = ["system", "light", "dark"];
const VIEWS = ["chat", "live"];

placeIcons(document);
installKeyDialog();
const models = new Models();
const chat = new Chat(models);
const live = new Live($("live"));
const panels = new Panels();
chat.panels = panels;

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  document.body.dataset.view = view;
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    if (name === view) $(`tab-${name}`).setAttribute("aria-current", "page");
    else $(`tab-${name}`).removeAttribute("aria-current");
  }
  live.setShown(view === "live");
  if (view === "chat") chat.composer.focus();
}

function showTheme(value) {
  const label = `Theme: ${value}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = `${label} (t)`;
  $("theme").replaceChildren(icon(value));
}

function nextTheme() {
  const value = THEMES[(THEMES.indexOf(window.qinferTheme.read()) + 1) % THEMES.length];
  window.qinferTheme.set(value);
  showTheme(window.qinferTheme.read());
}

function showMenu(isOpen) {
  $("export-menu").hidden = !isOpen;
  $("export").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("export-menu").querySelector("button").focus();
}

function installMenu() {
  const items = [...$("export-menu").querySelectorAll("button")];
  $("export").addEventListener("click", () => showMenu($("export-menu").hidden));
  for (const item of items) {
    item.addEventListener("click", () => {
      chat.export(item.dataset.export);
      closeMenu();
    });
  }
  $("export-menu").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#export, #export-menu")) showMenu(false);
  });
}

function closeMenu() {
  if ($("export-menu").hidden) return false;
  showMenu(false);
  $("export").focus();
  return true;
}

const go = (view) => () => (location.hash = view);
const inChat = (run) => () => document.body.dataset.view === "chat" && run();

installMenu();
installShortcuts([
  ["n", "New chat", () => (go("chat")(), chat.startNew())],
  ["/", "To the message box", () => (go("chat")(), chat.composer.focus())],
  ["r", "Regenerate the last answer", inChat(() => chat.regenerateLast())],
  ["u", "Edit your last message", inChat(() => chat.editLast())],
  ["h", "Conversations", inChat(() => panels.toggle("history"))],
  ["p", "Parameters", inChat(() => panels.toggle("params"))],
  ["e", "Export", inChat(() => showMenu(true))],
  ["c", "Chat", go("chat")],
  ["l", "Live figures", go("live")],
  ["t", "Theme", nextTheme],
  ["?", "This list", showHelp],
], () => closeMenu() || panels.closeDrawer() || chat.stop());
$("theme").addEventListener("click", nextTheme);
window.addEventListener("hashchange", showView);
showTheme(window.qinferTheme.read());
showView();
models.load().catch((error) => toast(error.message));
