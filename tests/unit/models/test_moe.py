"""Mixtures of experts: the router, a token's bits whoever else is there, and what is refused."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import load_oracle, write_tiny
from support.decoders import IDS
from support.mixtral import write_as_mixtral
from support.quantized import quantize_directory
from support.steps import Chunk, layout_of, make_inputs, run_chunked

from qinfer import LLM, SamplingParams
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CheckpointError
from qinfer.kvcache.pool import KVPool
from qinfer.models.config import MoEConfig
from qinfer.models.families import MoEFacts
from qinfer.models.layers import GatedMLP, LinearGroup
from qinfer.models.load import load_decoder
from qinfer.models.moe import MoE, Routing
from qinfer.models.native_load import LoadOptions, load_model
from qinfer.schemes import WeightScheme

HIDDEN, INNER = 32, 48
NAMES = MoEFacts("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", None)
EXPERT = "model.layers.1.mlp.experts.4.down_proj.weight"


def small_moe(num_experts: int = 7, chosen: int = 3, *, normalized: bool = True) -> MoE:
    generator = torch.Generator().manual_seed(0)

    def group(**shapes: tuple[int, int]) -> LinearGroup:
        weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return LinearGroup(weights, {}, dtype=torch.float32, device="cpu")

    experts = [
        GatedMLP(group(gate=(INNER, HIDDEN), up=(INNER, HIDDEN)), group(down=(HIDDEN, INNER)))
        for _ in range(num_experts)
    ]
    config = MoEConfig(num_experts, chosen, INNER, normalized, (True,), NAMES)
    router = torch.randn(num_experts, HIDDEN, generator=generator)
    return MoE(config, router, experts, device="cpu")


def inputs(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalized", [True, False])
def test_the_router_takes_the_best_of_a_softmax_over_all(normalized: bool) -> None:
    moe, x = small_moe(normalized=normalized), inputs(50)
    routing = moe.route(x)
    scores = torch.softmax(x.double() @ moe._router._kernel.weight.double().t(), -1)  # type: ignore[attr-defined] # dense here
    best, order = scores.topk(3)
    if normalized:
        best = best / best.sum(-1, keepdim=True)
    assert torch.equal(routing.experts, order)
    assert torch.allclose(routing.weights.double(), best, atol=1e-6)


def test_of_equal_scores_the_lower_expert_comes_first() -> None:
    moe = small_moe()
    routing = moe.route(torch.zeros(2, HIDDEN))
    assert routing.experts.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(routing.weights, torch.full((2, 3), 1 / 3))


def test_the_sum_is_that_of_a_loop_over_tokens() -> None:
    moe, x = small_moe(), inputs(37)
    routing = moe.route(x)
    expected = torch.zeros(37, HIDDEN)
    for token in range(37):
        pairs = zip(routing.experts[token].tolist(), routing.weights[token], strict=True)
        for expert, weight in pairs:
            expected[token] += weight * moe.experts[expert](x[token : token + 1])[0]
    assert torch.allclose(moe(x), expected, atol=1e-3)
    assert expected.std() > 1


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=20), st.integers(1, 6))
def test_rows_and_weights_of_an_expert_belong_together(orders: list[list[int]], k: int) -> None:
    experts = torch.tensor(orders)[:, :k]
    weights = torch.arange(experts.numel()).float().view(experts.shape)
    routing = Routing(experts, weights)
    seen = 0
    for expert in routing.used():
        rows = routing.tokens(expert)
        assert rows.tolist() == sorted(set(rows.tolist()))
        slots = [experts[row].tolist().index(expert) for row in rows]
        assert torch.equal(routing.weights_of(expert), weights[rows, slots])
        seen += len(rows)
    assert seen == experts.numel()


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 64, 300])
def test_e02_a_token_has_the_bits_that_it_has_alone(rows: int) -> None:
    moe, x = small_moe(), inputs(rows)
    together = moe(x)
    for row in range(rows):
        assert torch.equal(together[row], moe(x[row : row + 1])[0])


def test_the_number_of_threads_changes_no_bit() -> None:
    moe, x = small_moe(), inputs(300)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(moe(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_broken_token_spares_its_mates() -> None:
    moe, x = small_moe(), inputs(40)
    expected = moe(x)
    x[7], x[9, 3] = torch.nan, torch.inf
    out = moe(x)
    assert not out[[7, 9]].isfinite().any()
    kept = [row for row in range(40) if row not in {7, 9}]
    assert torch.equal(out[kept], expected[kept])


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("quantized", [False, True])
def test_e02_batch_mates_and_chunks_change_no_bit(
    tmp_path: Path, family: str, dtype: str, kv_dtype: str, *, quantized: bool
) -> None:
    path = write_tiny(tmp_path / "model", family)
    if quantized:
        quantize_directory(path, WeightScheme(4, 32))
    decoder = load_decoder(open_checkpoint(path), dtype=dtype)
    lengths = [1, 5, 16, 17, 40, 64, 90, 2, 33]
    alone = []
    for length in lengths:
        pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
        sizes = [7] * (length // 7) + [length % 7] * (length % 7 > 0)
        alone.append(run_chunked(decoder, IDS[-length:], sizes, pool, range(6)))
    pool = KVPool(layout_of(decoder.config, kv_dtype), 6 * len(lengths))
    chunks = [Chunk(IDS[-n:], 0, range(6 * i, 6 * i + 6)) for i, n in enumerate(lengths)]
    logits = decoder.forward(make_inputs(chunks), pool).logits
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (begin, end), expected in zip(pairwise(bounds), alone, strict=True):
        assert torch.equal(logits[begin:end], expected)


def greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    found = list(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_engine_answers_as_transformers_does(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model", family)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in (IDS[:9], IDS[20:31], IDS[40:41])]
    with caplog.at_level(logging.WARNING, logger="qinfer"):
        engine = LLM(path, threads=1, max_num_seqs=3, kv_cache_dtype="fp32")
    assert "dense layers only, not mixtures of experts" in caplog.text
    model = load_oracle(path)
    with engine:
        answers = engine.generate(prompts, params)
        scored = engine.score([IDS[:40]])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt["prompt_token_ids"]
        expected = greedy(model, ids, 10)
        assert list(answer.outputs[0].token_ids) == expected
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([IDS[:40]])).logits[0, :-1], -1)
    expected_logprobs = rows.gather(1, torch.tensor(IDS[1:40])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(scored[0]), expected_logprobs, atol=1e-4)


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [EXPERT, "model.layers.1.mlp.gate.weight"])
def test_l02_missing_tensors_of_experts_are_named(tmp_path: Path, name: str) -> None:
    path = write_tiny(tmp_path / "model", "qwen3_moe")
    edit(path, name, None)
    with pytest.raises(CheckpointError, match="1 of 41 tensors") as caught:
        load_model(open_checkpoint(path), LoadOptions())
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"), [(EXPERT, (64, 95)), ("model.layers.1.mlp.gate.weight", (5, 64))]
)
def test_tensors_of_another_shape_are_named(
    tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    path = write_tiny(tmp_path / "model", "qwen3_moe")
    edit(path, name, torch.ones(shape))
    with pytest.raises(CheckpointError, match=rf"{name}.*\({shape[0]}, {shape[1]}\)"):
        load_decoder(open_checkpoint(path))


def test_every_expert_is_in_the_bytes_and_in_the_table_of_kernels(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16)
    decoder = load_decoder(open_checkpoint(path))
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    router = 6 * 64 * 2  # held in float32, so that much is added
    assert decoder.memory_bytes == total + router
    rows = {row.layer: row for row in decoder.kernels(layout_of(decoder.config))}
    assert "model.layers.1.mlp.experts.5.gate_proj+mlp.experts.5.up_proj" in rows
    assert rows["model.layers.1.mlp.gate"].description == "float32 64x6"
    assert "model.layers.0.mlp.gate" not in rows


def test_a_dense_mlp_cut_into_experts_is_the_same_function(smollm2: Path, tmp_path: Path) -> None:
    """Four experts of a quarter of the MLP each, all chosen, with a quarter of the weight each."""
    path = write_as_mixtral(smollm2, tmp_path / "mixtral")
    ids = list(range(100, 140))
    logits = []
    for model in (smollm2, path):
        decoder = load_decoder(open_checkpoint(model), dtype="float32")
        pool = KVPool(layout_of(decoder.config), 3)
        logits.append(run_chunked(decoder, ids, [40], pool, range(3)))
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    assert logits[0].std() > 1
