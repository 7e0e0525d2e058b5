// Conversations as files.

import { h } from "./dom.js";
import { shownVersion } from "./store.js";

/** Save one conversation as Markdown. */
export function exportMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Chat"}`, `_${new Date(conversation.created).toISOString()}_`];
  if (conversation.params.system) parts.push("## System", conversation.params.system);
  for (const message of conversation.messages) {
    if (message.role === "user") {
      parts.push("## User", message.content);
      continue;
    }
    const version = shownVersion(message);
    parts.push("## Assistant", version.content || "_no answer_");
    if (version.error) parts.push(`> Error: ${version.error.message}`);
  }
  save(`${slug(conversation.title)}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

/** Save conversations as JSON: with parameters, all versions of the answers, and figures. */
export function exportJson(conversations, name) {
  const document = { kind: "qinfer_chats", format_version: 1, exported: new Date().toISOString(), conversations };
  save(`${slug(name)}.json`, "application/json", `${JSON.stringify(document, null, 2)}\n`);
}

function slug(title) {
  const words = title.toLowerCase().normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-");
  return words.replace(/^-+|-+$/g, "").slice(0, 60) || "chat";
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
