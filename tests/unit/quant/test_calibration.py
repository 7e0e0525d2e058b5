"""Calibration windows: whatever the text's length, and never silently nothing."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import ConfigError, QuantizationError
from qinfer.quant.calibration import CalibrationSet, cut_windows, load_calibration


def load(path: Path | None, *, num_samples: int = 128, seq_len: int = 512) -> CalibrationSet:
    """Load with one token per word, for a model of 1024 positions."""
    return load_calibration(
        lambda text: [len(word) for word in text.split()],
        path=path,
        num_samples=num_samples,
        seq_len=seq_len,
        max_position=1024,
    )


def test_short_lines_are_joined_and_used_g17(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two three four\n" * 16)
    with caplog.at_level(logging.WARNING, logger="qinfer"):
        calibration = load(path)
    assert calibration.windows == ((3, 3, 5, 4) * 16,)
    assert "only 1 of 128 samples of 512 tokens found (64 tokens in all)" in caplog.text
    assert calibration.to_dict() | {"sha256": ""} == {
        "source": "text.txt",
        "num_samples": 1,
        "seq_len": 512,
        "num_tokens": 64,
        "available_tokens": 64,
        "sha256": "",
    }


@pytest.mark.parametrize(
    ("text", "lines", "tokens"),
    [("", 0, 0), ("\n  \n", 2, 0), ("ab", 1, 1), ("one two three four\n" * 3, 3, 12)],
)
def test_too_few_tokens_are_an_error_with_the_lengths_g17(
    tmp_path: Path, text: str, lines: int, tokens: int
) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(text)
    message = (
        rf"empty\.txt: {len(text)} characters in {lines} lines give {tokens} tokens, "
        r".* at least 64 are needed"
    )
    with pytest.raises(QuantizationError, match=message):
        load(path)


def test_one_long_line_is_cut_and_capped_g17(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 10_000)
    calibration = load(path, num_samples=4, seq_len=32768)
    assert calibration.seq_len == 1024
    assert [len(window) for window in calibration.windows] == [1024] * 4
    assert calibration.available_tokens == 10_000


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.txt: No such file"):
        load(tmp_path / "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        load(tmp_path / "binary")


def test_the_built_in_text_fills_the_defaults() -> None:
    calibration = load(None)
    assert calibration.source == "built-in"
    assert calibration.num_tokens == 128 * 512
    assert len(set(calibration.windows)) == 128


def test_the_hash_sees_tokens_and_borders() -> None:
    sets = [CalibrationSet(windows, "x", 4, 4) for windows in [((1, 2, 3, 4),), ((1, 2), (3, 4))]]
    assert sets[0].sha256 != sets[1].sha256
    assert sets[0].sha256 == CalibrationSet(((1, 2, 3, 4),), "y", 8, 9).sha256


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 40))
def test_windows_are_spread_and_do_not_overlap(
    num_tokens: int, num_samples: int, seq_len: int
) -> None:
    windows = cut_windows(range(num_tokens), num_samples=num_samples, seq_len=seq_len)
    flat = [token for window in windows for token in window]
    assert flat == sorted(set(flat))
    assert 1 <= len(windows) <= num_samples
    if num_tokens >= num_samples * seq_len:
        assert [len(window) for window in windows] == [seq_len] * num_samples
    else:
        assert flat == list(range(num_tokens))
