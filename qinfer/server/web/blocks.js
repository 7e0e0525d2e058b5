// Block structure of Markdown: lines in, a tree of plain objects out. No DOM here.
//
// A block: {type, raw, ...}; types: heading, rule, code, quote, list, table, paragraph. The subset
// of CommonMark and GFM's tables and task lists that models write; HTML is text.

const MAX_DEPTH = 12; // of quotes and lists in each other; deeper, lines are plain text
const MARKER = /^( {0,3})([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}>/;
const SETEXT = /^ {0,3}(?:={2,}|-{3,})[ \t]*$/; // a lone dash is a list that is still being written
const DELIMITER = /^[ \t|:-]+$/;

/** Return the blocks of a document. */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd").split("\n").map(expandTabs), 0);
}

function expandTabs(line) {
  return /^ *\t/.test(line) ? line.replace(/^[ \t]+/, (start) => [...start].reduce((done, c) => done + (c === "\t" ? " ".repeat(4 - (done.length % 4)) : " "), "")) : line;
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = next(lines, at, depth);
    found.push({ ...block, raw: lines.slice(at, end).join("\n"), blankAfter: end < lines.length && isBlank(lines[end]) });
    at = end;
  }
  return found;
}

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Return the block that begins at a line, and the line after it. */
function next(lines, at, depth) {
  const line = lines[at];
  if (indentOf(line) >= 4) return indentedCode(lines, at);
  const fence = openingFence(line);
  if (fence) return fencedCode(lines, at, fence);
  if (HEADING.test(line)) return [heading(line), at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (MARKER.test(line)) return list(lines, at, depth);
  }
  const columns = tableColumns(lines, at);
  return columns ? table(lines, at, columns) : paragraph(lines, at, depth);
}

function openingFence(line) {
  const match = FENCE.exec(line);
  return match && !(match[2][0] === "`" && match[3].includes("`")) ? match : null;
}

function fencedCode(lines, at, [, indent, marks, info]) {
  const closes = (line) => {
    const text = line.trim();
    return indentOf(line) < 4 && text.length >= marks.length && text === marks[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const content = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent.length, indentOf(line))));
  const isOpen = end === lines.length;
  const language = info.trim().split(/\s/)[0];
  return [{ type: "code", language, text: content.join("\n"), isOpen }, Math.min(end + 1, lines.length)];
}

function indentedCode(lines, at) {
  let end = at;
  let last = at;
  for (; end < lines.length && (isBlank(lines[end]) || indentOf(lines[end]) >= 4); end += 1) if (!isBlank(lines[end])) last = end;
  return [{ type: "code", language: "", text: lines.slice(at, last + 1).map((line) => line.slice(4)).join("\n"), isOpen: false }, last + 1];
}

function heading(line) {
  const text = line.trim();
  const level = /^#+/.exec(text)[0].length;
  let content = text.slice(level).trim();
  const closing = content.length - trailing(content, "#");
  if (closing === 0 || /[ \t]/.test(content[closing - 1])) content = content.slice(0, closing).trimEnd();
  return { type: "heading", level, text: content };
}

function trailing(text, character) {
  let count = 0;
  while (count < text.length && text[text.length - 1 - count] === character) count += 1;
  return count;
}

/** Tell whether a line ends a paragraph that stands before it. */
function interrupts(line, depth) {
  if (isBlank(line)) return true;
  if (indentOf(line) >= 4) return false;
  if (HEADING.test(line) || RULE.test(line) || openingFence(line)) return true;
  if (depth >= MAX_DEPTH) return false;
  if (QUOTE.test(line)) return true;
  const marker = MARKER.exec(line);
  return marker !== null && line.length > marker[0].length && /^([-*+]|1[.)])$/.test(marker[2]) && !isBlank(line.slice(marker[0].length));
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !SETEXT.test(lines[end]) && !interrupts(lines[end], depth) && !tableColumns(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  if (end < lines.length && SETEXT.test(lines[end])) return [{ type: "heading", level: lines[end].includes("=") ? 1 : 2, text }, end + 1];
  return [{ type: "paragraph", text }, end];
}

/** The lines of a quote or list item, and whether a line without its mark may still go on its paragraph. */
class Inner {
  lines = [];
  fence = null; // the marks of a fence that is open in it

  add(line) {
    const text = unmarked(line);
    const marks = openingFence(text)?.[2];
    if (this.fence === null) this.fence = marks ?? null;
    else if (marks && text.trim() === marks && marks.startsWith(this.fence)) this.fence = null;
    this.lines.push(line);
  }

  /** Lazy continuation, judged by the last line alone. */
  takes(line, depth) {
    const last = unmarked(this.lines.at(-1) ?? "");
    if (this.fence !== null || isBlank(last) || indentOf(last) >= 4 || HEADING.test(last) || RULE.test(last) || openingFence(last)) return false;
    return !interrupts(line, depth);
  }
}

/** Return a line without the marks of quotes and lists at its start. */
function unmarked(line) {
  return line.replace(/^(?: {0,3}(?:>|(?:[-*+]|\d{1,9}[.)])(?= ))){0,24}/, "");
}

function quote(lines, at, depth) {
  const inner = new Inner();
  let end = at;
  for (; end < lines.length; end += 1) {
    if (QUOTE.test(lines[end])) inner.add(lines[end].replace(/^ {0,3}> ?/, ""));
    else if (inner.takes(lines[end], depth + 1)) inner.add(lines[end].trimStart());
    else break;
  }
  return [{ type: "quote", blocks: blocks(inner.lines, depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = MARKER.exec(lines[at])[2];
  const kind = first.at(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const marker = MARKER.exec(lines[end]);
    if (!marker || marker[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const [item, after] = listItem(lines, end, marker, depth);
    items.push(item);
    end = after;
    const following = skipBlank(lines, end);
    item.blankAfter = following > end;
    if (following === lines.length) break;
    if (MARKER.exec(lines[following])?.[2].at(-1) === kind) end = following;
  }
  const last = items.length - 1;
  const isLoose = items.some((item, index) => (index < last && item.blankAfter) || item.blocks.slice(0, -1).some((block) => block.blankAfter));
  return [{ type: "list", ordered: /\d/.test(first), start: parseInt(first, 10), items, isLoose }, end];
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

function listItem(lines, at, [head], depth) {
  const rest = lines[at].slice(head.length);
  const spaces = indentOf(rest);
  const width = head.length + (isBlank(rest) || spaces > 4 ? 1 : spaces);
  const inner = new Inner();
  const task = /^\[([ xX])\] +(?=\S)/.exec(lines[at].slice(width));
  inner.add(lines[at].slice(width + (task?.[0].length ?? 0)));
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      const following = skipBlank(lines, end);
      const isEmpty = inner.lines.every(isBlank); // an item cannot begin with a blank line
      if (following === lines.length || indentOf(lines[following]) < width || isEmpty) break;
      for (; end < following; end += 1) inner.add("");
      continue;
    }
    if (indentOf(line) >= width) inner.add(line.slice(width));
    else if (!MARKER.test(line) && inner.takes(line, depth + 1)) inner.add(line.trimStart());
    else break;
    end += 1;
  }
  return [{ checked: task ? task[1] !== " " : null, blocks: blocks(inner.lines, depth + 1) }, end];
}

/** Return the alignments of the table whose header is at a line; null if there is none. */
function tableColumns(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !DELIMITER.test(below) || !/[|:]/.test(below) || !below.includes("-")) return null;
  const marks = cells(below);
  if (marks.length !== cells(lines[at]).length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : mark.startsWith(":") ? "left" : null));
}

function table(lines, at, columns) {
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && !interrupts(lines[end], 0); end += 1) rows.push(cells(lines[end]).slice(0, columns.length));
  return [{ type: "table", columns, head: cells(lines[at]), rows }, end];
}

function cells(line) {
  const found = [""];
  const text = line.trim();
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      found[found.length - 1] += "|";
      i += 1;
    } else if (text[i] === "|") found.push("");
    else found[found.length - 1] += text[i];
  }
  if (text.startsWith("|")) found.shift();
  if (found.length > 1 && found.at(-1).trim() === "") found.pop();
  return found.map((cell) => cell.trim());
}
