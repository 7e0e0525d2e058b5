// From the server's JSON (server/operations.py) to what the live view shows: the one place that
// knows the names.

/** Return the figures of GET /v1/qinfer/stats. */
export function readStats(data) {
  const { engine, memory, limits } = data;
  return {
    totals: { generated: engine.generation_tokens, prompt: engine.prompt_tokens },
    running: engine.running,
    waiting: engine.waiting,
    preemptions: engine.preemptions,
    limits: { running: limits.max_num_seqs },
    kv: { used: engine.num_blocks ? 1 - engine.free_blocks / engine.num_blocks : 0, tokens: limits.kv_capacity_tokens },
    ttft: data.ttft,
    tpot: data.tpot,
    memory: [],
    facts: () => [],
  };
}
