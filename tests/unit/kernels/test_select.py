import pytest

from qinfer.errors import ConfigError
from qinfer.kernels.select import Implementation, choose


def implementation(name: str, reason: str | None = None) -> Implementation[str, str]:
    return Implementation(name, lambda spec: reason and f"{spec}: {reason}", name)


def test_the_first_that_supports_the_layer_is_chosen_with_the_reasons_before_it() -> None:
    candidates = [
        implementation("vnni", "no AVX512"),
        implementation("avx2", "group size 7"),
        implementation("reference"),
        implementation("never", "asked"),
    ]
    choice = choose("layer", candidates)
    assert choice.implementation.name == "reference"
    assert choice.refusals == (("vnni", "layer: no AVX512"), ("avx2", "layer: group size 7"))


def test_the_best_candidate_has_no_refusals() -> None:
    assert choose("layer", [implementation("best"), implementation("reference")]).refusals == ()


def test_when_none_runs_the_error_gives_every_reason() -> None:
    candidates = [implementation("vnni", "no AVX512"), implementation("cuda", "no GPU")]
    with pytest.raises(ConfigError, match=r"no kernel runs layer: vnni: .*no AVX512; cuda: .*GPU"):
        choose("layer", candidates)
