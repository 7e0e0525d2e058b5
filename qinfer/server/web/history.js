// The list of conversations.

import { $, h, iconButton } from "./dom.js";

const DAY = 86_400_000;

/** The sidebar; `actions`: open(id), rename(id, title), remove(id). */
export class History {
  constructor(actions) {
    this.actions = actions;
    this.list = $("conversations");
  }

  /** Show the conversations, `current` marked, those in `running` with a pulse. */
  show(conversations, current, running) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const items = [];
    let group = null;
    for (const conversation of conversations) {
      const name = age(conversation.updated);
      if (name !== group) items.push(h("li", { class: "group", text: name }));
      group = name;
      items.push(this.#item(conversation, conversation.id === current, running.has(conversation.id)));
    }
    this.list.replaceChildren(...items);
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  #item(conversation, isCurrent, isRunning) {
    const { id } = conversation;
    const title = conversation.title || "New chat";
    const open = h("button", { type: "button", class: "open", title, data: { id }, "aria-current": isCurrent ? "true" : null, on: { click: () => this.actions.open(id), dblclick: () => this.#rename(item, conversation) } },
      h("span", { text: title }));
    const item = h("li", { class: `conversation${isCurrent ? " current" : ""}${isRunning ? " running" : ""}` }, open,
      iconButton("edit", `Rename ${title}`, () => this.#rename(item, conversation)),
      iconButton("trash", `Delete ${title}`, () => this.actions.remove(id)));
    return item;
  }

  #rename(item, conversation) {
    const input = h("input", { class: "rename", "aria-label": "Title", maxlength: "80" });
    input.value = conversation.title;
    let isDone = false;
    const end = (keep) => {
      if (isDone) return;
      isDone = true;
      this.actions.rename(conversation.id, keep && input.value.trim() ? input.value.trim() : conversation.title);
      this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"]`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
      event.stopPropagation();
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
    input.focus();
  }
}

function age(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "This week";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
