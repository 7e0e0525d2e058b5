// The chat: which conversation is shown, what runs, and what the buttons do.

import { ApiError } from "./api.js";
import { Composer } from "./composer.js";
import { $, announce, toast } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { History } from "./history.js";
import { messageView } from "./messages.js";
import { ParamsPanel, requestFields } from "./params.js";
import { Scroller } from "./scroller.js";
import { deleteConversation, loadConversations, loadSettings, newConversation, onOtherTab, saveConversation, saveSettings, shownVersion, textOf } from "./store.js";
import { streamChat } from "./stream.js";
import { welcome } from "./welcome.js";

const SAVE_EVERY = 1000; // ms, while an answer grows
const LEAVING = 2000; // ms
const TITLE_CHARS = 48;

export class Chat {
  /** `models`: see models.js. */
  constructor(models) {
    this.models = models;
    this.running = new Map(); // conversation id -> AbortController
    this.views = []; // of the messages shown
    this.conversations = loadConversations();
    this.scroller = new Scroller($("scroll"), $("latest"));
    this.composer = new Composer({ send: (text) => this.send(text), stop: () => this.stop() });
    this.params = new ParamsPanel((params) => this.#setParams(params));
    this.history = new History({ open: (id) => this.open(id), rename: (id, title) => this.#rename(id, title), remove: (id) => this.#remove(id) });
    this.actions = {
      resend: (message, text) => this.#resend(message, text),
      regenerate: (message) => this.#regenerate(message),
      show: (message, index) => this.#showVersion(message, index),
    };
    $("new-chat").addEventListener("click", () => this.startNew());
    onOtherTab((id, conversation) => this.#changedElsewhere(id, conversation));
    // A browser that leaves the page breaks its connections off before it says so (pagehide).
    window.addEventListener("beforeunload", () => (this.leftAt = performance.now()));
    window.addEventListener("pagehide", () => this.#leave());
    models.onChange(() => this.#showState());
    this.startNew();
  }

  /** Go to a fresh conversation, which is kept once it has a message. */
  startNew() {
    this.panels?.closeDrawer();
    this.#show(newConversation(loadSettings().params));
    this.composer.focus();
  }

  open(id) {
    const conversation = this.conversations.find((item) => item.id === id);
    // A double click, which renames, is a click on the open one too: its entry must stay the same.
    if (conversation && conversation !== this.current) this.#show(conversation);
    if (matchMedia("(max-width: 800px)").matches) this.panels?.closeDrawer();
    else this.composer.focus();
  }

  send(text) {
    const conversation = this.current;
    if (this.running.has(conversation.id)) return;
    if (!conversation.title) conversation.title = titleOf(text);
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    conversation.messages.push({ role: "user", content: text });
    this.#answer(conversation, { role: "assistant", versions: [], shown: 0 });
  }

  /** Stop the answer that grows here; returns whether there was one. */
  stop() {
    const run = this.running.get(this.current.id);
    run?.abort();
    return run !== undefined;
  }

  regenerateLast() {
    const last = this.current.messages.at(-1);
    if (last?.role === "assistant") this.#regenerate(last);
  }

  editLast() {
    const index = this.current.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0 && !this.running.has(this.current.id)) this.views[index].edit();
  }

  export(kind) {
    if (kind === "all") exportJson(this.conversations, "qinfer-chats");
    else if (this.current.messages.length === 0) toast("Nothing to export yet");
    else if (kind === "json") exportJson([this.current], this.current.title);
    else exportMarkdown(this.current);
  }

  #resend(message, text) {
    const conversation = this.current;
    if (this.running.has(conversation.id)) return;
    const index = conversation.messages.indexOf(message);
    this.#cut(conversation, index);
    conversation.messages.push({ role: "user", content: text });
    this.#answer(conversation, { role: "assistant", versions: [], shown: 0 });
  }

  #regenerate(message) {
    const conversation = this.current;
    if (this.running.has(conversation.id)) return;
    const index = conversation.messages.indexOf(message);
    this.#cut(conversation, index);
    this.#answer(conversation, message);
  }

  /** Take off a message and all after it; what is lost can be had back. (A lone answer is not: it stays a version.) */
  #cut(conversation, index) {
    const before = [...conversation.messages];
    conversation.messages.length = index;
    if (before.length - index < 2) return;
    toast("Earlier messages were replaced", ["Undo", () => {
      this.running.get(conversation.id)?.abort();
      conversation.messages = before;
      saveConversation(conversation);
      if (this.current === conversation) this.#show(conversation);
    }]);
  }

  async #answer(conversation, message) {
    const version = { content: "", finish: null, stats: null, error: null, running: true };
    message.versions.push(version);
    message.shown = message.versions.length - 1;
    const body = this.#request(conversation);
    conversation.messages.push(message);
    conversation.updated = Date.now();
    const control = new AbortController();
    this.running.set(conversation.id, control);
    this.#sort();
    this.#show(conversation);
    this.scroller.toEnd();
    announce("Answering");
    try {
      const { finish, stats } = await streamChat(body, { signal: control.signal, onText: (text) => this.#grow(conversation, version, text) });
      Object.assign(version, { finish, stats });
      announce(`Answer finished, ${stats.tokens ?? "some"} tokens`);
    } catch (error) {
      const isStopped = error.name === "AbortError" || performance.now() - (this.leftAt ?? -Infinity) < LEAVING;
      if (isStopped) version.finish = "stopped";
      else version.error = described(error);
      announce(isStopped ? "Stopped" : `Error: ${version.error.message}`);
    } finally {
      delete version.running;
      this.running.delete(conversation.id);
      this.#viewOf(message)?.update();
      this.#save(conversation);
      this.#showState();
      this.scroller.follow();
    }
  }

  #request(conversation) {
    const messages = conversation.messages.map((message) => ({ role: message.role, content: textOf(message) }));
    // An answer that failed at once is no part of the conversation.
    const said = messages.filter((message) => message.role === "user" || message.content);
    if (conversation.params.system) said.unshift({ role: "system", content: conversation.params.system });
    const fields = requestFields(conversation.params);
    return this.models.current ? { model: this.models.current.id, messages: said, ...fields } : { messages: said, ...fields };
  }

  /** Add text to an answer; the page is brought up to date once a frame, the store once a second. */
  #grow(conversation, version, text) {
    version.content += text;
    const now = Date.now();
    if (now - (this.savedAt ?? 0) > SAVE_EVERY) this.#save(conversation);
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      for (const view of this.views) if (view.isRunning) view.grow();
      this.scroller.follow();
    });
  }

  #showVersion(message, index) {
    if (!(index in message.versions) || this.running.has(this.current.id)) return;
    message.shown = index;
    this.#viewOf(message)?.update();
    this.#save(this.current);
  }

  #viewOf(message) {
    return this.views.find((view) => view.message === message);
  }

  #show(conversation) {
    this.current = conversation;
    this.views = conversation.messages.map((message) => messageView(message, this.actions));
    $("messages").replaceChildren(...this.views.map((view) => view.element));
    $("messages").classList.toggle("empty", this.views.length === 0);
    this.params.show(conversation.params);
    this.#showState();
    this.scroller.toEnd();
  }

  /** Show what depends on the state around the messages: list, buttons, context, title. */
  #showState() {
    const conversation = this.current;
    this.history.show(this.conversations, conversation.id, this.running);
    this.composer.show({ isRunning: this.running.has(conversation.id), model: this.models.current, used: usedTokens(conversation) });
    document.title = conversation.title ? `${conversation.title} · qinfer` : "qinfer";
    if (conversation.messages.length === 0) $("messages").replaceChildren(welcome(this.models.current, (text) => this.composer.fill(text)));
  }

  #setParams(params) {
    this.current.params = params;
    saveSettings({ ...loadSettings(), params });
    if (this.conversations.includes(this.current)) this.#save(this.current);
  }

  #rename(id, title) {
    const conversation = this.conversations.find((item) => item.id === id);
    if (!conversation) return;
    conversation.title = title;
    this.#save(conversation);
    this.#showState();
  }

  #remove(id) {
    const conversation = this.conversations.find((item) => item.id === id);
    this.running.get(id)?.abort();
    this.conversations = this.conversations.filter((item) => item.id !== id);
    deleteConversation(id);
    if (this.current.id === id) this.#show(newConversation(loadSettings().params));
    else this.#showState();
    toast("Conversation deleted", ["Undo", () => {
      this.conversations.push(conversation);
      this.#save(conversation);
      this.#sort();
      this.#show(conversation);
    }]);
  }

  #changedElsewhere(id, conversation) {
    if (this.running.has(id)) return; // ours is newer
    this.conversations = this.conversations.filter((item) => item.id !== id);
    if (conversation) this.conversations.push(conversation);
    this.#sort();
    if (conversation && this.current.id === id) this.#show(conversation);
    else this.#showState();
  }

  #sort() {
    this.conversations.sort((a, b) => b.updated - a.updated);
  }

  #save(conversation) {
    this.savedAt = Date.now();
    // Deleted while its answer was still coming: it stays deleted.
    const isKept = !this.conversations.includes(conversation) || saveConversation(conversation);
    if (!isKept && !this.wasFull) {
      this.wasFull = true;
      toast("This browser keeps no more: export what matters, or delete conversations", ["Export", () => this.export("all")]);
    }
  }

  /** Keep what has come so far; nobody will read the rest. */
  #leave() {
    for (const [id, control] of this.running) {
      const conversation = this.conversations.find((item) => item.id === id);
      if (conversation) saveConversation(conversation);
      control.abort();
    }
  }
}

function described(error) {
  if (error instanceof ApiError) return { message: error.message, code: error.code ?? null, status: error.status, retryAfter: error.retryAfter };
  console.error(error);
  return { message: `The answer could not be read: ${error.message}`, code: null, status: 0, retryAfter: null };
}

function titleOf(text) {
  const line = text.split("\n").find((item) => item.trim())?.trim() ?? "";
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS).trimEnd()}…` : line;
}

function usedTokens(conversation) {
  const last = conversation.messages.at(-1);
  const stats = last?.role === "assistant" ? shownVersion(last).stats : null;
  return stats?.promptTokens ? stats.promptTokens + (stats.tokens ?? 0) : 0;
}
