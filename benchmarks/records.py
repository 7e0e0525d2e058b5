"""Files of a run: JSON with every sample, Markdown with the tables."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def free_files(folder: Path, stem: str, *, replace: bool) -> tuple[Path, Path]:
    """Return the JSON and the Markdown file of a run.

    Args:
        folder: made if it is not there.
        stem: their name; a number is added where another run has it.
        replace: take the files of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (stem, *(f"{stem}-{serial}" for serial in range(2, 100))):
        files = (folder / f"{name}.json", folder / f"{name}.md")
        if replace or not files[0].exists():
            return files
    raise FileExistsError(f"{folder} has 99 runs of {stem}; give another --out")


def write(files: tuple[Path, Path], record: Record, page: str) -> None:
    """Write the record and its page, each whole or not at all."""
    texts = (json.dumps(record, indent=1) + "\n", page)
    for path, text in zip(files, texts, strict=True):
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)


def load(path: Path) -> Record:
    """Return the record of a run."""
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record
