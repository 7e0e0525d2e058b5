// Values over the last minutes.

import { Chart, MARGIN, niceTop } from "./chart.js";
import { h, s } from "./dom.js";

const SHORTEST = 60; // seconds shown at first; as there is more to show, it becomes more
const LONGEST = 300;
const GAP = 3.5; // seconds between samples that break the line

export class LineChart extends Chart {
  /** `series`: [{name, color: 1..4, read(sample) -> number or null}]; `least`: the axis goes that far at least. */
  constructor(title, series, { format, tick = format, least = 1, ...options }) {
    super(title, options);
    Object.assign(this, { series, format, tick, least });
    this.samples = [];
    this.now = 0;
    this.span = SHORTEST;
    this.current = series.map(() => h("b"));
    if (series.length > 1) {
      this.value.replaceWith(h("div", { class: "legend" }, ...series.map(({ name, color }, index) =>
        h("span", {}, h("i", { class: `swatch c${color}` }), name, this.current[index]))));
    } else this.value.append(...this.current);
  }

  /** `samples`: [{time (s), ...}], oldest first; `now`: the right edge. */
  update(samples, now) {
    this.samples = samples.filter((sample) => sample.time >= now - LONGEST);
    this.now = now;
    const last = this.samples.at(-1);
    this.span = Math.min(LONGEST, Math.max(SHORTEST, last ? now - this.samples[0].time : 0));
    this.series.forEach(({ read }, index) => (this.current[index].textContent = last ? this.#text(read(last)) : ""));
    this.redraw();
  }

  draw(width, height, svg) {
    const values = this.samples.flatMap((sample) => this.series.map(({ read }) => read(sample) ?? 0));
    const top = niceTop(Math.max(0, ...values), this.least);
    const y = this.grid(svg, width, height, top, this.tick);
    const x = (time) => this.#x(time, width);
    const step = [15, 30, 60, 120].find((each) => (this.span / each) * 76 < width - MARGIN.left) ?? 300;
    for (let age = 0; age <= this.span; age += step) {
      const label = age === 0 ? "now" : age % 60 ? `${age} s` : `${age / 60} min`;
      svg.append(s("text", { class: "tick", x: x(this.now - age), y: height - 6, "text-anchor": age === 0 ? "end" : "middle", text: label }));
    }
    if (this.samples.length === 0) this.empty(svg, width, height, "waiting for figures");
    for (const one of this.series) this.#line(svg, one, x, y);
    const sample = this.samples[this.index];
    if (sample) svg.append(s("line", { class: "cross", x1: x(sample.time), x2: x(sample.time), y1: MARGIN.top, y2: height - MARGIN.bottom }));
  }

  describe() {
    const last = this.samples.at(-1);
    return last ? this.series.map(({ name, read }) => `${name} ${this.#text(read(last))}`).join(", ") : "no figures yet";
  }

  size() {
    return this.samples.length;
  }

  at(position, width) {
    if (this.samples.length === 0) return null;
    const distance = (sample) => Math.abs(this.#x(sample.time, width) - position);
    return this.samples.reduce((best, sample, index) => (distance(sample) < distance(this.samples[best]) ? index : best), 0);
  }

  tipAt(index, width) {
    const sample = this.samples[index];
    if (!sample) return null;
    const age = Math.round(this.now - sample.time);
    const lines = this.series.map(({ name, color, read }) => [h("i", { class: `swatch c${color}` }), `${name} `, h("b", { text: this.#text(read(sample)) })]);
    return { x: this.#x(sample.time, width), lines: [[age === 0 ? "now" : `${age} s ago`], ...lines] };
  }

  #line(svg, { color, read }, x, y) {
    for (const run of runs(this.samples, read)) {
      const points = run.map((sample) => `${x(sample.time).toFixed(1)},${y(read(sample)).toFixed(1)}`);
      const [first, last] = [x(run[0].time).toFixed(1), x(run.at(-1).time).toFixed(1)];
      svg.append(
        s("path", { class: `area c${color}`, d: `M${first},${y(0)}L${points.join("L")}L${last},${y(0)}Z` }),
        s("path", { class: `line c${color}`, d: `M${points.join("L")}` }));
    }
    const end = this.samples.at(-1);
    if (end && read(end) !== null) svg.append(s("circle", { class: `dot c${color}`, cx: x(end.time), cy: y(read(end)), r: 3.5 }));
  }

  #x(time, width) {
    return width - MARGIN.right - ((this.now - time) / this.span) * (width - MARGIN.left - MARGIN.right);
  }

  #text(value) {
    return value === null ? "–" : this.format(value);
  }
}

/** Cut samples where time or values are missing. */
function runs(samples, read) {
  const found = [];
  let previous = null;
  for (const sample of samples) {
    if (read(sample) === null) {
      previous = null;
      continue;
    }
    if (!previous || sample.time - previous.time > GAP) found.push([]);
    found.at(-1).push(sample);
    previous = sample;
  }
  return found;
}
