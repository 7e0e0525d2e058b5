"""Measures a checkpoint against the unquantized model: the code of `qinfer eval`, row by row."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qinfer import LLM
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quality.divergence import DIRECTION, summarize
from qinfer.quality.perplexity import Window, cut_windows, drift_percent, perplexity
from qinfer.quality.report import checkpoint_sha256, tokens_sha256
from qinfer.quality.scoring import BaselineRows, score_baseline, score_model

WINDOW = 512


@dataclass(frozen=True, slots=True)
class Ruler:
    """The unquantized model's scores, kept on disk.

    Args:
        windows: what is scored.
        rows: its distributions.
        logprobs: of the scored tokens.
        facts: for the record.
    """

    windows: Sequence[Window]
    rows: BaselineRows
    logprobs: list[list[float]]
    facts: dict[str, Any]


def make_ruler(
    model: Path, text: Path, num_tokens: int, engine: dict[str, str], cache: Path
) -> Ruler:
    """Score the unquantized model, or take what is there from another run.

    Args:
        model: its directory.
        text: what is scored.
        num_tokens: how much of it.
        engine: how it is run.
        cache: folder of the scores; 4 bytes per token and vocabulary entry.
    """
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = cut_windows(ids[:num_tokens], window=WINDOW, stride=WINDOW)
    facts = {
        "checkpoint_sha256": checkpoint_sha256(model),
        "text": text.name,
        "tokens_sha256": tokens_sha256(windows),
        "window": WINDOW,
        "stride": WINDOW,
        "bos": False,
        "tokens_scored": sum(window.num_scored for window in windows),
        "direction": DIRECTION,
        "engine": engine,
    }
    stem = f"baseline-{facts['checkpoint_sha256'][:12]}-{facts['tokens_sha256'][:12]}"
    scores = cache / f"{stem}.json"
    path = cache / f"{stem}.f32"
    if scores.exists():
        kept = json.loads(scores.read_text(encoding="utf-8"))
        rows = BaselineRows(path, windows, kept["vocab_size"])
        return Ruler(windows, rows, kept["logprobs"], facts)
    with LLM(model, device="cpu", max_model_len=WINDOW, **engine) as llm:
        rows = BaselineRows(path, windows, llm.model_config.vocab_size)
        logprobs = score_baseline(llm, windows, rows).logprobs
    kept = {"vocab_size": rows.vocab_size, "logprobs": logprobs}
    scores.write_text(json.dumps(kept), encoding="utf-8")
    return Ruler(windows, rows, logprobs, facts)


def measure(checkpoint: Path, ruler: Ruler, engine: dict[str, str]) -> dict[str, Any]:
    """Return how far a checkpoint is from the unquantized model."""
    with LLM(checkpoint, device="cpu", max_model_len=WINDOW, **engine) as llm:
        scores = score_model(llm, ruler.windows, ruler.rows)
    found = summarize(scores.kl or [], scores.agrees or [])
    return {
        "kld_mean": found.mean,
        "kld_p99": found.p99,
        "kld_per_window": [float(values.mean()) for values in scores.kl or []],
        "top1_agreement": found.top1_agreement,
        "perplexity": perplexity(scores.logprobs),
        "perplexity_unquantized": perplexity(ruler.logprobs),
        "drift_percent": drift_percent(scores.logprobs, ruler.logprobs),
        "engine": engine,
    }
