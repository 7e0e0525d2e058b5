"""The plan: group sizes, overrides and shapes that do not fit, before any weight is read."""

import re

import pytest

from qinfer.errors import ConfigError
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.targets import OVERRIDDEN, make_plan
from qinfer.schemes import WeightScheme

SMOLLM2 = {
    "model.layers.0.self_attn.q_proj": (576, 576),
    "model.layers.0.self_attn.k_proj": (576, 192),
    "model.layers.0.mlp.down_proj": (1536, 576),
}


@pytest.mark.parametrize(
    ("widths", "expected"), [((256, 1024), 128), ((576, 1536), 64), ((96, 256), 32)]
)
def test_auto_divides_every_width(widths: tuple[int, ...], expected: int) -> None:
    shapes = {f"m{width}": (width, 64) for width in widths}
    assert make_plan(shapes, QuantizeConfig()).scheme.group_size == expected


def test_auto_leaves_out_what_overrides_settle() -> None:
    shapes = {"odd": (40, 64), "a": (256, 64), "b": (512, 64)}
    plan = make_plan(shapes, QuantizeConfig(overrides=("odd=group_size:-1",)))
    assert [str(target.scheme) for target in plan.targets] == [
        "int4 channel sym",
        "int4 g128 sym",
        "int4 g128 sym",
    ]


def test_misfits_are_all_listed_g10() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(SMOLLM2, QuantizeConfig(group_size=128))
    message = str(caught.value)
    assert "2 of 3 modules" in message
    for name in ("q_proj", "k_proj"):
        assert f"self_attn.{name}: in_features 576" in message
    assert "multiple of group size 128 (4.5 groups)" in message
    assert "down_proj" not in message
    assert "--on-misfit skip" in message


def test_misfits_are_skipped_on_request_with_their_cost_g10() -> None:
    plan = make_plan(SMOLLM2, QuantizeConfig(group_size=128, on_misfit="skip"))
    assert [target.name[-6:] for target in plan.misfits] == ["q_proj", "k_proj"]
    weights = 576 * 576 + 576 * 192
    assert plan.skip_cost_bytes(2) > 1.4 * weights
    assert plan.targets[2].scheme == WeightScheme(4, 128, act_order=True)
    rules = plan.file_overrides()
    assert list(rules.values()) == [None, None]
    assert all(
        re.match(rule, target.name) for rule, target in zip(rules, plan.misfits, strict=True)
    )


def test_dimensions_that_fill_no_words_are_named_g11() -> None:
    with pytest.raises(ConfigError, match="out_features 36 x 4 bits does not fill"):
        make_plan({"m": (64, 36)}, QuantizeConfig())
    with pytest.raises(ConfigError, match="in_features 36 x 4 bits does not fill"):
        make_plan({"m": (36, 64)}, QuantizeConfig(group_size=-1))
    make_plan({"m": (40, 48), "n": (48, 40)}, QuantizeConfig(group_size=-1))


def test_overrides_in_order_and_as_the_file_holds_them_g19() -> None:
    config = QuantizeConfig(
        overrides=(r"k_proj=skip", r"layers\.0\.self_attn=bits:8,group_size:32")
    )
    plan = make_plan(SMOLLM2, config)
    schemes = {target.name.rpartition(".")[2]: target.scheme for target in plan.targets}
    assert schemes["q_proj"] == WeightScheme(8, 32, act_order=True)
    assert schemes["k_proj"] is None
    assert plan.targets[1].reason == OVERRIDDEN
    assert plan.misfits == ()
    for target in plan.targets:
        rules = plan.file_overrides()
        found = [scheme for rule, scheme in rules.items() if re.match(rule, target.name)]
        assert (found[0] if found else plan.scheme) == target.scheme


def test_useless_overrides_are_refused() -> None:
    with pytest.raises(ConfigError, match="'w_proj' matches no module"):
        make_plan(SMOLLM2, QuantizeConfig(overrides=("w_proj=bits:8",)))
    with pytest.raises(ConfigError, match="nothing to quantize"):
        make_plan(SMOLLM2, QuantizeConfig(overrides=("proj=skip",)))


def test_sizes_by_hand() -> None:
    target = make_plan({"m": (128, 64)}, QuantizeConfig(group_size=32)).targets[0]
    assert target.file_bytes(2) == 128 * 64 // 2 + 4 * 64 * 2 + 4 * 64 // 2 + 128 * 4
    assert target.dense_bytes(2) == 128 * 64 * 2
