from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import BOS, EOS, FIRST_ALIAS, byte_fallback, write_tokenizer
from tokenizers import decoders

from qinfer.engine.output import Detokenizer, OutputStream, StopMatcher
from qinfer.engine.params import SamplingParams
from qinfer.engine.request import Request
from qinfer.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("fallback")
    write_tokenizer(path, byte_fallback())
    return load_tokenizer(path)


def stream(tokenizer: Tokenizer, ids: list[int], *, stop_ids: set[int] | None = None, **params):
    """Feed `ids` one by one; return the pieces and the end's reason."""
    request = Request(
        id="r",
        tokens=[1],
        num_prompt=1,
        params=SamplingParams(**params),
        max_length=1 + len(ids),
        stop_ids=frozenset(stop_ids or ()),
    )
    output = OutputStream(request, tokenizer)
    pieces = []
    for token in ids:
        request.tokens.append(token)
        text, reason = output.push(token)
        pieces.append(text)
        if reason is not None:
            return pieces, reason
    return pieces, None


def test_text_before_a_stop_string_is_kept_and_nothing_of_it_emitted(tokenizer) -> None:
    """D01: text that could begin a stop string is held back."""
    pieces, reason = stream(tokenizer, [*b"ABCDEFGHIJK"], stop=("DEFGHIJ",))
    assert ("".join(pieces), reason) == ("ABC", "stop")
    assert all("D" not in piece for piece in pieces)


def test_held_text_is_emitted_when_the_stop_string_does_not_complete(tokenizer) -> None:
    """D01: what turned out to be no stop string is not lost."""
    pieces, reason = stream(tokenizer, [*b"ABCDEFGHIJK"], stop=("DEX",))
    assert ("".join(pieces), reason) == ("ABCDEFGHIJK", "length")
    assert pieces[3:6] == ["", "", "DEF"]
    pieces, reason = stream(tokenizer, [*b"ABCD"], stop=("DEX",))
    assert ("".join(pieces), reason) == ("ABCD", "length")


@pytest.mark.parametrize("stops", [("DE", "DEFG"), ("DEFG", "DE"), ("EF", "DEFG"), ("DEF", "EF")])
def test_the_match_that_completes_first_wins(tokenizer, stops) -> None:
    """D01: with one stop string a prefix of another, the order given does not matter."""
    expected = {"DE": "ABC", "EF": "ABCD", "DEF": "ABC"}
    first = min(stops, key=lambda stop: ("ABCDEFG".find(stop) + len(stop), -len(stop)))
    pieces, reason = stream(tokenizer, [*b"ABCDEFGHIJK"], stop=stops)
    assert ("".join(pieces), reason) == (expected[first], "stop")


def test_include_stop_str_in_output(tokenizer) -> None:
    pieces, reason = stream(tokenizer, [*b"ABCDEF"], stop=("CD",), include_stop_str_in_output=True)
    assert ("".join(pieces), reason) == ("ABCD", "stop")


@given(
    text=st.text("ab", min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_result_does_not_depend_on_how_text_is_cut(text, cuts, stops) -> None:
    """D01: streamed text = non-streamed text, for every cut."""

    def feed(pieces: list[str]) -> tuple[str, bool]:
        matcher = StopMatcher(stops, include=False)
        result = ""
        for piece in pieces:
            new, stopped = matcher.push(piece)
            result += new
            if stopped:
                return result, True
        return result + matcher.flush(), False

    pieces, at = [], 0
    for size in cuts:
        pieces.append(text[at : at + size])
        at += size
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert feed(pieces) == feed(list(text)) == feed([text]) == expected


def test_no_stop_below_min_tokens(tokenizer) -> None:
    pieces, reason = stream(tokenizer, [*b"ABABAB"], stop=("AB",), min_tokens=3)
    assert ("".join(pieces), reason) == ("AB", "stop")
    assert len(pieces) == 4


@pytest.mark.parametrize("text", ["naïve", "깰", "a👩‍👩‍👧b", "\ufffd"])
def test_incomplete_characters_are_held_back(tokenizer, text: str) -> None:
    pieces, _ = stream(tokenizer, [*text.encode()])
    assert "".join(pieces) == text
    assert [p for p in pieces if p] == list(text)


def test_bytes_that_never_become_a_character_are_shown_as_replacements(tokenizer) -> None:
    ids = [*b"a\xff\xeab\xea\xb9"]
    pieces, reason = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "a\ufffd\ufffdb\ufffd"
    assert reason == "length"


@given(data=st.binary(max_size=30))
def test_pieces_join_to_the_full_decode(tokenizer, data: bytes) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token) for token in data]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(data)


def test_byte_fallback_pieces_become_characters(fallback) -> None:
    """D03: never `<0xEA>` in the text."""
    pieces, _ = stream(fallback, [*"깰".encode()])
    assert pieces == ["", "", "깰"]


def test_leading_space_is_that_of_the_full_decode(tokenizer, fallback) -> None:
    """D04: the first piece keeps its space where the full decode does."""
    for each, ids in ((tokenizer, [*b" a b"]), (fallback, [FIRST_ALIAS, 97, FIRST_ALIAS, 98])):
        pieces, _ = stream(each, ids)
        assert "".join(pieces) == each.decode(ids) == " a b"


def test_a_stripped_leading_space_stays_stripped(tmp_path: Path) -> None:
    """D04: SentencePiece decoders drop the first space, and only that."""
    backend = byte_fallback()
    backend.decoder = decoders.Metaspace("▁", "always")
    write_tokenizer(tmp_path, backend)
    tokenizer = load_tokenizer(tmp_path)
    ids = [FIRST_ALIAS, FIRST_ALIAS, FIRST_ALIAS]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "  "


@pytest.mark.parametrize("skip", [True, False])
def test_stop_token_ends_the_text_without_its_own(tokenizer, skip: bool) -> None:
    """D04: a special stop token truncates nothing, whether specials are shown or not."""
    ids = [*b"ab", BOS, *b"c", EOS, *b"z"]
    pieces, reason = stream(tokenizer, ids, stop_ids={EOS}, skip_special_tokens=skip)
    assert ("".join(pieces), reason) == ("abc" if skip else "ab<|bos|>c", "stop")
    pieces, _ = stream(
        tokenizer, ids, stop_ids={EOS}, skip_special_tokens=skip, include_stop_str_in_output=True
    )
    assert "".join(pieces) == ("abc" if skip else "ab<|bos|>c<|eos|>")


def test_a_skipped_token_can_not_complete_a_stop_string(tokenizer) -> None:
    """D04: a stop string matches what is shown, and only that."""
    ids = [*b"a", BOS, *b"b"]
    assert stream(tokenizer, ids, stop=("<|bos|>",), skip_special_tokens=True)[1] == "length"
    pieces, reason = stream(tokenizer, ids, stop=("<|bos|>",), skip_special_tokens=False)
    assert ("".join(pieces), reason) == ("a", "stop")


def test_held_text_comes_before_the_end(tokenizer) -> None:
    """A stop token after the beginning of a stop string: the beginning is text after all."""
    pieces, reason = stream(tokenizer, [*b"abX", EOS], stop=("XY",), stop_ids={EOS})
    assert ("".join(pieces), reason) == ("abX", "stop")
