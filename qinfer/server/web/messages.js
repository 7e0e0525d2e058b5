// How messages look: one view each, updated in place while an answer grows.

import { copy, h, icon, iconButton, toast } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";
import { MarkdownView } from "./markdown.js";
import { shownVersion, textOf } from "./store.js";

const ENDS = { length: "cut at the token limit", abort: "stopped", stopped: "stopped" };

/** Return the view of a message; `actions` are the chat's: resend, regenerate, show, retry. */
export function messageView(message, actions) {
  return message.role === "user" ? new UserView(message, actions) : new AnswerView(message, actions);
}

class UserView {
  isRunning = false;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = h("article", { class: "message user", "aria-label": "You" });
    this.update();
  }

  update() {
    this.element.classList.remove("editing");
    this.element.replaceChildren(
      h("div", { class: "bubble", text: this.message.content }),
      h("div", { class: "actions" },
        iconButton("edit", "Edit and resend", () => this.edit()),
        iconButton("copy", "Copy message", () => copied(this.message.content))),
    );
  }

  edit() {
    const area = h("textarea", { "aria-label": "Edit message", rows: String(Math.min(12, this.message.content.split("\n").length + 1)) });
    area.value = this.message.content;
    const leave = () => {
      this.update();
      this.element.querySelector("button")?.focus();
    };
    const resend = () => (area.value.trim() ? this.actions.resend(this.message, area.value.trim()) : area.focus());
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        resend();
      }
    });
    this.element.classList.add("editing");
    this.element.replaceChildren(
      h("div", { class: "editor" }, area,
        h("div", { class: "row" },
          h("button", { type: "button", class: "button", text: "Cancel", on: { click: leave } }),
          h("button", { type: "button", class: "button primary", text: "Resend", on: { click: resend } }))),
    );
    area.focus();
  }
}

class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thought = null;
    this.body = h("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.body);
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: "message answer", "aria-label": "Answer" }, this.body, this.foot);
    this.update();
  }

  get isRunning() {
    return Boolean(shownVersion(this.message).running);
  }

  /** Show the text, and what belongs to an answer that has ended. */
  update() {
    const version = shownVersion(this.message);
    this.grow();
    const parts = [];
    if (version.error) parts.push(this.#error(version.error));
    if (!this.isRunning) parts.push(h("div", { class: "foot-row" }, this.#actions(), this.#figures(version)));
    this.foot.replaceChildren(...parts);
  }

  /** Show the text as far as it has come. */
  grow() {
    const version = shownVersion(this.message);
    const { thought, rest, isThinking } = splitThought(version.content);
    this.#showThought(thought, isThinking && this.isRunning);
    this.markdown.render(rest);
    this.element.classList.toggle("waiting", this.isRunning && !version.content);
    this.element.setAttribute("aria-busy", String(this.isRunning));
  }

  #showThought(text, isOpen) {
    if (text === null) {
      this.thought?.element.remove();
      this.thought = null;
      return;
    }
    if (!this.thought) {
      const body = h("div", { class: "markdown" });
      const title = h("summary");
      this.thought = { title, view: new MarkdownView(body), element: h("details", { class: "thought" }, title, body) };
      this.element.prepend(this.thought.element);
    }
    this.thought.title.textContent = isOpen ? "Thinking…" : "Thoughts";
    this.thought.view.render(text);
  }

  #error(error) {
    const wait = error.retryAfter ? ` Try again in ${Math.ceil(error.retryAfter)} s.` : "";
    return h("div", { class: "failure", role: "alert" }, icon("warning"),
      h("div", {}, h("p", { text: error.message + wait }), error.code ? h("p", { class: "code-name", text: error.code }) : null),
      h("button", { type: "button", class: "button", text: "Try again", on: { click: () => this.actions.regenerate(this.message) } }));
  }

  #actions() {
    const { versions, shown } = this.message;
    const turn = (by) => () => this.actions.show(this.message, shown + by);
    const pager = versions.length < 2 ? [] : [
      iconButton("left", "Previous answer", turn(-1), { disabled: shown === 0 }),
      h("span", { class: "pages", text: `${shown + 1} / ${versions.length}` }),
      iconButton("right", "Next answer", turn(1), { disabled: shown === versions.length - 1 }),
    ];
    return h("div", { class: "actions" },
      ...pager,
      iconButton("copy", "Copy answer", () => copied(textOf(this.message))),
      iconButton("again", "Regenerate", () => this.actions.regenerate(this.message)));
  }

  #figures({ stats, finish }) {
    const parts = [];
    if (stats?.rate) parts.push(figure(`${number(stats.rate)} tok/s`, "tokens per second after the first", "rate"));
    if (stats?.ttft !== null && stats?.ttft !== undefined) parts.push(figure(`first after ${seconds(stats.ttft)}`, "time to first token", "ttft"));
    if (stats?.tokens) parts.push(figure(`${count(stats.tokens)} tokens`, promptNote(stats), "tokens"));
    if (ENDS[finish]) parts.push(figure(ENDS[finish], "why the answer ended", "end"));
    return h("div", { class: "figures" }, ...parts);
  }
}

function figure(text, title, name) {
  return h("span", { text, title, data: { figure: name } });
}

function promptNote({ promptTokens, cachedTokens }) {
  if (!promptTokens) return "tokens of the answer";
  const cached = cachedTokens ? `, ${percent(cachedTokens / promptTokens)} from the cache` : "";
  return `after a prompt of ${count(promptTokens)} tokens${cached}`;
}

async function copied(text) {
  await copy(text);
  toast("Copied");
}

/** Split off what a reasoning model thinks aloud before its answer. */
export function splitThought(text) {
  const start = /^\s*<think>\n?/.exec(text);
  if (!start) return { thought: null, rest: text, isThinking: false };
  const end = text.indexOf("</think>", start[0].length);
  if (end < 0) return { thought: text.slice(start[0].length), rest: "", isThinking: true };
  const thought = text.slice(start[0].length, end).trim();
  return { thought: thought || null, rest: text.slice(end + "</think>".length), isThinking: false };
}
