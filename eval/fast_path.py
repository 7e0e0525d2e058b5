"""What the fast paths on a CPU cost by themselves: each against the same checkpoint, exactly.

    python eval/fast_path.py CHECKPOINT             # the windows of the packaged text
    python eval/fast_path.py CHECKPOINT --windows 2

The exact path is float32 activations, the head as the checkpoint has it, and a float32 cache.
Against it, one at a time and then together: int8 activations, the INT8 head, the INT8 cache.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from qinfer import LLM, __version__
from qinfer.data.files import evaluation_text
from qinfer.quality.divergence import DIRECTION, summarize
from qinfer.quality.perplexity import cut_windows
from qinfer.quality.scoring import BaselineRows, score_baseline, score_model

WINDOW = 512
EXACT = {"activations": "exact", "lm_head": "model", "kv_cache_dtype": "fp32"}
FAST = {
    "int8 activations": {"activations": "int8"},
    "INT8 head": {"lm_head": "int8"},
    "INT8 cache": {"kv_cache_dtype": "int8"},
    "all three": {"activations": "int8", "lm_head": "int8", "kv_cache_dtype": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory, hub id or .gguf file")
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens")
    args = parser.parse_args()

    def opened(**options: Any) -> LLM:
        return LLM(args.model, device="cpu", max_model_len=WINDOW, **options)

    with tempfile.TemporaryDirectory() as folder:
        with opened(**EXACT) as llm:
            tokens = llm.tokenizer.encode(evaluation_text(), add_special_tokens=False)
            windows = cut_windows(tokens, window=WINDOW, stride=WINDOW, num_windows=args.windows)
            rows = BaselineRows(Path(folder) / "rows", windows, llm.model_config.vocab_size)
            score_baseline(llm, windows, rows)
        result: dict[str, Any] = {
            "model": Path(args.model).name,
            "qinfer": __version__,
            "direction": DIRECTION,
            "tokens": sum(window.num_scored for window in windows),
            "rows": {},
        }
        for name, changed in FAST.items():
            with opened(**EXACT | changed) as llm:
                scores = score_model(llm, windows, rows)
            found = summarize(scores.kl or [], scores.agrees or [])
            result["rows"][name] = {
                "kld_mean": found.mean,
                "kld_p99": found.p99,
                "same_top_token": found.top1_agreement,
            }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
