"""The recorded C++ program against the reference decoder and transformers."""

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.checkpoints import write_tiny
from support.decoders import IDS, VARIANTS, oracle
from support.steps import Chunk, layout_of, make_inputs, run_chunked

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CapacityError, CheckpointError
from qinfer.formats.weight import QuantizedWeight
from qinfer.kernels.cpu import native, tiled, tiling
from qinfer.kernels.cpu.program import OpKind, Program
from qinfer.kvcache.pool import KVPool
from qinfer.models.causal_lm import CausalLM
from qinfer.models.decoder import Decoder
from qinfer.models.load import load_decoder
from qinfer.models.native import NativeDecoder
from qinfer.models.native_layer import NativeGroup, Placing
from qinfer.models.native_load import LoadOptions, int8_rows, load_model
from qinfer.quant.pipeline import quantize
from qinfer.schemes import WeightScheme

pytestmark = pytest.mark.skipif(
    native.load() is None, reason="the C++ library was not built (no compiler at installation)"
)


def load(path: Path, **options: object) -> CausalLM:
    settings = LoadOptions(**({"dtype": "float32"} | options))  # type: ignore[arg-type] # a test's shorthand
    return load_model(open_checkpoint(path), settings)


def logits_of(decoder: CausalLM, sizes: list[int], kv_dtype: str = "fp32") -> torch.Tensor:
    pool = KVPool(layout_of(decoder.config, kv_dtype), 8)
    return run_chunked(decoder, IDS[: sum(sizes)], sizes, pool, [3, 0, 7, 1, 2, 5, 4, 6])


def embedding_of(decoder: NativeDecoder) -> torch.Tensor:
    embedding = decoder._weights.embedding
    assert embedding is not None
    return embedding


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = write_tiny(tmp_path / "model", family, **overrides)
    decoder = load(path, threads=2)
    assert isinstance(decoder, NativeDecoder)
    expected = oracle(path, IDS)
    assert (logits_of(decoder, [len(IDS)]) - expected).abs().max() < 1e-4


def test_real_model_equals_transformers(smollm2: Path) -> None:
    ids = list(range(100, 180))
    decoder = load(smollm2)
    pool = KVPool(layout_of(decoder.config), 5)
    logits = run_chunked(decoder, ids, [len(ids)], pool, range(5))
    assert (logits - oracle(smollm2, ids)).abs().max() < 1e-4


INT4: dict[str, Any] = {"weights": "int4", "group_size": 32}
SCHEMES: dict[str, dict[str, Any]] = {
    "int4": INT4,
    "int4 asym": {"weights": "int4", "group_size": 64, "asym": True},
    "int8 channel": {"weights": "int8", "group_size": -1},
    "int8 asym": {"weights": "int8", "group_size": 32, "asym": True},
    "mixed": INT4 | {"overrides": (".*v_proj=bits:8", ".*k_proj=skip", r"1\.mlp.*=skip")},
}


def quantized(source: Path, options: dict[str, Any]) -> Path:
    """Round the linears of a checkpoint; returns the new directory beside it."""
    out = source.with_name("quantized")
    quantize(source, out, algorithm="rtn", kv_cache_dtype="none", **options)
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_models_equal_the_reference_and_int8_activations_come_close(
    scheme: str, tmp_path: Path
) -> None:
    path = quantized(write_tiny(tmp_path / "source", "qwen2"), SCHEMES[scheme])
    reference = load_decoder(open_checkpoint(path), dtype="float32")
    expected = logits_of(reference, [50])
    exact = logits_of(load(path, activations="exact", lm_head="model"), [50])
    assert (exact - expected).abs().max() < 1e-4
    rounded = logits_of(load(path, lm_head="model"), [50])
    error = (rounded - expected).norm() / expected.norm()
    assert 0 < error < 0.02
    with_head = logits_of(load(path, activations="exact"), [50])
    assert 0 < (with_head - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("rounded", [False, True])
def test_k06_chunks_change_neither_cache_nor_logits(
    tmp_path: Path, kv_dtype: str, rounded: bool
) -> None:
    path = write_tiny(tmp_path / "source")
    if rounded:
        path = quantized(path, INT4)
    decoder = load(path, threads=2)
    blocks = [3, 0, 2, 5]
    reference_pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
    expected = run_chunked(decoder, IDS[:50], [50], reference_pool, blocks)
    for sizes in ([16, 16, 16, 2], [7] * 7 + [1], [1] * 50, [33, 17]):
        pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
        assert torch.equal(run_chunked(decoder, IDS[:50], sizes, pool, blocks), expected)
        for one, other in zip(pool.snapshot(blocks), reference_pool.snapshot(blocks), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_e02_neither_batch_mates_nor_threads_change_a_bit(tmp_path: Path, threads: int) -> None:
    source = write_tiny(tmp_path / "source", "mistral", sliding_window=20, head_dim=36)
    path = quantized(source, SCHEMES["int8 channel"] | {"on_misfit": "skip"})
    decoder = load(path, threads=threads)
    single = load(path, threads=1)
    lengths = [1, 5, 16, 17, 31, 40, 64, 3, 90, 2, 8, 11, 50, 33, 12, 7]
    prompts = [IDS[-length:] for length in lengths]
    pool = KVPool(layout_of(decoder.config, "int8"), 6 * len(prompts))
    chunks = [Chunk(ids, 0, range(6 * i, 6 * i + 6)) for i, ids in enumerate(prompts)]
    logits = decoder.forward(make_inputs(chunks), pool).logits
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (begin, end), prompt in zip(pairwise(bounds), prompts, strict=True):
        alone = KVPool(layout_of(decoder.config, "int8"), 6)
        expected = run_chunked(single, prompt, [len(prompt)], alone, range(6))
        assert torch.equal(logits[begin:end], expected)


def test_two_pools_and_growing_steps_are_kept_apart(tiny_llama: Path) -> None:
    decoder = load(tiny_llama)
    first, second = (KVPool(layout_of(decoder.config, kv), 6) for kv in ("int8", "fp32"))
    expected = [run_chunked(decoder, IDS[:40], [40], pool, range(6)) for pool in (first, second)]
    for _ in range(2):
        for pool, logits in zip((first, second), expected, strict=True):
            assert torch.equal(run_chunked(decoder, IDS[:40], [3, 37], pool, range(6)), logits)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8_e4m3"])
def test_non_finite_rows_name_their_layer_and_spare_their_mates(
    tmp_path: Path, kv_dtype: str
) -> None:
    decoder = load(write_tiny(tmp_path / "model"))
    assert isinstance(decoder, NativeDecoder)
    embedding_of(decoder)[7] = torch.inf
    pool = KVPool(layout_of(decoder.config, kv_dtype), 4)
    chunks = [Chunk([7, 1, 2], 0, [0]), Chunk([1, 2, 3], 0, [1])]
    output = decoder.forward(make_inputs(chunks), pool)
    assert output.bad_layers.tolist() == [0, 0, 0, -1, -1, -1]
    assert output.logits[3:].isfinite().all()


def test_a_sequence_beyond_the_planned_context_is_refused(tiny_llama: Path) -> None:
    decoder = load(tiny_llama, max_positions=32)
    pool = KVPool(layout_of(decoder.config), 4)
    with pytest.raises(CapacityError, match="40 tokens exceeds the 32"):
        decoder.forward(make_inputs([Chunk(IDS[:40], 0, range(4))]), pool)


def test_what_the_program_cannot_run_falls_back_and_says_so(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = load(tiny_llama, dtype="float16")
    assert isinstance(decoder, Decoder)
    assert "float16 was asked for" in caplog.text


def test_heads_that_the_kernels_do_not_carry_run_on_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model", head_dim=520, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(path), Decoder)
    assert "head_dim 520" in caplog.text


def test_without_the_library_the_reference_runs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "find", lambda: "there is no library")
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(tiny_llama), Decoder)
    assert "there is no library" in caplog.text


def test_m03_bytes_count_every_form_of_the_weights(smollm2: Path) -> None:
    plain, rounded = (load(smollm2, dtype="auto", lm_head=head) for head in ("auto", "int8"))
    embedding = 49152 * 576
    small = 61 * 576 * 2  # norms are float32 here
    assert plain.memory_bytes == plain.weight_bytes().total == 2 * 134_515_008 + small
    assert rounded.memory_bytes - plain.memory_bytes == embedding + 2 * 49152  # codes and scales
    assert plain.weight_bytes().embedding == 0
    assert plain.weight_bytes().head == rounded.weight_bytes().embedding == 2 * embedding
    assert rounded.weight_bytes().layers == plain.weight_bytes().layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden_size", [64, 40])
def test_a_tied_head_is_the_embedding_too_with_the_same_bits(
    tmp_path: Path, dtype: str, hidden_size: int
) -> None:
    path = write_tiny(
        tmp_path / "model", hidden_size=hidden_size, vocab_size=290, tie_word_embeddings=True
    )
    tied, apart = (load(path, dtype=dtype) for _ in range(2))
    assert isinstance(tied, NativeDecoder)
    assert isinstance(apart, NativeDecoder)
    assert tied._weights.embedding is None
    table = open_checkpoint(path).tensor("model.embed_tokens.weight").to(tied.dtype)
    apart._weights = replace(apart._weights, embedding=table)
    assert torch.equal(logits_of(tied, [50]), logits_of(apart, [50]))
    ids, out, program = torch.arange(289, -1, -1), torch.empty(290, hidden_size), Program()
    head = tied._weights.head.linears[0].weight
    tiled.add_embed(program, head, ids, out, torch.tensor([290]))
    program.run(2)
    assert torch.equal(out, table[ids].float())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scheme", [None, "int4 asym", "mixed"])
def test_weights_read_in_small_pieces_are_the_same(
    tmp_path: Path, scheme: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused q, k and v, gate and up: pieces end within one of them or reach over their borders."""
    path = write_tiny(tmp_path / "source", "qwen2", num_attention_heads=6, head_dim=20)
    if scheme is not None:
        path = quantized(path, SCHEMES[scheme] | {"on_misfit": "skip"})
    expected = logits_of(load(path), [50])
    for elements in (1, 64 * 48):
        monkeypatch.setattr(tiling, "_PIECE_ELEMENTS", elements)
        assert torch.equal(logits_of(load(path, threads=threads), [50]), expected)


def test_a_head_that_is_not_finite_is_no_reason_for_the_slow_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny(tmp_path / "model")
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["lm_head.weight"][7, 3] = torch.nan
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head holds NaN"):
        load(path, lm_head="int8")
    assert isinstance(load(path), NativeDecoder)  # as it is; requests will tell
    assert caplog.text == ""


def test_int8_rows_round_to_the_nearest_of_their_scale() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    rounded = int8_rows(weight)
    error = (rounded.dequantize() - weight).abs()
    assert (error <= rounded.scales.float() * 0.51).all()
    assert (rounded.dequantize()[2] == 0).all()


def test_kernel_rows_tell_the_kind_of_activations(tmp_path: Path) -> None:
    path = quantized(write_tiny(tmp_path / "source"), INT4)
    layout = layout_of(load(path).config, "int8")
    kernels = {row.layer: row.kernel for row in load(path).kernels(layout)}
    assert kernels["model.layers.0.mlp.down_proj"] == "cpu.int8"
    assert kernels["lm_head"] == "cpu.int8"
    assert kernels["attention"] == "cpu.paged"
    exact = load(path, activations="exact").kernels(layout)
    assert {row.kernel for row in exact} == {"cpu.exact", "cpu.paged"}


def test_bf16_activations_are_rounded_where_the_machine_gains_by_it(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "source", torch_dtype="bfloat16")
    exact = load(path, dtype="bfloat16", activations="exact")
    rounded = load(path, dtype="bfloat16", threads=2)
    kind = "cpu.bf16" if OpKind.LINEAR_BF16.available else "cpu.exact"
    rows = rounded.kernels(layout_of(rounded.config))
    assert {row.kernel for row in rows} == {kind, "cpu.paged"}
    expected, logits = logits_of(exact, [50]), logits_of(rounded, [50])
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.01
    assert (error > 0) == (kind == "cpu.bf16")
    for sizes in ([16, 16, 18], [7] * 7 + [1], [1] * 50):
        assert torch.equal(logits_of(rounded, sizes), logits)
    whole = load(path, dtype="float32")
    assert "cpu.bf16" not in {row.kernel for row in whole.kernels(layout_of(whole.config))}


def test_what_a_group_keeps_is_what_its_widest_part_needs() -> None:
    """Joined weights share a type of scales, and rows say when codes are held wider."""
    generator = torch.Generator().manual_seed(0)

    def weight(bits: int, scale: float) -> QuantizedWeight:
        half = 1 << (bits - 1)
        codes = torch.randint(-half, half, (16, 64), dtype=torch.int8, generator=generator)
        return QuantizedWeight(codes, torch.full((16, 2), scale), WeightScheme(bits, 32))

    for bits, held in ((3, ", held in 4 bits"), (4, "")):
        narrow, wide = weight(bits, 0.25), weight(bits, 0.1)
        group = NativeGroup({"a": narrow, "b": wide}, {}, prefix="x.", placing=Placing())
        assert [linear.row.layer for linear in group.linears] == ["x.a+b"]
        assert group.linears[0].row.description == f"int{bits} g32 sym 64x32{held}"
        assert group.resident_bytes == 32 * 64 // 2 + 32 * 2 * 4
        alone = NativeGroup({"a": narrow}, {}, prefix="x.", placing=Placing())
        assert alone.resident_bytes == 16 * 64 // 2 + 16 * 2 * 2


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8"])
def test_a_broken_token_leaves_those_before_it_as_they_were(tmp_path: Path, kv_dtype: str) -> None:
    decoder = load(write_tiny(tmp_path / "model"))
    assert isinstance(decoder, NativeDecoder)
    pool = KVPool(layout_of(decoder.config, kv_dtype), 2)
    clean = run_chunked(decoder, [1, 2, 3, 4], [4], pool, [0, 1])
    embedding_of(decoder)[7] = torch.nan
    output = decoder.forward(make_inputs([Chunk([1, 2, 3, 4, 7, 5], 0, [0, 1])]), pool)
    assert torch.equal(output.logits[:4], clean)
    assert output.bad_layers.tolist() == [-1, -1, -1, -1, 0, 0]


@pytest.mark.parametrize("scheme", ["int4", "mixed"])
def test_m01_the_memory_of_a_step_is_told_before_it_is_taken(scheme: str, tmp_path: Path) -> None:
    """M01: the prediction and the program that runs count the same buffers."""
    decoder = load(quantized(write_tiny(tmp_path / "source"), SCHEMES[scheme]), threads=2)
    assert isinstance(decoder, NativeDecoder)
    pool = KVPool(layout_of(decoder.config), 8)
    predicted = decoder.step_bytes(pool.layout, len(IDS), len(IDS))
    run_chunked(decoder, IDS, [len(IDS)], pool, range(8))
    step, scratch = decoder._last, decoder._scratch_floats() * 4
    assert step is not None
    assert predicted == step.nbytes + scratch
    activations = [*step.tokens._floats.values(), *step.rows._floats.values()]
    assert step.nbytes > sum(tensor.nbytes for tensor in activations)
    assert any(tensor.data_ptr() == step.results.logits.data_ptr() for tensor in activations)
