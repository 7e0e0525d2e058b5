"""Cutting a text into windows, and perplexity against figures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import ConfigError
from qinfer.quality.perplexity import (
    bits_per_byte,
    cut_windows,
    drift_interval,
    drift_percent,
    mean_nll,
    perplexity,
    perplexity_interval,
    word_perplexity,
)


def test_b02_every_token_weighs_the_same() -> None:
    """B02: exp(sum of NLL / tokens), not the mean of the sequences' means."""
    losses = [[0.1, 0.2, 0.1], [0.3, 0.5, 0.1, 0.4, 0.2]]
    logprobs = [[-value for value in row] for row in losses]
    assert perplexity(logprobs) == pytest.approx(1.26807, abs=1e-5)
    mean_of_means = math.exp((0.4 / 3 + 1.5 / 5) / 2)
    assert perplexity(logprobs) != pytest.approx(mean_of_means, abs=1e-3)


def test_plain_windows_never_score_their_first_token() -> None:
    windows = cut_windows(range(10), window=4, stride=4)
    assert [w.token_ids for w in windows] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [w.scored_ids for w in windows] == [(1, 2, 3), (5, 6, 7), (9,)]


def test_overlapping_windows_score_only_new_tokens() -> None:
    windows = cut_windows(range(10), window=4, stride=2)
    assert [w.token_ids for w in windows] == [
        (0, 1, 2, 3),
        (2, 3, 4, 5),
        (4, 5, 6, 7),
        (6, 7, 8, 9),
    ]
    assert [w.scored_ids for w in windows] == [(1, 2, 3), (4, 5), (6, 7), (8, 9)]


def test_a_bos_token_counts_into_the_window_and_gives_the_first_token_a_context() -> None:
    windows = cut_windows(range(6), window=4, stride=3, bos_token_id=99)
    assert [w.token_ids for w in windows] == [(99, 0, 1, 2), (99, 3, 4, 5)]
    assert [w.scored_ids for w in windows] == [(0, 1, 2), (3, 4, 5)]


def test_a_last_window_without_a_token_to_score_is_dropped() -> None:
    assert len(cut_windows(range(9), window=4, stride=4)) == 2


def test_num_windows_stops_early() -> None:
    assert len(cut_windows(range(100), window=4, stride=4, num_windows=3)) == 3


@given(
    length=st.integers(2, 60),
    window=st.integers(3, 20),
    data=st.data(),
    bos=st.sampled_from([None, 7]),
)
def test_each_token_is_scored_at_most_once_and_overlap_leaves_none_out(
    length: int, window: int, data: st.DataObject, bos: int | None
) -> None:
    content = window - (bos is not None)
    stride = data.draw(st.integers(1, content))
    windows = cut_windows(range(100, 100 + length), window=window, stride=stride, bos_token_id=bos)
    scored = [token for w in windows for token in w.scored_ids]
    assert len(scored) == len(set(scored))
    assert all(len(w.token_ids) <= window and w.num_scored > 0 for w in windows)
    if bos is not None or stride < content:
        assert scored == list(range(100 + (bos is None), 100 + length))
    for w in windows:  # a window is a piece of the text, in order
        text = w.token_ids[bos is not None :]
        assert list(text) == list(range(text[0], text[0] + len(text)))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 4, "stride": 5}, "stride"),
        ({"window": 4, "stride": 0}, "stride"),
        ({"window": 1, "stride": 1}, "window"),
        ({"window": 4, "stride": 4, "bos_token_id": 1}, "stride"),
        ({"window": 4, "stride": 4, "num_windows": 0}, "num_windows"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        cut_windows(range(20), **options)


def test_a_text_too_short_to_score_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 tokens"):
        cut_windows([5], window=4, stride=4)


def test_bits_per_byte_and_word_perplexity_by_hand() -> None:
    logprobs = [[-math.log(2)] * 6]
    assert bits_per_byte(logprobs, num_bytes=12) == pytest.approx(0.5)
    assert word_perplexity(logprobs, num_words=3) == pytest.approx(4.0)
    assert word_perplexity(logprobs, num_words=0) is None
    assert word_perplexity([[-800.0]], num_words=1) is None


def test_drift_is_relative_to_the_baseline() -> None:
    base, worse = [[-1.0, -1.0], [-2.0]], [[-1.1, -1.1], [-2.1]]
    assert drift_percent(worse, base) == pytest.approx(100 * (math.exp(0.1) - 1))
    assert drift_percent(base, base) == 0.0
    assert mean_nll(base) == pytest.approx(4 / 3)


def test_the_paired_interval_cancels_what_is_hard_for_both() -> None:
    base = [[-float(hard)] * 8 for hard in range(1, 9)]
    worse = [[value - 0.1 for value in row] for row in base]
    wide = perplexity_interval(worse)
    narrow = drift_interval(worse, base)
    assert wide is not None
    assert narrow is not None
    assert wide[0] < perplexity(worse) < wide[1]
    assert narrow[0] == pytest.approx(narrow[1])
    assert narrow[0] == pytest.approx(drift_percent(worse, base))
    assert perplexity_interval(worse) == wide  # the seed is fixed


def test_one_window_has_no_interval() -> None:
    assert perplexity_interval([[-1.0]]) is None
    assert drift_interval([[-1.0]], [[-1.0]]) is None
