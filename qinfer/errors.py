"""The exceptions of qinfer: one tree, each message says what, where and what to do.

Every class carries the exit code that the command line ends with, so that scripts can tell a bad
option from a bad file from a missed limit.
"""


class QinferError(Exception):
    """Base of all errors that qinfer raises on purpose; shown without a traceback."""

    exit_code = 1


class ConfigError(QinferError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


class CheckpointError(QinferError):
    """A model directory or file that is missing, damaged, inconsistent or unsafe."""

    exit_code = 3


class UnsupportedModelError(CheckpointError):
    """An architecture, or a variant of one, that qinfer has no facts about."""


class QuantizationError(QinferError):
    """Quantizing could not be done, or not as strictly as asked."""

    exit_code = 4


class NonFiniteError(QinferError):
    """NaN or infinity where the computation must be finite; names the layer."""

    exit_code = 5


class CapacityError(QinferError):
    """What was asked for does not fit into memory, the cache pool or the queue."""

    exit_code = 6


class OverloadedError(CapacityError):
    """Too much is asked for at this moment; try again in about `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestError(QinferError):
    """A generation request whose fields are invalid; `field` names the first offender."""

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """Prompt plus requested tokens exceed what one request may use."""


class MethodMismatchError(QinferError):
    """Two measurements whose methods differ, so their difference would mean nothing."""

    exit_code = 7


class LimitExceededError(QinferError):
    """A gate on quality, memory or speed that the measurement did not pass."""

    exit_code = 8
