"""Limits on what a quantized model may cost: passed, or an error that names every row over it."""

from qinfer.errors import LimitExceededError
from qinfer.report.record import EvaluationRecord
from qinfer.report.tables import row_label


def require_within(
    record: EvaluationRecord, *, max_drift: float | None, max_kld: float | None
) -> None:
    """Check every row but the baseline's.

    Args:
        record: what was measured.
        max_drift: largest growth of the perplexity, in percent; None = no limit.
        max_kld: largest mean KL divergence, in nats per token; None = no limit.

    Raises:
        LimitExceededError: a row is over a limit.
    """
    over = []
    for row in record.rows:
        if row.baseline:
            continue
        label = row_label(record, row)
        if max_drift is not None and row.quality.drift_percent > max_drift:
            over.append(f"{label}: drift {row.quality.drift_percent:+.3f} % > {max_drift} %")
        if max_kld is not None and row.divergence.mean > max_kld:
            over.append(f"{label}: mean KLD {row.divergence.mean:.3g} > {max_kld}")
    if over:
        raise LimitExceededError(f"limits exceeded by {'; '.join(over)}")
