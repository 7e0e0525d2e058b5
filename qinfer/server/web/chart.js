// What charts share: a sized SVG, axes, a tooltip that pointer and arrow keys move.

import { h, s } from "./dom.js";

export const MARGIN = { left: 46, right: 14, top: 14, bottom: 24 };

/** A chart in a card. Subclasses draw(width, height, svg) and describe(); `at(x)` finds a data index. */
export class Chart {
  constructor(title, { height = 190, wide = false, note = "" } = {}) {
    this.height = height;
    this.index = null; // of the datum under the pointer
    this.value = h("span", { class: "card-value" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.plot.style.height = `${height}px`;
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("section", { class: `card${wide ? " wide" : ""}` },
      h("header", {}, h("h2", { text: title }), h("span", { class: "note", text: note }), this.value),
      h("div", { class: "plot-wrap" }, this.plot, this.tip));
    this.title = title;
    this.plot.addEventListener("pointermove", (event) => this.#point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.#move(null));
    this.plot.addEventListener("blur", () => this.#move(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  redraw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    const svg = s("svg", { viewBox: `0 0 ${width} ${this.height}`, width, height: this.height, "aria-hidden": "true" });
    this.draw(width, this.height, svg);
    this.plot.replaceChildren(svg);
    this.plot.setAttribute("aria-label", `${this.title}: ${this.describe()}`);
    this.#showTip();
  }

  /** Horizontal lines with their values, from 0 to `top`. */
  grid(svg, width, height, top, format) {
    const y = (value) => height - MARGIN.bottom - (value / top) * (height - MARGIN.top - MARGIN.bottom);
    for (const value of [0, top / 2, top]) {
      svg.append(
        s("line", { class: value === 0 ? "axis" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
        s("text", { class: "tick", x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end", text: format(value) }));
    }
    return y;
  }

  empty(svg, width, height, text) {
    svg.append(s("text", { class: "nothing", x: width / 2, y: height / 2, "text-anchor": "middle", text }));
  }

  #point(x) {
    this.#move(this.at(x, this.plot.clientWidth));
  }

  #move(index) {
    if (index === this.index) return;
    this.index = index;
    this.redraw();
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || this.size() === 0) return;
    event.preventDefault();
    const from = this.index ?? (step > 0 ? -1 : this.size());
    this.#move(Math.max(0, Math.min(this.size() - 1, from + step)));
  }

  #showTip() {
    const shown = this.index === null ? null : this.tipAt(this.index, this.plot.clientWidth);
    this.tip.hidden = shown === null;
    if (shown === null) return;
    this.tip.replaceChildren(...shown.lines.map((line) => h("div", {}, ...line)));
    const half = this.tip.offsetWidth / 2;
    const x = Math.max(half, Math.min(this.plot.clientWidth - half, shown.x));
    this.tip.style.left = `${x - half}px`;
  }
}

/** The least round number that is not below a value, and whose half is round too. */
export function niceTop(value, least = 1) {
  if (value <= least) return least;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}
