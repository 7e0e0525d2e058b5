"""The offline engine of `server_overhead.py`: `LLM.generate` on the same prompts, no HTTP.

One JSON line goes in (`{"prompts": [...], "tokens": N}`), one comes out, until the input ends; the
first line that comes out says that the model is loaded.
"""

import json
import resource
import sys
import time

from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingParams


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = json.loads(sys.argv[2])
    with LLM(sys.argv[1], **options) as llm:
        print(json.dumps({"loaded": True}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            params = SamplingParams(temperature=0.0, max_tokens=order["tokens"], ignore_eos=True)
            prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
            used, begin = cpu_seconds(), time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds, used = time.perf_counter() - begin, cpu_seconds() - used
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            result = {"seconds": seconds, "tokens": tokens, "cpu_seconds": used}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
