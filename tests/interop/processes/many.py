"""Runs the `main` of a script of this kind several times in one process: engines start slowly.

python many.py SCRIPT.py TASKS.json RESULTS.json

TASKS.json is a list of lists of arguments. The results are one entry each, written after every
task: nothing, or why it failed.
"""

import importlib.util
import json
import sys
import traceback
from pathlib import Path


def main(script: str, tasks: str, results: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str | None] = []
    for arguments in json.loads(Path(tasks).read_text(encoding="utf-8")):
        try:
            vars(module)["main"](*arguments)
            found.append(None)
        except Exception as error:  # noqa: BLE001  the process's edge: the reason is reported
            traceback.print_exc()
            found.append(f"{type(error).__name__}: {error}")
        Path(results).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
