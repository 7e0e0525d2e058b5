"""What an operator decides about a server, apart from the model it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from qinfer.engine.aio import DEFAULT_MAX_REQUESTS
from qinfer.server.auth import KeyRing
from qinfer.server.jsonlog import JsonLog


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSettings:
    """Who may call, what is written down, and how much is taken on.

    Args:
        keys: API keys, one of which every request must bring; None = no authentication.
        cors_origins: origins whose pages may call from a browser; none = their browsers refuse.
        request_log: gets a line for every request; None = no log.
        audit_log: gets starts, stops, failures and refused keys; None = no log.
        log_prompts: write what clients send into the request log.
        max_concurrent_requests: requests that are answered at once; more get 429.
        memory: sizes in bytes by name, for metrics and the live view.
        limits: further limits by name, for the live view.
    """

    keys: KeyRing | None = None
    cors_origins: tuple[str, ...] = ()
    request_log: JsonLog | None = None
    audit_log: JsonLog | None = None
    log_prompts: bool = False
    max_concurrent_requests: int = DEFAULT_MAX_REQUESTS
    memory: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def with_engine(self, *, memory: Mapping[str, int], limits: Mapping[str, int]) -> Self:
        """Return the settings with what is known once the model is loaded."""
        return replace(self, memory=memory, limits=limits)
