// One streamed answer: server-sent events in, text and figures out.

import { ApiError, send } from "./api.js";

/** Yield the data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(brokenOff);
      if (done) return;
      buffer += value;
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function brokenOff(error) {
  throw error.name === "AbortError" ? error : new ApiError("The connection to the server broke off.");
}

/**
 * Ask for an answer and call `onText(addition)` as it comes.
 *
 * Returns {finish, stats}; stats are seconds (ttft: until the first text, total) and token counts
 * as the server tells them. Throws ApiError or AbortError.
 */
export async function streamChat(body, { signal, onText }) {
  const clock = new Clock();
  const response = await send("v1/chat/completions", {
    method: "POST",
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
    onSend: () => clock.restart(),
  });
  let finish = null;
  let usage = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") return { finish, stats: clock.stats(usage) };
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { status: response.status, code: chunk.error.code });
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    const text = choice.delta?.content;
    if (text) {
      clock.mark();
      onText(text);
    }
  }
  throw new ApiError("The connection ended before the answer did.");
}

class Clock {
  start = performance.now();
  first = null;
  last = null;

  restart() {
    this.start = performance.now();
  }

  mark() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  stats(usage) {
    const tokens = usage?.completion_tokens ?? null;
    const decode = (this.last - this.first) / 1000;
    return {
      ttft: this.first === null ? null : (this.first - this.start) / 1000,
      total: (performance.now() - this.start) / 1000,
      tokens,
      promptTokens: usage?.prompt_tokens ?? null,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
      // The first token belongs to the prompt's time: the rest share the time after it.
      rate: tokens > 1 && decode > 0 ? (tokens - 1) / decode : null,
    };
  }
}
