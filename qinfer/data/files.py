"""The texts that ship in the package: calibration, evaluation, demo prompts.

Where they come from and under which licence: `NOTICE.md` beside them.
"""

from importlib.resources import files


def calibration_text() -> str:
    """Return the default calibration text (a public-domain novel, 400 kB)."""
    return _read("calibration.txt")


def evaluation_text() -> str:
    """Return the default evaluation text (Wikipedia articles, 160 kB, CC BY-SA)."""
    return _read("evaluation.txt")


def demo_prompts() -> tuple[str, ...]:
    """Return the prompts of the demo, single questions for a chat model."""
    return tuple(_read("demo_prompts.txt").splitlines())


def _read(name: str) -> str:
    return files("qinfer.data").joinpath(name).read_text(encoding="utf-8")
