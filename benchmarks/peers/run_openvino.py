"""OpenVINO GenAI's process: its continuous batching pipeline, stepped here, token ids in and out.

The model is converted and compressed by optimum-intel, in this environment too.
"""

import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from protocol import Settings, serve

COMPRESSION = {
    4: ("--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"),
    8: ("--weight-format", "int8"),
}


class OpenVino:
    """A pipeline with a prefix cache, as qinfer has one, and steps of up to 512 tokens."""

    def __init__(self, settings: Settings) -> None:
        scheduler = SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 32
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings["threads"], "KV_CACHE_PRECISION": "u8"}
        self._pipeline = ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._serial = 0
        self.versions = {
            name: version(name) for name in ("openvino-genai", "optimum-intel", "nncf")
        }

    def prefill(self, cached: list[int], prompt: list[int]) -> float:
        if cached:
            self._first_tokens([cached], 1)
            self._drain()
        start = time.perf_counter()
        self._first_tokens([cached + prompt], 1)
        seconds = time.perf_counter() - start
        self._drain()
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        # The first to be prefilled decode while the last are: they need tokens to spare.
        handles = self._first_tokens(prompts, 2 * steps + len(prompts))
        for handle in handles:
            while handle.can_read():
                handle.read()
        start = time.perf_counter()
        num_tokens = 0
        for _ in range(steps):
            self._pipeline.step()
            num_tokens += sum(_num_new(handle) for handle in handles)
        seconds = time.perf_counter() - start
        for handle in handles:
            handle.cancel()
        self._drain()
        if num_tokens != steps * len(prompts):
            raise RuntimeError(
                f"{steps} steps gave {num_tokens} tokens for {len(prompts)} sequences"
            )
        return seconds

    def _first_tokens(self, prompts: list[list[int]], max_tokens: int) -> list:
        """Add requests and step until each has a token; return their handles."""
        config = GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )
        handles = []
        for prompt in prompts:
            self._serial += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._serial, ids, config))
        while not all(handle.can_read() for handle in handles):
            self._pipeline.step()
        return handles

    def _drain(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _num_new(handle: object) -> int:
    count = 0
    while handle.can_read():
        count += sum(len(output.generated_ids) for output in handle.read().values())
    return count


def prepare(settings: Settings) -> None:
    """Convert the source's directory."""
    target = Path(settings["model"])
    if target.exists():
        return
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
    command += ["--model", settings["source"], "--task", "text-generation-with-past"]
    subprocess.run([*command, *COMPRESSION[settings["bits"]], str(partial)], check=True)
    partial.rename(target)


if __name__ == "__main__":
    serve(prepare, OpenVino)
