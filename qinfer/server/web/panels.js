// The two side panels of the chat: columns where there is room, drawers over the chat where not.

import { $ } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const NARROW = { history: matchMedia("(max-width: 800px)"), params: matchMedia("(max-width: 1180px)") };
const SETTING = { history: "history", params: "paramsOpen" };

export class Panels {
  constructor() {
    const settings = loadSettings();
    this.open = { history: settings.history && !NARROW.history.matches, params: settings.paramsOpen && !NARROW.params.matches };
    for (const name of ["history", "params"]) {
      $(`toggle-${name}`).addEventListener("click", () => this.toggle(name));
      for (const button of document.querySelectorAll(`[data-close="${name}"]`)) button.addEventListener("click", () => this.close(name));
      NARROW[name].addEventListener("change", (event) => this.#set(name, !event.matches && loadSettings()[SETTING[name]]));
      this.#apply();
    }
    $("backdrop").addEventListener("click", () => this.closeDrawer());
  }

  toggle(name) {
    if (this.open[name]) this.close(name);
    else this.#show(name);
  }

  close(name) {
    const hadFocus = $(name).contains(document.activeElement);
    this.#choose(name, false);
    if (hadFocus) $(`toggle-${name}`).focus();
  }

  /** Close a panel that lies over the chat; returns whether there was one. */
  closeDrawer() {
    const name = this.#drawer();
    if (name) this.close(name);
    return name !== undefined;
  }

  #show(name) {
    for (const other of ["history", "params"]) if (other !== name && NARROW[other].matches) this.#set(other, false);
    this.#choose(name, true);
    if (NARROW[name].matches || name === "params") $(name).querySelector("button, textarea, input").focus();
  }

  #choose(name, isOpen) {
    this.#set(name, isOpen);
    if (!NARROW[name].matches) saveSettings({ ...loadSettings(), [SETTING[name]]: isOpen });
  }

  #set(name, isOpen) {
    this.open[name] = isOpen;
    this.#apply();
  }

  #drawer() {
    return ["history", "params"].find((name) => this.open[name] && NARROW[name].matches);
  }

  #apply() {
    const drawer = this.#drawer();
    for (const name of ["history", "params"]) {
      $("chat").classList.toggle(`with-${name}`, this.open[name]);
      $(name).inert = !this.open[name];
      $(`toggle-${name}`).setAttribute("aria-expanded", String(this.open[name]));
    }
    $("backdrop").hidden = !drawer;
    $("thread").inert = Boolean(drawer);
  }
}
