// What memory is made of: one bar, its parts named beside.

import { h } from "./dom.js";
import { bytes, percent } from "./format.js";

export class SplitBar {
  constructor(title) {
    this.value = h("span", { class: "card-value" });
    this.bar = h("div", { class: "split", role: "img" });
    this.legend = h("ul", { class: "parts" });
    this.element = h("section", { class: "card wide" },
      h("header", {}, h("h2", { text: title }), this.value), this.bar, this.legend);
    this.title = title;
  }

  /** `parts`: [{name, note, bytes, color}]; `peak`: the most that the process ever held. */
  update(parts, peak) {
    const total = parts.reduce((sum, part) => sum + part.bytes, 0);
    if (!total) return;
    this.value.textContent = `${bytes(total)}, peak so far ${bytes(peak)}`;
    this.bar.replaceChildren(...parts.map((part) => {
      const piece = h("span", { class: `c${part.color}`, title: `${part.name}: ${bytes(part.bytes)}` });
      piece.style.flexGrow = String(part.bytes / total);
      return piece;
    }));
    this.legend.replaceChildren(...parts.map((part) => h("li", {},
      h("i", { class: `swatch c${part.color}` }),
      h("span", { class: "part-name", text: part.name }),
      h("b", { text: bytes(part.bytes) }),
      h("span", { class: "part-note", text: [percent(part.bytes / total), part.note].filter(Boolean).join(" · ") }))));
    this.bar.setAttribute("aria-label", `${this.title}: ${parts.map((part) => `${part.name} ${bytes(part.bytes)}`).join(", ")}`);
  }
}
