"""What evaluation says about the real small model, against transformers and the promised limits.

Everything in float32 on both sides, so that the figures are those of weights and cache alone: in
bfloat16 two roundings of the same model differ by about as much as an INT8 cache does.
"""

from pathlib import Path

import pytest
import torch
import transformers

from qinfer.data.files import evaluation_text
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quality.perplexity import cut_windows, perplexity
from qinfer.quant.pipeline import quantize
from qinfer.workflows.evaluation import evaluate

WINDOW, NUM_WINDOWS = 256, 2


def _transformers_perplexity(path: Path) -> float:
    ids = load_tokenizer(path).encode(evaluation_text(), add_special_tokens=False)
    windows = cut_windows(ids, window=WINDOW, stride=WINDOW, num_windows=NUM_WINDOWS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([window.token_ids for window in windows])).logits
    rows = torch.log_softmax(logits.double(), dim=-1)
    return perplexity(
        [
            [float(row[i - 1, window.token_ids[i]]) for i in range(1, WINDOW)]
            for row, window in zip(rows, windows, strict=True)
        ]
    )


def test_the_promised_figures(smollm2: Path, tmp_path: Path) -> None:
    """One test, because its four rows are measured once: perplexity as transformers has it, the
    limits of INT8 and FP8 caches and of INT8 weights, and K10, the bytes of the cache."""
    int8_weights = tmp_path / "int8"
    quantize(
        smollm2, int8_weights, weights="int8", algorithm="rtn", group_size=-1, kv_cache_dtype="none"
    )
    record = evaluate(
        [smollm2, int8_weights],
        baseline=smollm2,
        kv_cache_dtypes=["int8", "fp8", "fp32"],
        window=WINDOW,
        num_windows=NUM_WINDOWS,
        dtype="float32",
        threads=1,
        speed=None,
        isolate=False,
    )
    rows = {(row.weights, row.kv_cache_dtype): row for row in record.rows}
    baseline, int8, fp8 = (rows["fp32", kv] for kv in ("fp32", "int8", "fp8_e4m3"))
    expected = _transformers_perplexity(smollm2)
    assert baseline.quality.perplexity == pytest.approx(expected, rel=1e-4)
    assert record.method.tokens_scored == NUM_WINDOWS * (WINDOW - 1)
    assert 0 < int8.divergence.mean <= 0.002
    assert 0 < fp8.divergence.mean <= 0.010
    assert min(int8.divergence.top1_agreement, fp8.divergence.top1_agreement) > 0.9
    assert abs(rows["int8 channel sym", "fp32"].quality.drift_percent) <= 0.5
    # 512 tokens: 11.80 MB in fp16, 6.08 MB in INT8 with its scales.
    assert 512 * baseline.memory.kv_bytes_per_token == 2 * 11_796_480
    assert 512 * int8.memory.kv_bytes_per_token == 6_082_560
