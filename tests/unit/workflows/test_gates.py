"""Limits: kept, or an error that names every row over them."""

from dataclasses import replace

import pytest
from support.records import make_record, make_row

from qinfer.errors import LimitExceededError
from qinfer.workflows.gates import require_within


def test_rows_within_the_limits_pass() -> None:
    require_within(make_record(), max_drift=4.25, max_kld=0.041)
    require_within(make_record(), max_drift=None, max_kld=None)


def test_every_row_over_a_limit_is_named() -> None:
    good = make_row(kv="fp16")
    good = replace(good, quality=replace(good.quality, drift_percent=0.5))
    record = make_record(make_row(kv="int8"), good, make_row(kv="fp8_e4m3"))
    with pytest.raises(LimitExceededError) as caught:
        require_within(record, max_drift=1.0, max_kld=None)
    assert "int8 KV: drift +4.250 % > 1.0 %" in str(caught.value)
    assert "fp8_e4m3" in str(caught.value)
    assert "fp16" not in str(caught.value)
    assert caught.value.exit_code == 8


def test_the_baselines_row_is_never_judged() -> None:
    record = make_record()
    worse = replace(record.rows[0], quality=replace(record.rows[0].quality, drift_percent=99.0))
    require_within(replace(record, rows=(worse,)), max_drift=0.0, max_kld=0.0)


def test_a_limit_of_zero_is_a_limit() -> None:
    with pytest.raises(LimitExceededError, match=r"mean KLD 0\.041 > 0"):
        require_within(make_record(), max_drift=None, max_kld=0.0)
