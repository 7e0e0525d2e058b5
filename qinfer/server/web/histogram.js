// How often times fell where: one bar per bucket, the percentiles marked.

import { Chart, MARGIN, niceTop } from "./chart.js";
import { h, s } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const FEWEST = 8; // buckets shown, so that a single bar is no wall

export class Histogram extends Chart {
  constructor(title, { color, ...options }) {
    super(title, options);
    this.color = color;
    this.bars = [];
  }

  /** `data`: {bounds, counts}: upper bounds in seconds, and one count more than bounds. */
  update(data) {
    this.data = data;
    this.total = data.counts.reduce((sum, value) => sum + value, 0);
    this.bars = this.total ? shown(data) : [];
    this.value.textContent = this.total ? `${seconds(quantile(data, 0.5))} median` : "";
    this.redraw();
  }

  draw(width, height, svg) {
    if (this.bars.length === 0) {
      this.grid(svg, width, height, 1, () => "");
      this.empty(svg, width, height, "no answers yet");
      return;
    }
    const y = this.grid(svg, width, height, niceTop(Math.max(...this.bars.map((bar) => bar.count)), 2), count);
    const step = this.#step(width);
    const every = Math.ceil(54 / step);
    this.bars.forEach((bar, index) => {
      const x = MARGIN.left + index * step;
      if (bar.count) svg.append(s("rect", { class: `bar c${this.color}${index === this.index ? " active" : ""}`, x: x + 1.5, y: y(bar.count), width: Math.max(1, step - 3), height: Math.max(1.5, y(0) - y(bar.count)), rx: Math.min(3, step / 4) }));
      const isLabelled = index % every === 0 && Number.isFinite(bar.to) && x + step < width - MARGIN.right - 8;
      if (isLabelled) svg.append(s("text", { class: "tick", x: x + step, y: height - 6, "text-anchor": "middle", text: seconds(bar.to).replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ") }));
    });
    for (const share of [0.5, 0.95]) this.#mark(svg, share, step, height);
  }

  describe() {
    if (!this.total) return "no answers yet";
    return `${count(this.total)} values, median ${seconds(quantile(this.data, 0.5))}, 95 % within ${seconds(quantile(this.data, 0.95))}`;
  }

  size() {
    return this.bars.length;
  }

  at(position, width) {
    const index = Math.floor((position - MARGIN.left) / this.#step(width));
    return this.bars[index] ? index : null;
  }

  tipAt(index, width) {
    const bar = this.bars[index];
    if (!bar) return null;
    const range = Number.isFinite(bar.to) ? `${seconds(bar.from)} to ${seconds(bar.to)}` : `over ${seconds(bar.from)}`;
    return { x: MARGIN.left + (index + 0.5) * this.#step(width), lines: [[range], [h("b", { text: count(bar.count) }), ` (${percent(bar.count / this.total)})`]] };
  }

  #mark(svg, share, step, height) {
    const value = quantile(this.data, share);
    const index = this.bars.findIndex((bar) => value <= bar.to);
    if (index < 0) return;
    const bar = this.bars[index];
    const inside = Number.isFinite(bar.to) ? (value - bar.from) / (bar.to - bar.from) : 0.5;
    const x = MARGIN.left + (index + inside) * step;
    svg.append(
      s("line", { class: "mark", x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }),
      s("text", { class: "mark-name", x: x + (share > 0.5 ? 4 : -4), y: MARGIN.top - 3, "text-anchor": share > 0.5 ? "start" : "end", text: `p${share * 100}` }));
  }

  #step(width) {
    return (width - MARGIN.left - MARGIN.right) / Math.max(1, this.bars.length);
  }
}

/** The buckets from the first to the last that hold something, with some room around. */
function shown({ bounds, counts }) {
  let first = counts.findIndex((value) => value > 0);
  let last = counts.findLastIndex((value) => value > 0);
  first = Math.max(0, first - 1);
  last = Math.min(counts.length - 1, last + 1);
  while (last - first + 1 < Math.min(FEWEST, counts.length)) {
    if (first > 0) first -= 1;
    if (last < counts.length - 1 && last - first + 1 < FEWEST) last += 1;
  }
  return counts.slice(first, last + 1).map((value, index) => ({ from: bounds[first + index - 1] ?? 0, to: bounds[first + index] ?? Infinity, count: value }));
}

/** Estimate a quantile, as Prometheus does: evenly spread within its bucket. */
export function quantile({ bounds, counts }, share) {
  const rank = share * counts.reduce((sum, value) => sum + value, 0);
  let below = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] > 0 && below + counts[i] >= rank) {
      const from = bounds[i - 1] ?? 0;
      return i < bounds.length ? from + ((bounds[i] - from) * (rank - below)) / counts[i] : from;
    }
    below += counts[i];
  }
  return NaN;
}
