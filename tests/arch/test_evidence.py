"""What is shown as measured is what a record holds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_s_table_of_speed_is_the_newest_record_s() -> None:
    script = ROOT / "benchmarks" / "readme_table.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
