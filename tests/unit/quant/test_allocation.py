"""Choosing bits and groups for a whole model: what is kept together, counted and left alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import ConfigError
from qinfer.models.load import load_decoder
from qinfer.quant.allocation import allocated, make_units
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.job import Job, prepare
from qinfer.quant.pipeline import quantize
from qinfer.quant.report import QuantProgress
from qinfer.quant.targets import Plan
from qinfer.quant.workers import Workers

WINDOWS = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def job_for(path: Path, **options: Any) -> Job:
    return prepare(open_checkpoint(path), QuantizeConfig(group_size=32, **options))


def choose(job: Job, workers: Workers) -> tuple[Plan, dict[str, Any]]:
    calibration = CalibrationSet(tuple(map(tuple, WINDOWS)), "test", 40, 160)
    settled, record = allocated(job, calibration, workers, lambda _: None)
    return settled.plan, record


def bits_of(plan: Plan) -> float:
    """Count bits per weight by hand: codes, and 16 bits of scale per group and row."""
    bits = weights = 0
    for target in plan.targets:
        count = target.in_features * target.out_features
        weights += count
        if target.scheme is None:
            bits += 32 * count  # the tiny model is float32
            continue
        group = target.scheme.group_size or target.in_features
        bits += target.scheme.bits * count + 16 * count // group
    return bits / weights


@pytest.mark.parametrize("target", [3.2, 4.5, 6.0])
def test_keeps_within_the_bits_and_comes_close(
    tiny_llama: Path, workers: Workers, target: float
) -> None:
    plan, record = choose(job_for(tiny_llama, target_bits=target), workers)
    assert target - 0.5 < bits_of(plan) <= target
    assert record["mean_bits"] == pytest.approx(bits_of(plan))
    assert 0 < record["least_possible_kld"] <= record["expected_kld"]


def test_more_bits_are_expected_to_drift_less(tiny_llama: Path, workers: Workers) -> None:
    drifts = [
        choose(job_for(tiny_llama, target_bits=bits), workers)[1]["expected_kld"]
        for bits in (3.0, 4.5, 8.5)
    ]
    assert drifts[0] > 2 * drifts[1] > 8 * drifts[2]


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 4), ("mixtral", 4)])
def test_what_runs_as_one_product_gets_one_form(
    tmp_path: Path, workers: Workers, family: str, per_layer: int
) -> None:
    job = job_for(write_tiny(tmp_path / "model", family), target_bits=4.0)
    units = make_units(job)
    assert len(units) == per_layer * job.model.num_layers
    assert sum(len(unit.targets) for unit in units) == len(job.plan.targets)
    plan, record = choose(job, workers)
    schemes = {target.name: target.scheme for target in plan.targets}
    assert len(set(schemes.values())) > 1
    for unit in units:
        assert len({schemes[target.name] for target in unit.targets}) == 1, unit.name
        assert record["units"][unit.name]["chosen"] in {*map(str, unit.schemes), "unquantized"}


def test_overrides_keep_what_they_say_and_count(tiny_llama: Path, workers: Workers) -> None:
    overrides = (r"layers\.0\.mlp\.down_proj=bits:8", r"layers\.1\.self_attn=skip")
    job = job_for(tiny_llama, target_bits=12.0, overrides=overrides)
    plan, _ = choose(job, workers)
    schemes = {target.name: target.scheme for target in plan.targets}
    assert str(schemes["model.layers.0.mlp.down_proj"]) == "int8 g32 sym"
    assert schemes["model.layers.1.self_attn.o_proj"] is None
    assert bits_of(plan) <= 12.0


def test_patterns_in_the_file_say_the_same_as_the_plan(tiny_llama: Path, workers: Workers) -> None:
    plan, _ = choose(job_for(tiny_llama, target_bits=3.7), workers)
    for target in plan.targets:
        rule = next((o for o, _ in plan.overrides if o.matches(target.name)), None)
        expected = plan.scheme if rule is None else dict(plan.overrides)[rule]
        assert target.scheme == expected, target.name


def test_a_size_that_nothing_fits_is_refused(tiny_llama: Path, workers: Workers) -> None:
    with pytest.raises(ConfigError, match="smallest"):
        choose(job_for(tiny_llama, target_bits=2.0), workers)
    everything = (r"layers=bits:8",)
    with pytest.raises(ConfigError, match="no module to choose for"):
        make_units(job_for(tiny_llama, target_bits=4.0, overrides=everything))


@pytest.mark.parametrize("format_", ["gptq", "compressed-tensors"])
def test_quantize_writes_what_was_chosen_within_the_size(
    tiny_llama: Path, tmp_path: Path, format_: str
) -> None:
    options: dict[str, Any] = {"num_samples": 4, "seq_len": 48, "format": format_}
    plain = quantize(tiny_llama, dry_run=True, weights="int4", **options)
    size = plain.sizes.output_bytes
    planned = quantize(tiny_llama, dry_run=True, target_size=size, **options)
    report = quantize(tiny_llama, tmp_path / "out", target_size=size, **options)
    assert size * 0.97 < report.sizes.output_bytes <= size
    assert [row.scheme for row in report.rows] == [row.scheme for row in planned.rows]
    written = open_checkpoint(tmp_path / "out")
    assert written.total_bytes == report.sizes.output_bytes
    assert written.quantization is not None
    for row in report.rows:
        scheme = written.quantization.scheme_for(row.name)
        assert (None if scheme is None else str(scheme)) == row.scheme, row.name
    assert len({row.scheme for row in report.rows}) > 1
    decoder = load_decoder(written)
    assert decoder.memory_bytes > 0


def test_an_interrupted_run_keeps_its_choice(tiny_llama: Path, tmp_path: Path) -> None:
    """The second run would choose from the record, even if it were another's."""
    options: dict[str, Any] = {"num_samples": 4, "seq_len": 48, "target_bits": 4.0}

    def stop(step: QuantProgress) -> None:
        if step.stage == "quantize" and step.done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_llama, tmp_path / "out", on_progress=stop, **options)
    stages: list[str] = []
    continued = quantize(
        tiny_llama, tmp_path / "out", on_progress=lambda s: stages.append(s.stage), **options
    )
    assert continued.resumed_at == 1
    assert "sensitivity" not in stages
    whole = quantize(tiny_llama, tmp_path / "whole", **options)
    assert whole.to_dict() == continued.to_dict()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert files[0] == files[1]
