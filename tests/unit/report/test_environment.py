"""What a measurement ran on."""

from datetime import datetime
from pathlib import Path

from qinfer import __version__
from qinfer.report.environment import cpu_name, describe


def test_versions_and_time() -> None:
    where = describe(device="cpu", threads=2)
    assert where.qinfer == __version__
    assert (where.device, where.threads) == ("cpu", 2)
    assert datetime.fromisoformat(where.created).tzinfo is not None
    assert where.torch[0].isdigit()


def test_the_processors_name_comes_from_the_system(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_name(info) == "Some CPU @ 3 GHz"
    assert cpu_name(tmp_path / "none")
