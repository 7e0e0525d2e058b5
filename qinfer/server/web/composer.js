// The message box.

import { $, icon } from "./dom.js";
import { count, percent } from "./format.js";

export class Composer {
  /** `actions`: send(text), stop(). */
  constructor(actions) {
    this.actions = actions;
    this.prompt = $("prompt");
    this.isRunning = false;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault(); // the page sends no forms
      this.#press();
    });
    this.prompt.addEventListener("input", () => this.#changed());
    this.prompt.addEventListener("keydown", (event) => this.#key(event));
    $("composer").addEventListener("click", (event) => {
      if (!event.target.closest("button, .menu")) this.prompt.focus();
    });
  }

  /** Put the cursor into the box; not on a touch screen, where it would raise the keyboard. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.prompt.focus();
  }

  /** Put text into the box, for the user to send. */
  fill(text) {
    this.prompt.value = text;
    this.#changed();
    this.focus();
  }

  /** Show whether an answer grows, whom the user writes to, and how full the context is. */
  show({ isRunning, model, used }) {
    this.isRunning = isRunning;
    this.prompt.placeholder = model ? `Message ${model.label}` : "Message";
    this.#showButton();
    const limit = model?.max_model_len;
    $("context").hidden = !used || !limit;
    if (!used || !limit) return;
    const share = Math.min(used / limit, 1);
    $("context-text").textContent = `${count(used)} / ${count(limit)}`;
    $("context").title = `${percent(share)} of the model's context is used`;
    $("context-ring").setAttribute("stroke-dasharray", `${share * 100} 100`);
    $("context").classList.toggle("full", share > 0.9);
  }

  #key(event) {
    // Enter also accepts a suggestion of an input method: that is no message yet.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.isRunning) this.#press();
  }

  #press() {
    if (this.isRunning) {
      this.actions.stop();
      return;
    }
    const text = this.prompt.value.trim();
    if (!text) return;
    this.prompt.value = "";
    this.#changed();
    this.actions.send(text);
  }

  #changed() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
    this.#showButton();
  }

  #showButton() {
    const button = $("send");
    const label = this.isRunning ? "Stop" : "Send";
    button.disabled = !this.isRunning && !this.prompt.value.trim();
    if (button.getAttribute("aria-label") === label && button.firstChild) return;
    button.setAttribute("aria-label", label);
    button.title = this.isRunning ? "Stop (Esc)" : "Send (Enter)";
    button.classList.toggle("running", this.isRunning);
    button.replaceChildren(icon(this.isRunning ? "stop" : "send"));
  }
}
