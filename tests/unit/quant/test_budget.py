"""What choosing bits takes of memory and disk, as settled beforehand."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_tiny

from qinfer.checkpoint.reader import open_checkpoint
from qinfer.errors import CapacityError
from qinfer.quant import budget
from qinfer.quant.budget import Budget
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.job import Job, prepare

TOKENS = 8192
CALIBRATION = CalibrationSet(((0,) * TOKENS,) * 12, "test", TOKENS, 12 * TOKENS)
# What gradients need is far more here than what calibration does.
SHAPE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}


def job_for(path: Path, target_bits: float | None = 4.0) -> Job:
    options = QuantizeConfig(group_size=32, target_bits=target_bits, gptaq=False)
    return prepare(open_checkpoint(path), options)


def needed(job: Job, calibration: CalibrationSet = CALIBRATION) -> int:
    """Return the megabytes that the refusal names."""
    with pytest.raises(CapacityError) as info:
        Budget.settle(job, calibration, threads=2, memory=1)
    return int(re.findall(r"take about ([\d,]+) MB", str(info.value))[0].replace(",", ""))


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "resident_bytes", lambda: 300_000_000)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_the_number_that_is_named_works_and_less_does_not(tmp_path: Path, family: str) -> None:
    job = job_for(write_tiny(tmp_path / "model", family, **SHAPE))
    least = needed(job)
    with pytest.raises(CapacityError):
        Budget.settle(job, CALIBRATION, threads=2, memory=(least - 1) * 10**6)
    settled = Budget.settle(job, CALIBRATION, threads=2, memory=(least + 1) * 10**6)
    assert 0 <= settled.sensitivity_room <= 2 * 10**6


def test_gradients_count_only_where_bits_are_chosen(tmp_path: Path) -> None:
    """They grow with the windows by more than what is kept of a token in the forward pass."""
    path = write_tiny(tmp_path / "model", **SHAPE)
    assert needed(job_for(path)) > needed(job_for(path, None)) + 50
    shorter = CalibrationSet(((0,) * 1024,) * 12, "test", 1024, 12 * 1024)
    assert needed(job_for(path)) > needed(job_for(path), shorter) + 50


def test_states_that_find_no_room_count_as_disk(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", num_hidden_layers=40, **SHAPE)
    job, least = job_for(path), needed(job_for(path))
    ample = Budget.settle(job, CALIBRATION, threads=2, memory=(least + 5000) * 10**6)
    tight = Budget.settle(job, CALIBRATION, threads=2, memory=(least + 1) * 10**6)
    # In front of 40 blocks and behind the last, residuals, gradients, what linears read.
    states = 8 * TOKENS * 4 * 256 * 44
    assert tight.sensitivity_room < states < ample.sensitivity_room
    output = 2 * job.planned_bytes() + 32 * 2**20
    assert tight.disk_bytes == output + states
    assert ample.disk_bytes == output + 2 * 12 * TOKENS * 4 * 256  # the states of calibration


PEAK = """
import sys
from pathlib import Path
import torch
from qinfer.checkpoint.reader import open_checkpoint
from qinfer.kernels.cpu.arena import return_freed
from qinfer.quant import budget
from qinfer.quant.allocation import allocated
from qinfer.quant.calibration import CalibrationSet
from qinfer.quant.config import QuantizeConfig
from qinfer.quant.job import prepare
from qinfer.quant.workers import Workers

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return 1024 * int(line.split()[1])

windows = torch.randint(0, 256, (8, 1024), generator=torch.Generator().manual_seed(0))
calibration = CalibrationSet(tuple(map(tuple, windows.tolist())), "test", 1024, 8192)
job = prepare(open_checkpoint(Path(sys.argv[1])), QuantizeConfig(target_bits=4.0))
torch.randn(64, 64) @ torch.randn(64, 64)
return_freed(2**20)  # as `quantize` does when memory is limited
with Workers(2) as workers:
    settled = budget.Budget.settle(job, calibration, threads=2, memory=10**12)
    estimated = 10**12 - settled.sensitivity_room - budget.resident_bytes()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    allocated(job, calibration, workers, lambda _: None, room=0)
print(status("VmHWM") - before, estimated - budget._SLACK_BYTES)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_choosing_bits_takes_what_was_estimated(tmp_path: Path) -> None:
    """In a process of its own, with all rows in files."""
    model = write_tiny(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=3072,
        num_attention_heads=8,
        head_dim=64,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    command = [sys.executable, "-c", PEAK, str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, estimated = map(int, result.stdout.split())
    assert estimated / 3 < peak < estimated + budget._SLACK_BYTES


def test_gptaq_counts_only_where_there_are_tokens_enough(tmp_path: Path) -> None:
    """Of 256 inputs: 32 windows of 64 tokens are 8 for each, one window less is too few."""
    source = open_checkpoint(write_tiny(tmp_path / "model", **SHAPE))

    def least(samples: int, *, gptaq: bool) -> int:
        options = QuantizeConfig(group_size=32, gptaq=gptaq, gptaq_samples=samples)
        windows = CalibrationSet(((0,) * 64,) * 64, "test", 64, 64 * 64)
        return Budget.settle(prepare(source, options), windows, threads=2, memory=None).disk_bytes

    assert least(31, gptaq=True) == least(31, gptaq=False)
    assert least(32, gptaq=True) > least(32, gptaq=False)
