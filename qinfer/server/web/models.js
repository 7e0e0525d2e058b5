// Which models the server has, and which one is used.

import { getJson } from "./api.js";
import { $, h } from "./dom.js";

export class Models {
  list = []; // {id, label, max_model_len}
  current = null;
  #listeners = [];

  onChange(run) {
    this.#listeners.push(run);
  }

  /** Ask the server. Throws ApiError. */
  async load() {
    const { data } = await getJson("v1/models");
    this.list = data.map((card) => ({ ...card, label: card.id.replace(/\/+$/, "").split("/").at(-1) }));
    this.#choose(this.list[0] ?? null);
    const hasChoice = this.list.length > 1;
    $("model").hidden = !hasChoice;
    $("model-name").hidden = hasChoice;
    $("model").replaceChildren(...this.list.map((model) => h("option", { value: model.id, text: model.label })));
    $("model").onchange = () => this.#choose(this.list.find((model) => model.id === $("model").value));
  }

  #choose(model) {
    this.current = model;
    $("model-name").textContent = model?.label ?? "";
    $("model-name").title = model?.id ?? "";
    for (const run of this.#listeners) run();
  }
}
