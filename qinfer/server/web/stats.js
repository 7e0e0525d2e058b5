// From the server's JSON (server/stats.py) to what the live view shows: the one place that knows
// the names.

import { count, duration, percent } from "./format.js";

/** Return the figures of GET /v1/qinfer/stats. */
export function readStats({ server, engine, ttft, tpot, memory, limits }) {
  const kv = limits.kv_capacity_tokens;
  return {
    totals: { generated: engine.generation_tokens, prompt: engine.prompt_tokens },
    running: engine.running,
    waiting: engine.waiting,
    preemptions: engine.preemptions,
    atOnce: limits.max_num_seqs,
    kv: { used: engine.num_blocks ? 1 - engine.free_blocks / engine.num_blocks : 0, tokens: kv },
    ttft,
    tpot,
    memory: memoryParts(memory, kv),
    facts: facts(server, engine, limits),
    trouble: server.state === "ready" ? null : (server.reason ?? server.state),
  };
}

function memoryParts(memory, kvTokens) {
  const { weights_bytes: weights = 0, kv_cache_bytes: kv = 0, draft_bytes: draft = 0, activation_bytes: activations = 0, peak_rss_bytes: peak = 0 } = memory;
  const parts = [
    { name: "Weights", color: 1, bytes: weights },
    { name: "KV cache", color: 3, bytes: kv, note: kvTokens ? `${count(kvTokens)} tokens` : null },
    { name: "Draft model", color: 5, bytes: draft, note: "weights and cache" },
    { name: "Activations", color: 2, bytes: activations, note: "a full step" },
    // Nothing is left for it while parts of the cache were never used: they are not resident yet.
    { name: "Other", color: 4, bytes: Math.max(0, peak - weights - kv - draft - activations), note: "program and libraries" },
  ];
  return { parts: parts.filter((part) => part.bytes > 0), peak };
}

function facts(server, engine, limits) {
  const ended = Object.entries(engine.ended).filter(([, value]) => value > 0);
  const { prefix_query_tokens: asked, prefix_hit_tokens: hit } = engine;
  return [
    ["Model", server.models.join(", ")],
    ["State", server.state],
    ["Up for", duration(server.uptime)],
    ["Largest context", `${count(limits.max_model_len)} tokens`],
    ["Tokens per step", limits.max_num_batched_tokens && `at most ${count(limits.max_num_batched_tokens)}`],
    ["Prompt tokens", count(engine.prompt_tokens)],
    ["Taken from the prefix cache", asked ? `${count(hit)} tokens, ${percent(hit / asked)}` : "none yet"],
    ["Answers", ended.map(([reason, value]) => `${count(value)} ${reason}`).join(", ") || "none yet"],
    ["Version", server.version],
  ];
}
