"""Choosing bits and groups for a whole model: what is kept together, counted and left alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CapacityError, ConfigError
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


@pytest.mark.parametrize(
    ("family", "per_layer"), [("llama", (4, 4)), ("mixtral", (3, 3)), ("qwen3_moe", (4, 3))]
)
def test_what_runs_as_one_gets_one_form(
    tmp_path: Path, workers: Workers, family: str, per_layer: tuple[int, int]
) -> None:
    """All experts of a layer with all their linears: vLLM loads them as one, in one form."""
    job = job_for(write_tiny(tmp_path / "model", family), target_bits=4.0)
    units = make_units(job)
    found = [sum(f"layers.{layer}." in unit.name for unit in units) for layer in range(2)]
    assert tuple(found) == per_layer
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
    plan, record = choose(job, workers)
    schemes = {target.name: target.scheme for target in plan.targets}
    assert str(schemes["model.layers.0.mlp.down_proj"]) == "int8 g32 sym"
    assert schemes["model.layers.1.self_attn.o_proj"] is None
    assert record["mean_bits"] == pytest.approx(bits_of(plan))
    assert bits_of(plan) <= 12.0


def test_patterns_in_the_file_say_the_same_as_the_plan(tiny_llama: Path, workers: Workers) -> None:
    plan, _ = choose(job_for(tiny_llama, target_bits=3.7), workers)
    for target in plan.targets:
        rule = next((o for o, _ in plan.overrides if o.matches(target.name)), None)
        expected = plan.scheme if rule is None else dict(plan.overrides)[rule]
        assert target.scheme == expected, target.name


def test_a_size_that_cannot_be_is_refused(
    tiny_llama: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.quant.allocation.SensitivityRun", None)  # it is not needed
    # 2-bit codes, and 16 bits of scale for each of 64.
    with pytest.raises(ConfigError, match=r"target_bits 2 is too small: .* need 2\.25;"):
        choose(job_for(tiny_llama, target_bits=2.0), workers)
    with pytest.raises(
        ConfigError, match=r"target_size 10000 is too small: .* need (\d+);"
    ) as info:
        choose(job_for(tiny_llama, target_size=10_000), workers)
    monkeypatch.undo()
    needed = int(re.findall(r"need (\d+)", str(info.value))[0])
    choose(job_for(tiny_llama, target_size=needed), workers)
    half = write_tiny(tmp_path / "half", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="nothing to quantize"):
        choose(job_for(half, target_bits=16.0), workers)
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


@pytest.mark.parametrize("format_", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_a_layer_are_written_in_the_form_that_was_chosen(
    tmp_path: Path, family: str, format_: str
) -> None:
    source = write_tiny(tmp_path / "source", family)
    options: dict[str, Any] = {"num_samples": 4, "seq_len": 48, "format": format_}
    report = quantize(source, tmp_path / "out", target_bits=4.3, **options)
    assert 3.8 < report.allocation["mean_bits"] <= 4.3
    written = open_checkpoint(tmp_path / "out")
    assert written.quantization is not None
    for row in report.rows:
        assert str(written.quantization.scheme_for(row.name)) == row.scheme, row.name
    experts = {row.scheme for row in report.rows if re.search(r"layers\.1\..*experts", row.name)}
    assert len(experts) == 1
    assert experts != {row.scheme for row in report.rows}  # attention got another form
    assert load_decoder(written).memory_bytes > 0


def test_experts_that_no_token_reached_have_no_say(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "mixtral", num_local_experts=24, num_experts_per_tok=1)
    options: dict[str, Any] = {"num_samples": 1, "seq_len": 64, "target_bits": 4.0}
    report = quantize(source, tmp_path / "out", **options)
    rows = [row for row in report.rows if row.name.startswith("model.layers.1.block_sparse_moe")]
    assert any(row.num_tokens == 0 for row in rows)
    assert len({row.scheme for row in rows}) == 1
    assert 0 < report.allocation["least_possible_kld"] <= report.allocation["expected_kld"]


@pytest.mark.parametrize("after", [1, 8])
def test_an_interrupted_run_keeps_its_choice(tiny_llama: Path, tmp_path: Path, after: int) -> None:
    """Interrupted in the first block, or in the second."""
    options: dict[str, Any] = {"num_samples": 4, "seq_len": 48, "target_bits": 4.0}

    def stop(step: QuantProgress) -> None:
        if step.stage == "quantize" and step.done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_llama, tmp_path / "out", on_progress=stop, **options)
    stages: list[str] = []
    continued = quantize(
        tiny_llama, tmp_path / "out", on_progress=lambda s: stages.append(s.stage), **options
    )
    assert continued.resumed_at == (1 if after == 8 else None)
    assert "sensitivity" not in stages
    whole = quantize(tiny_llama, tmp_path / "whole", **options)
    assert whole.to_dict() == continued.to_dict()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert files[0] == files[1]


def test_neither_memory_nor_threads_nor_an_interruption_change_the_choice(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Interrupted on the way forwards, on the way back, and run through with rows in files."""
    options: dict[str, Any] = {"num_samples": 9, "seq_len": 48, "target_bits": 4.0}
    expected = quantize(tiny_llama, dry_run=True, threads=1, **options).allocation

    for after in (5, 20):

        def stop(step: QuantProgress, after: int = after) -> None:
            if step.stage == "sensitivity" and step.done == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            quantize(tiny_llama, tmp_path / "out", on_progress=stop, **options)
    with pytest.raises(CapacityError) as info:
        quantize(tiny_llama, tmp_path / "out", memory=1, threads=3, **options)
    least = int(re.findall(r"take about ([\d,]+) MB", str(info.value))[0].replace(",", ""))
    for threads, memory in ((2, None), (3, (least + 100) * 10**6)):
        report = quantize(
            tiny_llama, tmp_path / f"out{threads}", threads=threads, memory=memory, **options
        )
        assert report.allocation == expected


def test_a_dry_run_keeps_within_the_memory_too(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match="--memory 1 MB is too little"):
        quantize(tiny_llama, dry_run=True, target_bits=4.0, num_samples=4, memory=10**6)
