"""The fixtures themselves: what they promise is checked with transformers alone."""

import math
from pathlib import Path

import pytest
import torch
from support.checkpoints import load_oracle, write_script, write_tiny
from support.tokenizers import EOS, byte_fallback, byte_level
from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tiny_families_have_spread_logits(tmp_path: Path, family: str) -> None:
    model = load_oracle(write_tiny(tmp_path / "model", family))
    logits = model(torch.arange(40)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std(-1).min() > 0.2


def test_tiny_is_reproducible(tmp_path: Path) -> None:
    files = [write_tiny(tmp_path / name) / "model.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_script_answers_with_known_logits(script_model: Path) -> None:
    model = load_oracle(script_model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(script_model)
    prompt = tokenizer("say it:", return_tensors="pt").input_ids
    output = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, prompt.shape[1] :]) == "ABCDEFGHIJK<|eos|>"
    logits = model(prompt).logits[0, -1]
    assert logits[ord("A")].item() == pytest.approx(math.sqrt(288), rel=1e-5)
    assert logits.count_nonzero() == 1


def test_script_with_repeated_bytes(tmp_path: Path) -> None:
    text = "naïve 깰, naïve"
    ids = write_script(tmp_path, text)
    assert len(set(ids)) == len(ids) == len(text.encode())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.decode(ids) == text
    output = load_oracle(tmp_path).generate(
        torch.tensor([[33]]), max_new_tokens=40, do_sample=False
    )
    assert output[0].tolist() == [33, *ids, EOS]


def test_script_with_a_table_of_logits(tmp_path: Path) -> None:
    write_script(tmp_path, {65: {66: 2.0, 67: 1.0}})
    logits = load_oracle(tmp_path)(torch.tensor([[1, 65]])).logits[0]
    assert logits[1, 66].item() == pytest.approx(2.0)
    assert logits[1, 67].item() == pytest.approx(1.0)
    assert logits[0].argmax().item() == 65


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
def test_byte_tokenizers_round_trip(tokenizer) -> None:
    text = "Hello  wörld, 깰\n\t x"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 262
