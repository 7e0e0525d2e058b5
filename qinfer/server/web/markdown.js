// Markdown to elements, without HTML in between: what a model writes can become text, structure
// and http(s) links, and nothing else.

import { parse } from "./blocks.js";
import { copy, h, icon } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

/**
 * Shows a growing text in an element. A block whose source has not changed keeps its nodes, so that
 * a long answer costs no more per token than a short one, and a selection in it survives.
 */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = []; // [source, node]
  }

  render(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && key(blocks[same]) === this.shown[same][0]) same += 1;
    for (const [, node] of this.shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = render(block);
      this.shown.push([key(block), node]);
      this.element.append(node);
    }
  }
}

const key = (block) => `${block.type}${block.isOpen ? "…" : ""}\n${block.raw}`;

const RENDER = {
  rule: () => h("hr"),
  heading: (block) => h(`h${Math.min(block.level + 2, 6)}`, { class: `h${block.level}` }, ...inline(block.text)),
  paragraph: (block) => h("p", {}, ...inline(block.text)),
  quote: (block) => h("blockquote", {}, ...block.blocks.map(render)),
  code: renderCode,
  list: renderList,
  table: renderTable,
};

function render(block) {
  return RENDER[block.type](block);
}

function renderCode({ language, text }) {
  const label = /^[\w+#.-]{1,30}$/.test(language) ? language : "";
  const button = h("button", { type: "button", class: "text copy-code", "aria-label": "Copy code" }, icon("copy"), h("span", { text: "Copy" }));
  button.addEventListener("click", async () => {
    await copy(text);
    button.lastChild.textContent = "Copied";
    setTimeout(() => (button.lastChild.textContent = "Copy"), 1500);
  });
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", { text: label }), button),
    h("pre", { tabindex: "0", role: "region", "aria-label": `${label} code`.trim() }, h("code", {}, highlight(text, label))));
}

function renderList({ ordered, start, items, isLoose }) {
  return h(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...items.map((item) => renderItem(item, isLoose)));
}

function renderItem({ checked, blocks }, isLoose) {
  const content = blocks.map((block) => (block.type === "paragraph" && !isLoose ? h("span", { class: "tight" }, ...inline(block.text)) : render(block)));
  const box = checked === null ? null : h("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" });
  return h("li", { class: box ? "task" : null }, box, ...content);
}

function renderTable({ columns, head, rows }) {
  const cell = (tag) => (text, index) => h(tag, { class: columns[index] ? `to-${columns[index]}` : null, scope: tag === "th" ? "col" : null }, ...inline(text));
  const padded = rows.map((row) => columns.map((_, index) => row[index] ?? ""));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "table" },
    h("table", {}, h("thead", {}, h("tr", {}, ...head.map(cell("th")))), padded.length === 0 ? null : h("tbody", {}, ...padded.map((row) => h("tr", {}, ...row.map(cell("td")))))));
}
