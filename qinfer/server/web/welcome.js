// What a new conversation shows.

import { h } from "./dom.js";
import { count } from "./format.js";

const IDEAS = [
  ["Explain simply", "Explain in simple words why the sky is blue."],
  ["Write code", "Write a Python function that tells whether a text is a palindrome, with two examples."],
  ["Compare", "Make a table that compares tea and coffee: taste, caffeine, preparation."],
  ["Tell a story", "Tell a very short story about a lighthouse keeper and a whale."],
];

/** Return the greeting; `choose(text)` is called with the idea that was clicked. */
export function welcome(model, choose) {
  const limit = model?.max_model_len ? `It reads and writes up to ${count(model.max_model_len)} tokens at a time.` : null;
  return h("div", { class: "welcome" },
    h("h1", { text: model ? model.label : "qinfer" }),
    h("p", { text: ["Runs on this server. Nothing is sent elsewhere.", limit].filter(Boolean).join(" ") }),
    h("div", { class: "ideas" }, ...IDEAS.map(([name, text]) =>
      h("button", { type: "button", class: "idea", on: { click: () => choose(text) } }, h("strong", { text: name }), h("span", { text })))));
}
