"""JSON in pieces: the same as `json.loads`, whatever is cut where."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qinfer.server import json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Cut often."""
    monkeypatch.setattr(json_pieces, "PIECE", 16)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
@example("\U0001f600" * 40, None, True)
@example(["x" * 300, {'a"b': [[]]}, 1e308, -0.0], 1, True)
def test_the_value_is_that_of_json(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert json_pieces.loads(text) == value
    assert json_pieces.loads(f" \n{text}\t") == value


@given(st.text(alphabet='[]{}",:1-.e \\utrfalsn0', max_size=40))
@example("[1,2,]")
@example('{"a":1,}')
@example("[01]")
@example('"\\ud83d\\ude00"')
@example("[NaN, -Infinity]")
@example('{"a" 1}')
@example('"\\x"')
@example("[1 2]")
@example("")
def test_what_is_no_json_is_refused_as_json_does(text):
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            json_pieces.loads(text)
    else:
        assert repr(json_pieces.loads(text)) == repr(expected)


def test_control_characters_belong_escaped():
    with pytest.raises(ValueError, match="Invalid character"):
        json_pieces.loads('"a\nb"')


def test_s04_depth_and_numbers_have_limits():
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        json_pieces.loads("[" * 100_000)
    with pytest.raises(ValueError, match="digits"):
        json_pieces.loads("1" * 5000)
    with pytest.raises(ValueError, match="more than"):
        json_pieces.loads("[" + "[[1]]," * 40_000 + "1]")
