"""The edits of a row against a textbook loop over what a request may ask for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qinfer.engine.edits import History, LogitEditor, bits_of
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request

VOCAB = 40
IDS = st.integers(0, VOCAB - 1)


def make(params: SamplingParams, tokens: list[int], num_prompt: int) -> Request:
    return Request(
        id="r",
        tokens=tokens,
        num_prompt=num_prompt,
        params=params,
        max_length=99,
        stop_ids=frozenset({39}),
    )


def textbook(row: np.ndarray, request: Request, words: list[tuple[int, ...]]) -> np.ndarray:
    """Return the changed row, token by token."""
    params, result = request.params, row.copy()
    output = request.tokens[request.num_prompt :]
    for token, bias in dict(params.logit_bias or ()).items():
        result[token] += np.float32(bias)
    for word in words:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            result[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        result[39] = -np.inf
    for token in set(request.tokens):
        penalty = np.float32(params.repetition_penalty)
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token in set(output):
        result[token] -= np.float32(params.frequency_penalty) * output.count(token)
        result[token] -= np.float32(params.presence_penalty)
    return result


@given(st.data())
def test_edits_are_those_of_the_textbook(data: st.DataObject) -> None:
    """E04: whatever is asked for, and however the output grows, nothing else of the row changes."""
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.25, -1.0])),
        logit_bias=data.draw(st.dictionaries(IDS, st.sampled_from([-100.0, 1.5, 7.0]), max_size=4)),
        min_tokens=data.draw(st.integers(0, 3)),
    )
    words = data.draw(st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3))
    prompt = data.draw(st.lists(IDS, min_size=1, max_size=6))
    request = make(params, prompt, len(prompt))
    editor = LogitEditor(request, words)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    for _ in range(4):
        row = rng.normal(size=VOCAB).astype(np.float32)
        edits, changed = editor.edits(row), row.copy()
        if edits is not None:
            assert len(set(edits.token_ids.tolist())) == len(edits.token_ids)
            changed[edits.token_ids] = edits.values
        np.testing.assert_allclose(changed, textbook(row, request, words), rtol=1e-6)
        assert edits is not None or not editor.idle or np.array_equal(changed, row)
        request.tokens += data.draw(st.lists(IDS, min_size=1, max_size=2))


def test_bans_can_be_lifted() -> None:
    request = make(SamplingParams(min_tokens=2, logit_bias={39: 1.0}), [1, 2], 2)
    editor, row = LogitEditor(request, [(5,)]), np.zeros(VOCAB, dtype=np.float32)
    banned, lifted = editor.edits(row), editor.edits(row, bans=False)
    assert banned is not None
    assert dict(zip(banned.token_ids.tolist(), banned.values.tolist(), strict=True)) == {
        5: -np.inf,
        39: -np.inf,
    }
    assert lifted is not None
    assert (lifted.token_ids.tolist(), lifted.values.tolist()) == ([39], [1.0])


def test_an_editor_is_idle_once_min_tokens_are_reached() -> None:
    request = make(SamplingParams(min_tokens=2), [1, 2], 2)
    editor, row = LogitEditor(request), np.zeros(VOCAB, dtype=np.float32)
    assert not editor.idle
    request.tokens += [3, 4]
    assert editor.idle
    assert editor.edits(row) is None


def test_a_long_history_is_kept() -> None:
    history = History()
    tokens = list(range(1000))
    history.update(tokens, 500)
    tokens += [3, 700, 700]
    history.update(tokens, 500)
    ids, counts = history.view()
    assert ids.tolist() == list(range(1000))
    assert counts[[3, 4, 499, 500, 700, 999]].tolist() == [1, 0, 0, 1, 3, 1]


def test_bits_of_tokens() -> None:
    bits = bits_of([0, 31, 32, 69], 70)
    assert bits.tolist() == [1 + (1 << 31), 1, 1 << 5]
