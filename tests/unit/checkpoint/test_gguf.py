import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from support.checkpoints import load_oracle, write_tiny
from support.gguf_files import write_gguf
from transformers import AutoTokenizer

from qinfer.checkpoint.gguf import convert, unpermute
from qinfer.checkpoint.gguf_config import llama3_factors
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from qinfer.models.config import ModelConfig, linear_shapes
from qinfer.models.tokenizer import load_tokenizer

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
IDS = torch.arange(3, 90)[None]


def converted_logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_oracle(path)(IDS).logits


@pytest.mark.parametrize(
    ("family", "arch", "overrides"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("mistral", "llama", {"num_key_value_heads": 4}),
        ("qwen2", "qwen2", {"head_dim": 16}),
        ("qwen3", "qwen3", {"head_dim": 32, "rms_norm_eps": 1e-5}),
    ],
)
def test_architectures_compute_the_same(tmp_path: Path, family, arch, overrides) -> None:
    """Row order of q and k, names, biases, norms and facts: the logits tell them all."""
    source = write_tiny(tmp_path / "source", family, dtype=torch.bfloat16, **overrides)
    float_source = write_tiny(tmp_path / "float", family, **overrides)
    convert(write_gguf(float_source, tmp_path / "m.gguf", arch), tmp_path / "out")
    torch.testing.assert_close(
        converted_logits(tmp_path / "out"), converted_logits(source), rtol=0, atol=1e-5
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {checkpoint.dtype(name) for name in checkpoint.names()} == {torch.bfloat16}
    assert checkpoint.names() == open_checkpoint(source).names()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
        LLAMA3,
    ],
)  # fmt: skip
def test_rope_scaling_is_carried_over(tmp_path: Path, scaling) -> None:
    source = write_tiny(
        tmp_path / "source", rope_parameters=scaling, max_position_embeddings=128, head_dim=32
    )
    kind = scaling["rope_type"]
    extra, factors = {}, None
    if kind == "llama3":
        factors = llama3_factors(32, 500000.0, 8.0)
    else:
        extra = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        extra["llama.rope.scaling.original_context_length"] = 32
    convert(
        write_gguf(source, tmp_path / "m.gguf", "llama", extra=extra, factors=factors),
        tmp_path / "out",
    )
    expected = write_tiny(
        tmp_path / "bf16", rope_parameters=scaling, head_dim=32, dtype=torch.bfloat16
    )
    torch.testing.assert_close(
        converted_logits(tmp_path / "out"), converted_logits(expected), rtol=0, atol=1e-5
    )


def test_quantized_tensors_are_dequantized(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_gguf(
        tiny_llama, tmp_path / "m.gguf", "llama", quant=gguf.GGMLQuantizationType.Q8_0
    )
    convert(file, tmp_path / "out")
    source, written = open_checkpoint(tiny_llama), open_checkpoint(tmp_path / "out")
    for name in source.names():
        torch.testing.assert_close(
            written.tensor(name).float(), source.tensor(name), rtol=0.01, atol=0.01
        )


MIXED = {
    "q_proj": Kind.Q4_K, "k_proj": Kind.Q8_0, "v_proj": Kind.Q5_K, "o_proj": Kind.Q6_K,
    "gate_proj": Kind.Q4_0, "up_proj": Kind.Q4_1, "down_proj": Kind.Q5_0, "lm_head": Kind.Q8_0,
}  # fmt: skip
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "head_dim": 64,
}


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_kept_codes_have_the_values_of_the_dense_form(tmp_path: Path, family, arch) -> None:
    """Every type, with the rows of q and k in transformers' order, norms and biases beside."""
    source = write_tiny(tmp_path / "source", family, **WIDE)
    file = write_gguf(source, tmp_path / "m.gguf", arch, by_name=MIXED)
    convert(file, tmp_path / "dense")
    convert(file, tmp_path / "codes", keep_codes=True)
    dense, codes = open_checkpoint(tmp_path / "dense"), open_checkpoint(tmp_path / "codes")
    shapes = linear_shapes(ModelConfig.from_dict(dense.config))
    for module, (inputs, outputs) in shapes.items():
        assert codes.is_quantized(module)
        weight = codes.weight(module, in_features=inputs, out_features=outputs)
        assert isinstance(weight, torch.Tensor) == module.endswith("o_proj")  # Q6_K
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        assert torch.equal(values.bfloat16(), dense.tensor(f"{module}.weight"))
    for name in set(dense.names()) - {f"{module}.weight" for module in shapes}:
        assert torch.equal(codes.tensor(name), dense.tensor(name))
    blocks = {kind.name: GGML_QUANT_SIZES[kind] for kind in MIXED.values()}
    for module, (inputs, outputs) in shapes.items():
        kind = next(kind for part, kind in MIXED.items() if module.endswith(part))
        size, num_bytes = blocks[kind.name]
        entry = codes.entries[f"{module}.gguf_blocks"]
        assert entry.num_bytes == outputs * inputs // size * num_bytes  # no larger than the file's


def test_a_file_without_codes_is_the_same_in_both_forms(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", quant=Kind.F16)
    convert(file, tmp_path / "dense")
    convert(file, tmp_path / "codes", keep_codes=True)
    for path in (tmp_path / "dense").iterdir():
        assert path.read_bytes() == (tmp_path / "codes" / path.name).read_bytes()


def test_a_type_that_nothing_reads_is_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch
) -> None:
    original = gguf.quants.dequantize

    def refuse(data: np.ndarray, kind: Kind) -> np.ndarray:
        if kind == Kind.Q4_0:
            raise NotImplementedError
        return original(data, kind)

    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", by_name={"q_proj": Kind.Q4_0})
    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(UnsupportedModelError, match="type Q4_0, which cannot be dequantized"):
        convert(file, tmp_path / "codes", keep_codes=True)


def test_unpermute_undoes_the_pairing() -> None:
    rows = np.arange(8, dtype=np.float32)  # two heads of two pairs: r0 i0 r1 i1
    assert unpermute(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_files_of_the_directory(tiny_llama: Path, tmp_path: Path) -> None:
    convert(write_gguf(tiny_llama, tmp_path / "m.gguf", "llama"), tmp_path / "out")
    names = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(names.values()) == {0o644}
    assert set(names) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": [257, 260], "bos_token_id": 256, "pad_token_id": 258}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' is not supported.*llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, "rotation of a part"),
        ({"llama.attention.value_length": 8}, "different size"),
        ({"llama.attention.sliding_window": 8}, "sliding window"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking'.*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tiny_llama: Path, tmp_path: Path, extra, message) -> None:
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_rope_factors_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", factors=factors)
    with pytest.raises(UnsupportedModelError, match="no known Llama 3"):
        convert(file, tmp_path / "out")


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.block_count": None},
        {"llama.block_count": "two"},
        {"llama.attention.layer_norm_rms_epsilon": None},
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.token_type": [1, 2]},
    ],
)
def test_missing_or_damaged_metadata(tiny_llama: Path, tmp_path: Path, extra) -> None:
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", extra=extra)
    with pytest.raises(CheckpointError, match=r"llama\.block_count|epsilon|token"):
        convert(file, tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 10, 3000, -1000])
def test_truncated_file(tiny_llama: Path, tmp_path: Path, keep: int) -> None:
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or no GGUF"):
        convert(file, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_missing_file_and_existing_output(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "nothing.gguf", tmp_path / "out")
    file = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert(file, tmp_path / "out")


def test_smollm2_facts(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    parameters = sum(entry.num_bytes // 2 for entry in checkpoint.entries.values())
    assert parameters == 134_515_008
    assert checkpoint.config["tie_word_embeddings"] is True
    assert not checkpoint.has("lm_head.weight")
    assert checkpoint.generation_config["eos_token_id"][0] == 2  # <|im_end|>
    assert checkpoint.config["rms_norm_eps"] == 1e-5


def test_smollm2_tokenizer_traps(smollm2: Path) -> None:
    """Individual digits, byte round trips, specials, and transformers agreeing on the file."""
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode("x =  10") == [104, 446, 256, 33, 32]
    assert tokenizer.encode("2024") == [34, 32, 34, 36]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.eos_token_id == 2
    texts = ["  def f(x):\n\treturn 12345", "naïve 日本語 깰 🎉", " a", "a\u00a0b", "\r\n\r\n"]
    theirs = AutoTokenizer.from_pretrained(smollm2)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(id_) for id_ in ids) == text.encode()
        assert theirs(text).input_ids == ids
    chat = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_predicts_text(smollm2: Path) -> None:
    """A wrong row order or tokenizer would show: a well-known sentence is well predicted."""
    tokenizer = load_tokenizer(smollm2)
    text = (
        "The Pacific Ocean is the largest and deepest of Earth's five oceanic divisions. It "
        "extends from the Arctic Ocean in the north to the Southern Ocean in the south."
    )
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        loss = load_oracle(smollm2)(ids, labels=ids).loss
    assert loss.exp() < 12


def test_a_tensor_name_without_a_dot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "source")
    add = gguf.GGUFWriter.add_tensor

    def rename(self, name, *args, **kwargs):
        return add(self, "nodot" if name == "output_norm.weight" else name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", rename)
    file = write_gguf(source, tmp_path / "m.gguf", "llama")
    with pytest.raises(CheckpointError, match="tensor nodot"):
        convert(file, tmp_path / "out")
