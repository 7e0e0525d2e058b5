"""The decoder against transformers, and the bits of a token against its company."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_tiny
from support.decoders import IDS, MOE_VARIANTS, VARIANTS, oracle
from support.steps import Chunk, layout_of, make_inputs, run_chunked

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.kvcache.pool import KVPool
from qinfer.models.decoder import Decoder
from qinfer.models.load import load_decoder


def load(path: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(open_checkpoint(path), dtype=dtype)


@pytest.mark.parametrize("variant", [*VARIANTS, *MOE_VARIANTS])
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = (VARIANTS | MOE_VARIANTS)[variant]
    path = write_tiny(tmp_path / "model", family, **overrides)
    decoder = load(path)
    pool = KVPool(layout_of(decoder.config), 8)
    logits = run_chunked(decoder, IDS, [len(IDS)], pool, range(8))
    expected = oracle(path, IDS)
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # the comparison is not one of zeros


def test_real_model_equals_transformers(smollm2: Path) -> None:
    decoder = load(smollm2)
    ids = list(range(100, 180))
    pool = KVPool(layout_of(decoder.config), 5)
    logits = run_chunked(decoder, ids, [len(ids)], pool, range(5))
    assert (logits - oracle(smollm2, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k06_chunks_change_neither_cache_nor_logits(
    tiny_llama: Path, kv_dtype: str, dtype: str
) -> None:
    decoder = load(tiny_llama, dtype)
    ids = IDS[:50]
    blocks = [3, 0, 2, 5]
    reference_pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
    expected = run_chunked(decoder, ids, [50], reference_pool, blocks)
    for sizes in ([16, 16, 16, 2], [7] * 7 + [1], [1] * 50, [33, 17]):
        pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
        logits = run_chunked(decoder, ids, sizes, pool, blocks)
        assert torch.equal(logits, expected)
        for one, other in zip(pool.snapshot(blocks), reference_pool.snapshot(blocks), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8_e4m3"])
def test_e02_batch_mates_change_no_bit(tmp_path: Path, kv_dtype: str) -> None:
    path = write_tiny(tmp_path / "model", "mistral", sliding_window=20, head_dim=36)
    decoder = load(path)
    lengths = [1, 5, 16, 17, 31, 40, 64, 3, 90, 2, 8, 11, 50, 33, 12, 7]
    prompts = [IDS[-length:] for length in lengths]
    alone = []
    for prompt in prompts:
        pool = KVPool(layout_of(decoder.config, kv_dtype), 6)
        alone.append(run_chunked(decoder, prompt, [len(prompt)], pool, range(6)))
    pool = KVPool(layout_of(decoder.config, kv_dtype), 6 * len(prompts))
    chunks = [Chunk(ids, 0, range(6 * i, 6 * i + 6)) for i, ids in enumerate(prompts)]
    logits = decoder.forward(make_inputs(chunks), pool).logits
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (begin, end), expected in zip(pairwise(bounds), alone, strict=True):
        assert torch.equal(logits[begin:end], expected)


def test_stale_non_finite_cache_content_is_not_read(tiny_llama: Path) -> None:
    decoder = load(tiny_llama)
    clean = KVPool(layout_of(decoder.config, "int8"), 2)
    dirty = KVPool(layout_of(decoder.config, "int8"), 2)
    for layer in range(decoder.config.num_layers):
        for scales in (dirty.layer(layer).k_scales, dirty.layer(layer).v_scales):
            assert scales is not None
            scales.fill_(torch.nan)
    expected = run_chunked(decoder, IDS[:20], [20], clean, [1, 0])
    assert torch.equal(run_chunked(decoder, IDS[:20], [20], dirty, [1, 0]), expected)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8_e4m3"])
def test_non_finite_rows_name_their_layer_and_spare_their_mates(
    tmp_path: Path, kv_dtype: str
) -> None:
    path = write_tiny(tmp_path / "model")
    decoder = load(path)
    decoder._embedding[7] = torch.inf
    pool = KVPool(layout_of(decoder.config, kv_dtype), 4)
    chunks = [Chunk([7, 1, 2], 0, [0]), Chunk([1, 2, 3], 0, [1])]
    output = decoder.forward(make_inputs(chunks), pool)
    assert output.bad_layers.tolist() == [0, 0, 0, -1, -1, -1]
    assert output.logits[3:].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_threads_changes_no_bit(tmp_path: Path, dtype: str) -> None:
    path = write_tiny(tmp_path / "model", hidden_size=144, intermediate_size=1000, head_dim=36)
    decoder = load(path, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            pool = KVPool(layout_of(decoder.config, "int8"), 6)
            results.append(run_chunked(decoder, IDS, [len(IDS)], pool, range(6)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8"])
def test_a_broken_token_leaves_those_before_it_as_they_were(tmp_path: Path, kv_dtype: str) -> None:
    decoder = load(write_tiny(tmp_path / "model"))
    pool = KVPool(layout_of(decoder.config, kv_dtype), 2)
    clean = run_chunked(decoder, [1, 2, 3, 4], [4], pool, [0, 1])
    decoder._embedding[7] = torch.nan
    output = decoder.forward(make_inputs([Chunk([1, 2, 3, 4, 7, 5], 0, [0, 1])]), pool)
    assert torch.equal(output.logits[:4], clean)
    assert output.bad_layers.tolist() == [-1, -1, -1, -1, 0, 0]
