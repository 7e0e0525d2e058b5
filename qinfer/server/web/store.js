// Conversations, kept in this browser. One storage entry each, so that two tabs with different
// conversations never overwrite each other's work.
//
// A conversation: {id, title, created, updated, params, messages}. A message is {role: "user",
// content} or {role: "assistant", versions, shown}; a version is {content, finish, stats, error}.

const PREFIX = "qinfer.chat.";
const SETTINGS = "qinfer.settings";

export const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(36).padStart(2, "0")).join("");

export function newConversation(params = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, params: { ...params }, messages: [] };
}

/** Return every stored conversation, the latest first. What is damaged is left out. */
export function loadConversations() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      if (name.startsWith(PREFIX)) found.push(parse(localStorage.getItem(name)));
    }
  } catch {
    return []; // storage is switched off
  }
  return found.filter(Boolean).sort((a, b) => b.updated - a.updated);
}

/** Store a conversation; returns whether it could be. One without messages is not kept. */
export function saveConversation(conversation) {
  if (conversation.messages.length === 0) return true;
  return write(PREFIX + conversation.id, conversation);
}

export function deleteConversation(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // nothing is kept anyway
  }
}

/** Call `run(id, conversation or null)` when another tab changes a conversation. */
export function onOtherTab(run) {
  window.addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) run(event.key.slice(PREFIX.length), parse(event.newValue));
  });
}

/** Settings of the page: {params, singleKeys, history, paramsOpen}. */
export function loadSettings() {
  const defaults = { params: {}, singleKeys: true, history: true, paramsOpen: false };
  try {
    const kept = JSON.parse(localStorage.getItem(SETTINGS));
    return isObject(kept) ? { ...defaults, ...kept, params: isObject(kept.params) ? kept.params : {} } : defaults;
  } catch {
    return defaults;
  }
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value, (field, item) => (field === "running" ? undefined : item)));
    return true;
  } catch {
    return false; // full, or switched off
  }
}

function parse(text) {
  try {
    const value = JSON.parse(text);
    return isConversation(value) ? withEnds(value) : null;
  } catch {
    return null;
  }
}

/** An answer without an end was cut off: its tab was closed, or another one still gets it. */
function withEnds(conversation) {
  for (const { versions = [] } of conversation.messages) for (const version of versions) if (!version.error) version.finish ??= "stopped";
  return conversation;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function isConversation(value) {
  return (
    isObject(value) &&
    typeof value.id === "string" &&
    typeof value.title === "string" &&
    Number.isFinite(value.created) &&
    Number.isFinite(value.updated) &&
    isObject(value.params) &&
    Array.isArray(value.messages) &&
    value.messages.every(isMessage)
  );
}

function isMessage(value) {
  if (!isObject(value)) return false;
  if (value.role === "user") return typeof value.content === "string";
  return (
    value.role === "assistant" &&
    Array.isArray(value.versions) &&
    value.versions.length > 0 &&
    value.versions.every((version) => isObject(version) && typeof version.content === "string") &&
    Number.isInteger(value.shown) &&
    value.shown in value.versions
  );
}

/** The version of an answer that is shown. */
export const shownVersion = (message) => message.versions[message.shown];

/** The text of a message as the model gets it. */
export const textOf = (message) => (message.role === "user" ? message.content : shownVersion(message).content);
