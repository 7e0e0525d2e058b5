"""The texts that ship in the package: calibration, evaluation, demo prompts.

Where they come from and under which licence: `NOTICE.md` beside them.
"""

from importlib.resources import files


def calibration_text() -> str:
    """Return the default calibration text: a novel, then Wikipedia articles, 250 kB each.

    Two kinds of prose, because a model calibrated on one alone is the worse for the other.
    """
    return _read("calibration_novel.txt") + "\n" + _read("calibration_articles.txt")


def evaluation_text() -> str:
    """Return the default evaluation text (Wikipedia articles, 160 kB, CC BY-SA)."""
    return _read("evaluation.txt")


def demo_prompts() -> tuple[str, ...]:
    """Return the prompts of the demo, single questions for a chat model."""
    return tuple(_read("demo_prompts.txt").splitlines())


def _read(name: str) -> str:
    return files("qinfer.data").joinpath(name).read_text(encoding="utf-8")
