"""INT4 of the real small model: GPTQ against rounding at the same group size."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.quant.pipeline import quantize
from qinfer.workflows.evaluation import evaluate


@pytest.mark.slow
def test_gptq_beats_rounding_on_unseen_text(smollm2: Path, tmp_path: Path) -> None:
    """An eighth of the default calibration and the first ten of thirty blocks, to save time."""
    rounded, solved = tmp_path / "rtn", tmp_path / "gptq"
    some: dict[str, Any] = {"overrides": (r"layers\.[12][0-9]\.=skip",), "kv_cache_dtype": "none"}
    quantize(smollm2, rounded, algorithm="rtn", **some)
    report = quantize(smollm2, solved, num_samples=16, **some)
    assert report.scheme == "int4 g64 sym"
    assert report.fallback_modules == ()
    assert sum(row.error is not None for row in report.rows) == 70
    record = evaluate(
        [rounded, solved],
        baseline=smollm2,
        kv_cache_dtypes=["fp32"],
        window=256,
        num_windows=2,
        dtype="float32",
        threads=1,
        speed=None,
        isolate=False,
    )
    rtn, gptq = (row for row in record.rows if row.weights.startswith("int4"))
    assert gptq.divergence.mean < 0.7 * rtn.divergence.mean
    assert gptq.quality.perplexity < rtn.quality.perplexity
