"""llama.cpp's process: `llama_decode` through the low-level bindings, argmax over the logits.

Every sequence has a cache stream of its own (not the unified cache), as in llama.cpp's own batched
benchmark. The model file is made with llama.cpp's own quantizer.
"""

import ctypes
import time
from importlib.metadata import version
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import Settings, serve

UBATCH = 512
KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
FILE_TYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
FLASH = {
    True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


# Its log has lines for every graph node. A C function that does nothing with them costs nothing,
# where a Python callback would slow the steps down; kept here, as the library holds the pointer.
SILENT = ctypes.cast(ctypes.CDLL(None).abs, llama_cpp.llama_log_callback)


class Context:
    """A context for a number of sequences, and one batch's worth of memory."""

    def __init__(self, model: object, settings: Settings, num_sequences: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * settings["max_len"]
        params.n_batch = settings["max_len"]
        params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.type_k = params.type_v = KV_TYPES[settings["kv"]]
        params.flash_attn_type = FLASH[settings["flash"]]
        params.kv_unified = False
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama_init_from_model refused these settings")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(settings["max_len"], 0, 1)
        self._vocab_size = settings["vocab_size"]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def fill(self, tokens: list[int], start: int, sequence: int) -> None:
        """Set the batch to a sequence's tokens from position `start` on; logits of the last."""
        self._batch.n_tokens = 0
        for offset, token in enumerate(tokens):
            self.add(token, start + offset, sequence, wanted=offset == len(tokens) - 1)

    def add(self, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = wanted
        batch.n_tokens += 1

    def run(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def best(self, row: int) -> int:
        """Return the most likely token of a row of the batch."""
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.addressof(logits.contents)
        rows = (ctypes.c_float * self._vocab_size).from_address(address)
        return int(np.frombuffer(rows, np.float32).argmax())

    def step(self, tokens: list[int], position: int) -> list[int]:
        """Compute one token of every sequence and return the next ones."""
        self._batch.n_tokens = 0
        for sequence, token in enumerate(tokens):
            self.add(token, position, sequence, wanted=True)
        self.run()
        return [self.best(row) for row in range(len(tokens))]


class LlamaCpp:
    """A loaded GGUF file; contexts are made as batches need them, in the warm-up round."""

    def __init__(self, settings: Settings) -> None:
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['model']}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._settings = {**settings, "vocab_size": llama_cpp.llama_vocab_n_tokens(vocab)}
        self._contexts: dict[tuple[int, int], Context] = {}
        info = llama_cpp.llama_print_system_info().decode()
        self.versions = {"llama-cpp-python": version("llama-cpp-python"), "build": info.strip()}

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        context = self._context(1, len(cached) + len(prompt))
        if cached:
            context.fill(cached, 0, 0)
            context.run()
            context.best(-1)  # waits for the end
        context.fill(prompt, len(cached), 0)
        start = time.perf_counter()
        context.run()
        context.best(-1)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        length = len(prompts[0])
        context = self._context(len(prompts), length + steps)
        tokens = []
        for sequence, prompt in enumerate(prompts):
            context.fill(prompt, 0, sequence)
            context.run()
            tokens.append(context.best(-1))
        start = time.perf_counter()
        for position in range(length, length + steps):
            tokens = context.step(tokens, position)
        return time.perf_counter() - start

    def _context(self, num_sequences: int, length: int) -> Context:
        """Return an empty context for so many sequences of at least that length."""
        room = 256 * -(-length // 256) if num_sequences > 1 else self._settings["max_len"]
        key = (num_sequences, room)
        if key not in self._contexts:
            settings = {**self._settings, "max_len": room}
            self._contexts[key] = Context(self._model, settings, num_sequences)
        self._contexts[key].clear()
        return self._contexts[key]


def prepare(settings: Settings) -> None:
    """Quantize the source's GGUF with llama.cpp itself."""
    target = Path(settings["model"])
    if target.exists():
        return
    if settings["gguf"] is None:
        raise RuntimeError("the model has no GGUF file that could be quantized")
    target.parent.mkdir(parents=True, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[settings["weights"]]
    params.allow_requantize = True
    params.nthread = settings["threads"]
    partial = target.with_suffix(".partial")
    source = settings["gguf"].encode()
    status = llama_cpp.llama_model_quantize(source, str(partial).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    partial.rename(target)


if __name__ == "__main__":
    serve(prepare, LlamaCpp)
