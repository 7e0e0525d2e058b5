"""Calls in text: every family, every way to cut it, and what only looks like a call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.server.tool_calls import (
    FAMILIES,
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN_JSON,
    Called,
    FamilyParser,
    ForcedCall,
    Said,
    family_of,
)

NAMES = frozenset({"add", "now"})


def read(parser, pieces):
    """Return the text and the calls that a parser finds."""
    text = ""
    calls: dict[int, list[Any]] = {}
    for found in [item for piece in pieces for item in parser.push(piece)] + parser.finish():
        if isinstance(found, Said):
            text += found.text
            continue
        assert isinstance(found, Called)
        call = calls.setdefault(found.index, [None, ""])
        if found.name is not None:
            assert call == [None, ""]  # once, and first
            call[0] = found.name
        call[1] += found.arguments
    assert list(calls) == list(range(len(calls)))
    assert all(name is not None for name, _ in calls.values())
    return text, [tuple(call) for call in calls.values()]


CASES = [
    (HERMES, "Hello there. ", "Hello there. ", []),
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}"}}\n</tool_call>',
        "Sure.",
        [("add", '{"a": 1, "b": "}"}')],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n<tool_call>{"name": "now"}'
        + "</tool_call>\n",
        "",
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    (HERMES, "a <tool_call>not json</tool_call> b", "a <tool_call>not json</tool_call> b", []),
    (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": null}</tool_call> Done',
        " Done",
        [("now", "{}")],
    ),
    (LLAMA, '{"name": "add", "parameters": {"a": [1, {}]}}', "", [("add", '{"a": [1, {}]}')]),
    (
        LLAMA,
        '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}',
        "",
        [("add", "{}"), ("now", "{}")],
    ),
    (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, "  Hi {", "  Hi {", []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "",
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    (
        MISTRAL,
        'Ok[TOOL_CALLS]add{"a": "[TOOL_CALLS]"}[TOOL_CALLS]now[ARGS]{}',
        "Ok",
        [("add", '{"a": "[TOOL_CALLS]"}'), ("now", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (MISTRAL, "see [1]", "see [1]", []),
    (
        PLAIN_JSON,
        '[{"name": "add", "parameters": {"a": 1}},\n {"name": "now", "parameters": {}}]',
        "",
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    (PLAIN_JSON, "[1, 2]", "[1, 2]", []),
    (PLAIN_JSON, '{"a": {"name": "add"}}', '{"a": {"name": "add"}}', []),
]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
def test_d01_calls_are_found_however_the_text_is_cut(family, text, said, calls):
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(FamilyParser(family, NAMES), pieces) == (said, calls)


WORDS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": ', '"add"']
WORDS += [', "arguments": ', '{"a": 1}', *'}[],; \nx"\\']


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(
        st.sampled_from(WORDS),
        max_size=14,
    ),
    st.data(),
)
def test_d01_cuts_make_no_difference(name, words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
    whole = read(FamilyParser(FAMILIES[name], NAMES), [text])
    assert read(FamilyParser(FAMILIES[name], NAMES), [text[a:b] for a, b in bounds]) == whole


@given(st.text(max_size=60))
def test_text_without_a_marker_is_text(text):
    if not any(char in text for char in "<["):
        assert read(FamilyParser(HERMES, NAMES), list(text)) == (text, [])
        assert read(FamilyParser(MISTRAL, NAMES), list(text)) == (text, [])


def test_arguments_stream_while_they_are_written():
    parser = FamilyParser(HERMES, NAMES)
    parser.push('<tool_call>{"name": "add", "arguments": {"a"')
    assert parser.push(": 1") == [Called(0, ": 1")]


def test_calls_over_the_limit_are_left_out():
    parser = FamilyParser(HERMES, NAMES, max_calls=1)
    text = '<tool_call>{"name": "add"}</tool_call>' * 3
    assert read(parser, [text]) == ("", [("add", "{}")])


def test_a_forced_call_takes_all_text_as_arguments():
    assert read(ForcedCall("add"), ['{"a"', ": 1}"]) == ("", [("add", '{"a": 1}')])
    assert read(ForcedCall("add"), []) == ("", [("add", "")])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}<|python_tag|>", LLAMA),
        ("{{ tools }} respond with JSON", PLAIN_JSON),
    ],
)
def test_the_family_is_what_the_template_shows(template, family):
    assert family_of(template) is family


def test_arguments_are_the_models_own_text():
    arguments = json.dumps({"é": "\n", "x": [1.5, None]}, indent=1, ensure_ascii=False)
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(FamilyParser(HERMES, NAMES), list(text)) == ("", [("add", arguments)])
