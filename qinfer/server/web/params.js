// The parameters panel. A field left empty is not sent: the server's own default applies.

import { $, h } from "./dom.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, neutral: 1, help: "0 always takes the likeliest token; higher is more varied." },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01, neutral: 1, help: "Only the likeliest tokens that together reach this share." },
  { name: "top_k", label: "Top-k", min: 1, max: 200, step: 1, neutral: 200, integer: true, limit: 1e6, help: "Only this many of the likeliest tokens." },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, neutral: 0, help: "Only tokens at least this likely, relative to the likeliest." },
  { name: "max_tokens", label: "Max tokens", min: 1, integer: true, help: "The answer's length at most; empty uses the room there is." },
  { name: "seed", label: "Seed", min: 0, integer: true, help: "The same seed gives the same answer." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, neutral: 1, low: 0.01, limit: 1e3, help: "Above 1 avoids what stands in prompt and answer." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, neutral: 0, help: "Avoids tokens that the answer already holds." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, neutral: 0, help: "Avoids tokens the more often the answer holds them." },
];

/** Return the part of a request body that these parameters make. */
export function requestFields(params) {
  const body = {};
  for (const field of FIELDS) if (valid(field, params[field.name])) body[field.name] = params[field.name];
  return body;
}

const least = (field) => field.low ?? field.min;
const most = (field) => field.limit ?? field.max ?? Number.MAX_SAFE_INTEGER;

function valid(field, value) {
  return Number.isFinite(value) && value >= least(field) && value <= most(field) && (!field.integer || Number.isInteger(value));
}

/** The panel's fields, bound to one conversation's parameters at a time. */
export class ParamsPanel {
  /** `onChange(params)` is called after each edit. */
  constructor(onChange) {
    this.onChange = onChange;
    this.params = {};
    this.system = h("textarea", { id: "param-system", rows: "3", placeholder: "Empty: none", on: { input: () => this.#set("system", this.system.value || null) } });
    this.rows = FIELDS.map((field) => new Row(field, (value) => this.#set(field.name, value)));
    $("fields").append(
      h("div", { class: "field" }, h("label", { for: "param-system", text: "System prompt" }), this.system),
      ...this.rows.map((row) => row.element),
    );
    $("params-reset").addEventListener("click", () => {
      this.show({});
      this.onChange({});
    });
  }

  /** Show these parameters. */
  show(params) {
    this.params = { ...params };
    this.system.value = params.system ?? "";
    for (const row of this.rows) row.show(params[row.field.name]);
    this.#count();
  }

  #set(name, value) {
    if (value === null) delete this.params[name];
    else this.params[name] = value;
    this.#count();
    this.onChange({ ...this.params });
  }

  #count() {
    const used = Object.keys(this.params).length;
    $("params-count").hidden = used === 0;
    $("params-count").textContent = used;
    $("params-count").title = `${used} set`;
  }
}

class Row {
  constructor(field, onValue) {
    this.field = field;
    const id = `param-${field.name}`;
    this.input = h("input", {
      id, type: "number", inputmode: field.integer ? "numeric" : "decimal", placeholder: "default",
      min: least(field), max: field.limit ?? field.max, step: field.integer ? 1 : "any", "aria-describedby": `${id}-help`,
      on: { input: () => this.#typed(onValue) },
    });
    this.slider = field.max === undefined ? null : h("input", {
      type: "range", min: field.min, max: field.max, step: field.step, tabindex: "-1", "aria-hidden": "true",
      on: { input: () => { this.input.value = this.slider.value; this.#typed(onValue); } },
    });
    this.element = h("div", { class: "field", data: { field: field.name } },
      h("label", { for: id, text: field.label }), this.input, this.slider, h("p", { id: `${id}-help`, class: "help", text: field.help }));
    this.show(undefined);
  }

  show(value) {
    this.input.value = value ?? "";
    this.#reflect(value ?? null);
  }

  #typed(onValue) {
    const text = this.input.value;
    const value = text === "" ? null : Number(text);
    const good = !this.input.validity.badInput && (value === null || valid(this.field, value));
    this.#reflect(good ? value : null);
    this.input.setAttribute("aria-invalid", String(!good));
    if (good) onValue(value);
  }

  #reflect(value) {
    this.input.removeAttribute("aria-invalid");
    this.element.classList.toggle("set", value !== null);
    if (this.slider) this.slider.value = value ?? this.field.neutral;
  }
}
