// Inline Markdown to DOM nodes: code, emphasis, strikethrough, links, line breaks, bare URLs.
// CommonMark's delimiter algorithm, in time linear in the text. HTML stays text; images become
// links, for the page loads nothing from elsewhere.

import { h } from "./dom.js";

const MAX_NESTING = 24; // of elements; deeper markup is shown without its effect
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[\]!<&\n]|https?:/g; // where something could begin
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–" };

/** Return the nodes of one paragraph's text. */
export function inline(text) {
  return new Inline(text).nodes();
}

/** Return the address if a link may lead there, else null: no javascript:, no data:. */
export function safeUrl(address) {
  try {
    const url = new URL(address, "invalid:");
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative addresses too: an answer knows nothing of this server's pages
  }
}

// Tokens: {text} | {node} | {mark, count, opens, closes, before: [tags], after: [tags]}
//       | {bracket: "[" or "![", active}
class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.tokens = [];
    this.brackets = []; // indices of open brackets in tokens
    this.noCode = new Set(); // lengths of backtick runs that are known to have no end
  }

  nodes() {
    while (this.at < this.text.length) this.#next();
    for (const index of this.brackets) this.tokens[index] = { text: this.tokens[index].bracket };
    return build(this.tokens);
  }

  #next() {
    SPECIAL.lastIndex = this.at;
    const match = SPECIAL.exec(this.text);
    const end = match ? match.index : this.text.length;
    if (end > this.at) this.#text(this.text.slice(this.at, end));
    this.at = end;
    if (!match) return;
    const handlers = { "\\": this.#escape, "`": this.#code, "*": this.#run, _: this.#run, "~": this.#run, "[": this.#open, "!": this.#image, "]": this.#close, "<": this.#angle, "&": this.#entity, "\n": this.#newline, h: this.#bareUrl };
    if (!handlers[match[0][0]].call(this)) {
      this.#text(this.text[this.at]);
      this.at += 1;
    }
  }

  #text(text) {
    const last = this.tokens.at(-1);
    if (last?.text !== undefined) last.text += text;
    else this.tokens.push({ text });
  }

  #escape() {
    const following = this.text[this.at + 1];
    if (following === "\n") {
      this.tokens.push({ node: h("br") });
    } else if (following !== undefined && ESCAPABLE.test(following)) {
      this.#text(following);
    } else {
      return false;
    }
    this.at += 2;
    return true;
  }

  #newline() {
    const last = this.tokens.at(-1);
    if (last?.text !== undefined) last.text = last.text.replace(/ +$/, "");
    this.tokens.push({ node: h("br") });
    this.at += 1;
    while (this.text[this.at] === " ") this.at += 1;
    return true;
  }

  #code() {
    const length = runLength(this.text, this.at);
    const start = this.at + length;
    const end = this.noCode.has(length) ? -1 : closingRun(this.text, start, length);
    if (end < 0) {
      this.noCode.add(length);
      this.#text(this.text.slice(this.at, start));
      this.at = start;
      return true;
    }
    let code = this.text.slice(start, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.tokens.push({ node: h("code", { text: code }) });
    this.at = end + length;
    return true;
  }

  #run() {
    const mark = this.text[this.at];
    const count = runLength(this.text, this.at);
    const before = characterBefore(this.text, this.at);
    const after = characterAt(this.text, this.at + count);
    const left = flanks(after, before);
    const right = flanks(before, after);
    const word = mark === "_";
    this.tokens.push({
      mark,
      count: mark === "~" && count !== 2 ? 0 : count,
      text: mark === "~" && count !== 2 ? mark.repeat(count) : undefined,
      opens: left && (!word || !right || isPunctuation(before)),
      closes: right && (!word || !left || isPunctuation(after)),
      length: count,
      before: [],
      after: [],
    });
    this.at += count;
    return true;
  }

  #open() {
    this.brackets.push(this.tokens.length);
    this.tokens.push({ bracket: "[", active: true, start: this.at + 1 });
    this.at += 1;
    return true;
  }

  #image() {
    if (this.text[this.at + 1] !== "[") return false;
    this.brackets.push(this.tokens.length);
    this.tokens.push({ bracket: "![", active: true, start: this.at + 2 });
    this.at += 2;
    return true;
  }

  #close() {
    const index = this.brackets.pop();
    if (index === undefined) return false;
    const opener = this.tokens[index];
    const target = opener.active && this.text[this.at + 1] === "(" ? linkTarget(this.text, this.at + 2) : null;
    if (!target) {
      this.tokens[index] = { text: opener.bracket };
      return false;
    }
    const inside = build(this.tokens.splice(index + 1));
    this.tokens.pop();
    this.tokens.push({ node: this.#link(target.address, inside, opener.bracket === "![") });
    this.at = target.end;
    if (opener.bracket === "[") for (const other of this.brackets) if (this.tokens[other].bracket === "[") this.tokens[other].active = false;
    return true;
  }

  #link(address, inside, isImage) {
    const url = safeUrl(unescape(address));
    const shown = inside.length > 0 ? inside : [address];
    if (url === null) return h("span", { class: "no-link", title: `not linked: ${address}` }, ...shown);
    return h("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", class: isImage ? "image" : null }, ...shown);
  }

  #angle() {
    const pattern = /<([a-z][a-z0-9+.-]{1,31}:[^\s<>]*|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)>/iy;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) return false;
    const address = match[1].includes(":") ? match[1] : `mailto:${match[1]}`;
    this.tokens.push({ node: this.#link(address, [match[1]], false) });
    this.at += match[0].length;
    return true;
  }

  #entity() {
    const pattern = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,6}));/y;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) return false;
    const character = match[3] ? ENTITIES[match[3]] : fromCodePoint(match[1] ? Number(match[1]) : parseInt(match[2], 16));
    if (character === undefined) return false;
    this.#text(character);
    this.at += match[0].length;
    return true;
  }

  #bareUrl() {
    const pattern = /https?:\/\/[^\s<>"'`*\\]+/y;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    const isOpen = this.brackets.some((index) => this.tokens[index].active); // a link's own text
    if (!match || isOpen || /\w/.test(characterBefore(this.text, this.at) ?? "")) return false;
    const address = trimUrl(match[0]);
    if (safeUrl(address) === null) return false;
    this.tokens.push({ node: this.#link(address, [address], false) });
    this.at += address.length;
    return true;
  }
}

function runLength(text, start) {
  let end = start;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

function closingRun(text, from, length) {
  let at = text.indexOf("`", from);
  while (at >= 0) {
    const found = runLength(text, at);
    if (found === length) return at;
    at = text.indexOf("`", at + found);
  }
  return -1;
}

function characterAt(text, index) {
  const point = text.codePointAt(index);
  return point === undefined ? undefined : String.fromCodePoint(point);
}

function characterBefore(text, index) {
  if (index === 0) return undefined;
  const isPair = index >= 2 && /[\udc00-\udfff]/.test(text[index - 1]);
  return text.slice(index - (isPair ? 2 : 1), index);
}

const isSpace = (character) => character === undefined || /\s/.test(character);
const isPunctuation = (character) => character !== undefined && PUNCTUATION.test(character);

/** Tell whether a run touches text on one side (CommonMark: left- or right-flanking). */
function flanks(side, other) {
  if (isSpace(side)) return false;
  return !isPunctuation(side) || isSpace(other) || isPunctuation(other);
}

/** Read `address "title")` from `start`; null if it is no link target. */
function linkTarget(text, start) {
  let at = start;
  const skip = () => {
    while (/[ \n]/.test(text[at] ?? "")) at += 1;
  };
  skip();
  const from = at;
  let address;
  if (text[at] === "<") {
    const end = text.slice(at + 1, at + 2048).search(/[<>\n]/);
    if (end < 0 || text[at + 1 + end] !== ">") return null;
    address = text.slice(at + 1, at + 1 + end);
    at += end + 2;
  } else {
    for (let depth = 0; at < text.length && at - from < 2048 && !/\s/.test(text[at]); at += 1) {
      if (text[at] === "\\") at += 1;
      else if (text[at] === "(") depth += 1;
      else if (text[at] === ")" && (depth -= 1) < 0) break;
    }
    address = text.slice(from, at);
  }
  skip();
  const title = /"(?:\\[^]|[^"\\]){0,500}"|'(?:\\[^]|[^'\\]){0,500}'/y;
  title.lastIndex = at;
  at += title.exec(text)?.[0].length ?? 0;
  skip();
  return text[at] === ")" ? { address, end: at + 1 } : null;
}

const unescape = (text) => text.replace(/\\([!-/:-@[-`{-~])/g, "$1");

function fromCodePoint(value) {
  const isScalar = value > 0 && value <= 0x10ffff && (value < 0xd800 || value > 0xdfff);
  return isScalar ? String.fromCodePoint(value) : "\ufffd";
}

/** Cut off what belongs to the sentence around a bare address. */
function trimUrl(address) {
  for (;;) {
    const last = address.at(-1);
    const isUnbalanced = last === ")" && address.split(")").length > address.split("(").length;
    if (!/[.,:;!?_~\]]/.test(last) && !isUnbalanced) return address;
    address = address.slice(0, -1);
  }
}

/** Pair up the emphasis marks of tokens and return their nodes. */
function build(tokens) {
  pair(tokens.filter((token) => token.mark && token.count > 0));
  const root = document.createDocumentFragment();
  const stack = [root];
  const open = (tag) => {
    const isDeep = stack.length > MAX_NESTING;
    const element = isDeep ? stack.at(-1) : h(tag);
    if (!isDeep) stack.at(-1).append(element);
    stack.push(element);
  };
  for (const token of tokens) {
    if (token.node) stack.at(-1).append(token.node);
    else if (token.text !== undefined) stack.at(-1).append(token.text);
    else if (token.bracket) stack.at(-1).append(token.bracket);
    else {
      for (let i = 0; i < token.before.length; i += 1) stack.pop();
      if (token.count > 0) stack.at(-1).append(token.mark.repeat(token.count));
      for (const tag of token.after.reverse()) open(tag);
    }
  }
  return [...root.childNodes];
}

/** CommonMark's "process emphasis", on a linked list so that each mark is met a bounded number of times. */
function pair(marks) {
  marks.forEach((mark, index) => Object.assign(mark, { previous: marks[index - 1] ?? null, next: marks[index + 1] ?? null }));
  const bottoms = new Map(); // kind of closer -> the mark below which no opener for it exists
  let closer = marks[0] ?? null;
  while (closer) {
    if (!closer.closes) {
      closer = closer.next;
      continue;
    }
    const kind = `${closer.mark}${closer.opens}${closer.length % 3}`;
    const bottom = bottoms.get(kind) ?? null;
    let opener = closer.previous;
    while (opener && opener !== bottom && !matches(opener, closer)) opener = opener.previous;
    if (!opener || opener === bottom) {
      bottoms.set(kind, closer.previous);
      const following = closer.next;
      if (!closer.opens) unlink(closer);
      closer = following;
      continue;
    }
    closer = join(opener, closer);
  }
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens) return false;
  const isBoth = opener.closes || closer.opens;
  return !isBoth || (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

/** Pair two marks; returns where to go on. */
function join(opener, closer) {
  const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
  const tag = opener.mark === "~" ? "del" : used === 2 ? "strong" : "em";
  opener.count -= used;
  closer.count -= used;
  opener.after.push(tag);
  closer.before.push(tag);
  opener.next = closer;
  closer.previous = opener;
  if (opener.count === 0) unlink(opener);
  if (closer.count > 0) return closer;
  unlink(closer);
  return closer.next;
}

function unlink(mark) {
  if (mark.previous) mark.previous.next = mark.next;
  if (mark.next) mark.next.previous = mark.previous;
}
