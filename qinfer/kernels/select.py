"""Choosing a kernel: ordered candidates, each refusal with its reason.

A choice is made once per layer at load; `forward` never branches on device or bit width. The
torch reference is always the last candidate, so that something always runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from qinfer.errors import ConfigError

Spec = TypeVar("Spec")
Prepare = TypeVar("Prepare")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[Spec, Prepare]):
    """One way to run a kind of layer.

    Args:
        name: short and unique, such as `reference.dense`.
        supports: None if it can run the described layer, else the reason why not.
        prepare: builds the operation once, when the layer is loaded (repacking a weight, taking
            scratch memory); its signature belongs to the kind of layer.
    """

    name: str
    supports: Callable[[Spec], str | None]
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class Choice(Generic[Spec, Prepare]):
    """The implementation that a layer got, and why not the ones before it."""

    implementation: Implementation[Spec, Prepare]
    refusals: tuple[tuple[str, str], ...]


def choose(
    spec: Spec, candidates: Sequence[Implementation[Spec, Prepare]]
) -> Choice[Spec, Prepare]:
    """Return the first candidate that supports `spec`, with the reasons of those before it.

    Raises:
        ConfigError: none does; the message gives every reason.
    """
    refusals: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = candidate.supports(spec)
        if reason is None:
            return Choice(candidate, tuple(refusals))
        refusals.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise ConfigError(f"no kernel runs {spec}: {reasons}")
