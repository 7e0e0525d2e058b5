import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import CheckpointError, QuantizationError
from qinfer.formats.kv_scales import (
    StaticKVScheme,
    is_kv_scale,
    kv_config,
    kv_scale_tensors,
    parse_kv_scheme,
    read_kv_scales,
)

ATTENTION = "model.layers.5.self_attn"


def scales_of(tensors: dict[str, torch.Tensor]):
    return read_kv_scales(5, tensors.__contains__, tensors.__getitem__)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, None),
        (kv_config(), StaticKVScheme(8, "float", "tensor", symmetric=True)),
        ({"num_bits": 8, "type": "float", "dynamic": False},  # ModelOpt
         StaticKVScheme(8, "float", "tensor", symmetric=True)),
        ({"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True},
         StaticKVScheme(8, "float", "attn_head", symmetric=True)),
        ({"num_bits": 8, "type": "int", "symmetric": False},
         StaticKVScheme(8, "int", "tensor", symmetric=False)),
        ({"num_bits": 8, "type": "float", "dynamic": True}, None),
    ],
)  # fmt: skip
def test_schemes_in_the_wild(raw, expected) -> None:
    assert parse_kv_scheme({"kv_cache_scheme": raw}) == expected


@pytest.mark.parametrize("raw", ["fp8", {"type": "float"}])
def test_a_damaged_scheme_is_refused(raw) -> None:
    with pytest.raises(CheckpointError, match="object with num_bits"):
        parse_kv_scheme({"kv_cache_scheme": raw})


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_cache.scale", "v_cache.scale"),
    ],
)
def test_names_in_the_wild(k: str, v: str) -> None:
    tensors = {f"{ATTENTION}.{k}": torch.tensor([0.5]), f"{ATTENTION}.{v}": torch.tensor([0.25])}
    assert all(is_kv_scale(name) for name in tensors)
    found = scales_of(tensors)
    assert found is not None
    assert [scale.tolist() for scale in found] == [[0.5], [0.25]]
    with pytest.raises(CheckpointError, match="one of K and V only"):
        scales_of(dict([tensors.popitem()]))


def test_one_scale_for_both_and_none_at_all() -> None:
    found = scales_of({f"{ATTENTION}.kv_scale": torch.tensor(2.0)})
    assert found is not None
    assert [scale.tolist() for scale in found] == [[2.0], [2.0]]
    assert scales_of({}) is None


def test_scales_per_head_are_flattened() -> None:
    heads = torch.tensor([0.5, 1.0]).reshape(2, 1, 1)
    found = scales_of({f"{ATTENTION}.k_scale": heads, f"{ATTENTION}.v_scale": 2 * heads})
    assert found is not None
    assert [scale.tolist() for scale in found] == [[0.5, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_no_positive_number_is_refused(value: float) -> None:
    one = torch.tensor([value])
    with pytest.raises(CheckpointError, match=r"k_scale holds a scale that is not a positive"):
        scales_of({f"{ATTENTION}.k_scale": one, f"{ATTENTION}.v_scale": torch.ones(1)})


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.weight_scale", "model.layers.0.self_attn.k_proj.weight",
     "model.layers.0.self_attn.k_norm.weight"],
)  # fmt: skip
def test_other_tensors_are_no_scales_of_the_cache(name: str) -> None:
    assert not is_kv_scale(name)


@given(
    k=st.floats(0.0, 1e4), v=st.floats(1e-3, 1e4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_written_scales_never_clip_and_are_read_back(k: float, v: float, dtype) -> None:
    tensors = kv_scale_tensors(5, k, v, dtype)
    assert set(tensors) == {f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"}
    assert all(t.dtype == dtype and t.shape == (1,) for t in tensors.values())
    found = scales_of(tensors)
    assert found is not None
    for scale, amax in zip(found, (k, v), strict=True):
        assert float(scale) * 448 >= amax or amax == 0
        if amax > 1:
            assert float(scale) <= amax / 448 * (1 + 2**-7)


@pytest.mark.parametrize("amax", [-1.0, float("inf"), float("nan"), 1e9])
def test_magnitudes_that_cannot_be_are_refused(amax: float) -> None:
    with pytest.raises(QuantizationError, match=r"v_scale"):
        kv_scale_tensors(5, 1.0, amax, torch.float16)
