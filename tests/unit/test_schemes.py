import pytest

from qinfer.errors import ConfigError
from qinfer.schemes import KV_SCHEMES, WeightScheme, parse_kv_dtype


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -4])
def test_a_width_that_no_format_carries_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"weight bits {bits} not supported"):
        WeightScheme(bits, 64)


@pytest.mark.parametrize("group_size", [0, -1])
def test_a_group_size_must_be_positive(group_size: int) -> None:
    with pytest.raises(ConfigError, match="group size"):
        WeightScheme(4, group_size)


@pytest.mark.parametrize(
    ("group_size", "in_features", "groups"),
    [(None, 576, 1), (64, 576, 9), (64, 577, 10), (128, 64, 1), (32, 32, 1)],
)
def test_the_last_group_may_be_short(group_size: int | None, in_features: int, groups: int) -> None:
    assert WeightScheme(4, group_size).num_groups(in_features) == groups


def test_labels_say_width_group_and_symmetry() -> None:
    assert str(WeightScheme(4, 64)) == "int4 g64 sym"
    assert str(WeightScheme(8, None, symmetric=False)) == "int8 channel asym"


@pytest.mark.parametrize(
    ("dtype", "element", "scale", "quantized"),
    [
        ("fp32", 4, 0, False),
        ("fp16", 2, 0, False),
        ("bf16", 2, 0, False),
        ("fp8_e4m3", 1, 2, True),
        ("int8", 1, 2, True),
    ],
)
def test_kv_sizes(dtype: str, element: int, scale: int, quantized: bool) -> None:
    scheme = KV_SCHEMES[dtype]
    assert (scheme.element_bytes, scheme.scale_bytes, scheme.quantized) == (
        element,
        scale,
        quantized,
    )
    assert str(scheme) == dtype


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("bfloat16", "bf16"), ("int8", "int8")],
)
def test_spellings_of_kv_types(spelling: str, dtype: str) -> None:
    assert parse_kv_dtype(spelling) is KV_SCHEMES[dtype]


def test_an_unknown_kv_type_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'int3' is unknown; choose from auto, .*int8"):
        parse_kv_dtype("int3")
