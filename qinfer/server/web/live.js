// The live view: what the engine does now. Asks the server once a second, and only while looked at.

import { getJson } from "./api.js";
import { h, icon } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";
import { Histogram, quantile } from "./histogram.js";
import { LineChart } from "./linechart.js";
import { SplitBar } from "./splitbar.js";
import { readStats } from "./stats.js";

const EVERY = 1000; // ms
const SLOWEST = 10_000; // ms between tries while the server does not answer
const KEPT = 310; // samples

export class Live {
  constructor(element) {
    this.samples = [];
    this.failures = 0;
    this.isShown = false;
    this.timer = null;
    this.element = element;
    this.#build();
    document.addEventListener("visibilitychange", () => this.#look());
  }

  /** Start or stop looking. */
  setShown(isShown) {
    this.isShown = isShown;
    this.#look();
  }

  #build() {
    const whole = (value) => (Number.isInteger(value) ? count(value) : "");
    this.tiles = ["Tokens per second", "Running", "Waiting", "KV cache used", "Time to first token", "Time per token"].map((name) => new Tile(name));
    this.rate = new LineChart("Tokens per second", [
      { name: "generated", color: 1, read: (sample) => sample.generated },
      { name: "prompt", color: 2, read: (sample) => sample.prompt },
    ], { format: number, tick: whole, least: 10, wide: true, height: 220 });
    this.ttft = new Histogram("Time to first token", { color: 2 });
    this.tpot = new Histogram("Time per token", { color: 1 });
    this.pool = new LineChart("KV cache", [{ name: "used", color: 3, read: (sample) => sample.kvShare }], { format: percent, tick: (value) => `${Math.round(value * 1000) / 10} %`, least: 0.1 });
    this.queue = new LineChart("Requests", [
      { name: "running", color: 1, read: (sample) => sample.running },
      { name: "waiting", color: 3, read: (sample) => sample.waiting },
    ], { format: count, tick: whole, least: 4 });
    this.memory = new SplitBar("Memory");
    this.facts = h("dl", { class: "facts" });
    this.banner = h("div", { class: "failure", role: "alert", hidden: true }, icon("warning"), h("p"));
    this.figures = h("div", { class: "figures-wrap" },
      h("div", { class: "tiles" }, ...this.tiles.map((tile) => tile.element)),
      h("div", { class: "cards" }, ...[this.rate, this.ttft, this.tpot, this.pool, this.queue, this.memory].map((chart) => chart.element),
        h("section", { class: "card wide" }, h("header", {}, h("h2", { text: "Server" })), this.facts)));
    this.element.append(h("div", { class: "live-inner" }, h("h1", { class: "hidden", text: "Live figures" }), this.banner, this.figures));
  }

  #look() {
    const isWatched = this.isShown && document.visibilityState === "visible";
    if (isWatched && this.timer === null) this.#poll();
    else if (!isWatched && this.timer !== null) {
      clearTimeout(this.timer);
      this.timer = null;
    }
  }

  async #poll() {
    const mine = setTimeout(() => {}, 0); // the timer's place is taken while the server answers
    this.timer = mine;
    const began = performance.now();
    try {
      const stats = readStats(await getJson("v1/qinfer/stats", { quiet: this.failures > 0 }));
      this.failures = 0;
      this.#warn(stats.trouble);
      this.#show(stats);
    } catch (error) {
      this.failures += 1;
      this.#warn(error.message);
    }
    this.figures.classList.toggle("stale", this.failures > 0);
    if (this.timer !== mine) return; // nobody looks any more, or a newer round has begun
    const wait = this.failures ? Math.min(SLOWEST, EVERY * 2 ** (this.failures - 1)) : EVERY;
    this.timer = setTimeout(() => this.#poll(), Math.max(0, wait - (performance.now() - began)));
  }

  #warn(text) {
    this.banner.hidden = text === null;
    if (this.banner.textContent !== text) this.banner.querySelector("p").textContent = text;
  }

  #show(stats) {
    const sample = this.#sample(stats);
    this.samples.push(sample);
    if (this.samples.length > KEPT) this.samples.shift();
    const show = (values) => values.forEach(([value, note], index) => this.tiles[index].show(value, note));
    show([
      [sample.generated === null ? "–" : number(sample.generated), `${count(stats.totals.generated)} in all`],
      [count(stats.running), stats.atOnce ? `at most ${count(stats.atOnce)}` : ""],
      [count(stats.waiting), stats.preemptions ? `${count(stats.preemptions)} preempted` : "none preempted"],
      [percent(sample.kvShare), stats.kv.tokens ? `of ${count(stats.kv.tokens)} tokens` : ""],
      [seconds(quantile(stats.ttft, 0.5)), `p95 ${seconds(quantile(stats.ttft, 0.95))}`],
      [seconds(quantile(stats.tpot, 0.5)), `p95 ${seconds(quantile(stats.tpot, 0.95))}`],
    ]);
    for (const chart of [this.rate, this.pool, this.queue]) chart.update(this.samples, sample.time);
    this.ttft.update(stats.ttft);
    this.tpot.update(stats.tpot);
    this.memory.update(stats.memory.parts, stats.memory.peak);
    this.#showFacts(stats.facts);
  }

  /** One point of the charts; rates come from the totals of this and the last look. */
  #sample(stats) {
    const time = performance.now() / 1000;
    const last = this.samples.at(-1);
    const span = last ? time - last.time : 0;
    // A pause in looking, or a server that started again, leaves a gap rather than a guess.
    const isNext = span > 0.2 && span < 5 && stats.totals.generated >= last.totals.generated;
    const rate = (name) => (isNext ? Math.max(0, stats.totals[name] - last.totals[name]) / span : null);
    return { time, totals: stats.totals, generated: rate("generated"), prompt: rate("prompt"), kvShare: stats.kv.used, running: stats.running, waiting: stats.waiting };
  }

  #showFacts(facts) {
    const shown = facts.filter(([, value]) => value);
    const text = JSON.stringify(shown);
    if (text === this.factsText) return; // a selection in them survives
    this.factsText = text;
    this.facts.replaceChildren(...shown.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
  }
}

class Tile {
  constructor(name) {
    this.value = h("span", { class: "tile-value", text: "–" });
    this.note = h("span", { class: "tile-note" });
    this.element = h("div", { class: "tile", data: { tile: name } }, h("span", { class: "tile-name", text: name }), this.value, this.note);
  }

  show(value, note) {
    this.value.textContent = value;
    this.note.textContent = note ?? "";
  }
}
