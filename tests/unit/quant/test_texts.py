"""Documents of text and .jsonl files: what is refused is named by its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import ConfigError
from qinfer.quant import texts
from qinfer.quant.texts import parse_record, read_file

GOOD = '{"text": "fine"}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "fine"', "no JSON: Expecting ',' delimiter at column 16"),
        ("fine", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("17", "is needed, not 17"),
        ("{}", "found the keys none"),
        ('{"txt": "a", "id": 1}', "found the keys txt, id"),
        ('{"text": null}', "found the keys text"),
        ('{"text": 5}', "text is 5; text or a list of messages is needed"),
        ('{"messages": []}', r"messages is \[\]"),
        ('{"text": "a \\ud83d b"}', r"half a surrogate pair, '\\ud83d'"),
        ('[{"role": "user", "content": "\\udfff"}]', "message 0: half a surrogate pair"),
        ('[{"role": "user", "content": "a", "name": "\\udfff"}]', "message 0: half a surrogate"),
        ("[]", r"the line is \[\]"),
        ('{"messages": ["hi"]}', "message 0 is 'hi'; an object is needed"),
        ('{"messages": [{"content": "hi"}]}', "message 0 is by None; known are system, user"),
        ('{"conversations": [{"from": "bing", "value": "hi"}]}', "message 0 is by 'bing'"),
        ('[{"role": "user"}]', "the content of message 0 is None; text is needed"),
        ('[{"role": "user", "content": "a"}]', "conversations among documents"),
    ],
)
def test_a_bad_line_is_named_with_the_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(ConfigError, match=rf"data\.jsonl:3: .*{reason}"):
        read_file(path, limit=1 << 20)


def test_bytes_that_are_no_text_and_lines_without_end_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: no UTF-8 text"):
        read_file(path, limit=1 << 20)
    monkeypatch.setattr(texts, "MAX_LINE_BYTES", 1 << 20)
    path.write_text(f"{GOOD}\n" + "x" * (2 << 20))
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: the line is longer than 1 MiB"):
        read_file(path, limit=1 << 20)


def test_bad_lines_are_found_where_lines_are_left_out_too(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [GOOD] * 1000
    path.write_text("\n".join(lines))
    corpus = read_file(path, limit=len(GOOD) * 100)
    assert corpus.found == 1000
    assert 80 <= len(corpus.documents) <= 100
    assert [item.where for item in corpus.documents[:2]] == ["data.jsonl:1", "data.jsonl:12"]
    lines[501] = "{"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"data\.jsonl:502"):
        read_file(path, limit=len(GOOD) * 100)


def test_keys_of_messages_that_a_template_may_read_are_kept_unless_none() -> None:
    message = {"role": "user", "content": "a", "name": "Eve", "tool_calls": None, "from": None}
    document = parse_record([message], where="x")
    assert document.content == [{"role": "user", "content": "a", "name": "Eve"}]


@given(st.text(), st.integers(1, 4000))
def test_excerpts_are_pieces_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, unit: str, n: int
) -> None:
    text = (unit * n)[:20_000]
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    corpus = read_file(path, limit=64 * 40)
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    if len(text.encode()) <= 64 * 40:
        assert [item.content for item in corpus.documents] == [plain]
    for item in corpus.documents:
        assert isinstance(item.content, str)
        assert item.content in plain or "\r" in text


def test_a_text_file_has_universal_newlines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_file(path, limit=100).documents[0].content == "a\nb\nc\n"


def test_a_large_file_with_a_bad_byte_in_an_excerpt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 10_000 + b"\xff" + b"a" * 3)
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        read_file(path, limit=640)


def test_records_are_json_of_any_nesting(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "ünï\u2028code", "meta": {"a": [1]}}, ensure_ascii=False))
    corpus = read_file(path, limit=1 << 20)
    assert (corpus.kind, corpus.documents[0].content) == ("documents", "ünï\u2028code")
