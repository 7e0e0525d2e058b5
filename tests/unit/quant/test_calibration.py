"""Calibration windows: whatever the data's length and form, and never silently nothing."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import BOS, IM_END, IM_START, write_tokenizer

from qinfer.data.files import calibration_text
from qinfer.errors import ConfigError, QuantizationError, RequestError
from qinfer.models.tokenizer import load_tokenizer
from qinfer.quant.calibration import (
    CalibrationSet,
    cut_windows,
    load_calibration,
    pack,
    spread,
)

LLAMA_STYLE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def word_lengths(text: str) -> list[int]:
    """One token per word."""
    return [len(word) for word in text.split()]


def load(path: str | Path | None, **options: Any) -> CalibrationSet:
    """Load with one token per word, for a model of 1024 positions."""
    settings = {"num_samples": 128, "seq_len": 512} | options
    return load_calibration(word_lengths, path=path, max_position=1024, **settings)


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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
        "kind": "text",
        "documents": 1,
        "documents_read": 1,
        "text_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
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
    assert calibration.windows == cut_windows(
        word_lengths(calibration_text()), num_samples=128, seq_len=512
    )


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


def test_texts_of_a_jsonl_file_are_joined_with_nothing_between(tmp_path: Path) -> None:
    texts = [f"{'a' * (1 + index % 9)} b " * 5 for index in range(40)]
    path = write_jsonl(tmp_path / "texts.jsonl", *({"text": text, "id": 1} for text in texts))
    calibration = load(path, num_samples=6, seq_len=64)
    tokens = [token for text in texts for token in word_lengths(text)]
    assert calibration.windows == cut_windows(tokens, num_samples=6, seq_len=64)
    assert (calibration.kind, calibration.documents, calibration.documents_read) == (
        "documents",
        40,
        40,
    )
    assert calibration.text_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def plain_render(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    text = "".join(f"<{m['role']}> {m['content']} " for m in messages)
    return text + ("<assistant> " if add_generation_prompt else "")


CHAT = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
SHAREGPT = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]


@pytest.mark.parametrize(
    "record", [{"messages": CHAT}, {"conversations": SHAREGPT}, CHAT, SHAREGPT]
)
def test_conversations_of_every_spelling_are_rendered_the_same(
    tmp_path: Path, record: object
) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", *[record] * 20)
    calibration = load(path, num_samples=3, seq_len=32, render=plain_render)
    # <user> one two <assistant> three = 5 tokens; 7 of them fill a window of 32, cut.
    assert calibration.windows == (((6, 3, 3, 11, 5) * 7)[:32],) * 2 + ((6, 3, 3, 11, 5) * 6,)
    assert (calibration.kind, calibration.available_tokens) == ("conversations", 100)


def test_an_unanswered_conversation_ends_with_the_prompt_to_answer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", *[CHAT[:1]] * 40)
    windows = load(path, num_samples=1, seq_len=160, render=plain_render).windows
    assert windows == ((6, 3, 3, 11) * 40,)


@pytest.mark.parametrize(("template", "bos"), [(None, 0), (LLAMA_STYLE, 1)])
def test_the_tokenizer_and_its_template_give_one_bos_at_most(
    tmp_path: Path, template: str | None, bos: int
) -> None:
    options = {} if template is None else {"chat_template": template}
    write_tokenizer(tmp_path, add_bos=True, **options)  # type: ignore[arg-type] # only the template
    tokenizer = load_tokenizer(tmp_path)
    path = write_jsonl(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 4)
    calibration = load_calibration(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        path=path,
        num_samples=1,
        seq_len=10_000,
        max_position=10_000,
        render=tokenizer.render_chat,
    )
    (window,) = calibration.windows
    assert window.count(BOS) == 4 * bos
    assert list(window) == 4 * tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert window.count(IM_START) == window.count(IM_END) == (0 if template else 8)


def test_conversations_need_a_template_that_takes_them(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1: .* has no chat template"):
        load(path)

    def refuse(messages: object, *, add_generation_prompt: bool) -> str:
        raise RequestError("roles must alternate")

    with pytest.raises(ConfigError, match=r"chats\.jsonl:1: roles must alternate"):
        load(path, render=refuse)


@given(
    st.lists(st.integers(0, 30), max_size=40).map(
        lambda lengths: [
            [index * 100 + n for n in range(size)] for index, size in enumerate(lengths)
        ]
    ),
    st.integers(1, 25),
    st.integers(1, 8),
)
def test_packed_windows_begin_with_a_document_and_waste_only_its_end(
    documents: list[list[int]], seq_len: int, num_samples: int
) -> None:
    windows = list(pack(documents, seq_len=seq_len))
    assert all(len(window) == seq_len for window in windows[:-1])
    left = iter(documents)
    for window in windows:
        taken: list[int] = []
        while len(taken) < len(window):
            taken += next(left)
        assert tuple(taken[:seq_len]) == window
    assert not any(left)
    chosen = spread(windows, num_samples)
    assert len(chosen) <= num_samples
    assert [w for w in windows if w in chosen] == list(chosen)
    full = [window for window in windows if len(window) == seq_len]
    if len(full) >= num_samples:
        assert all(len(window) == seq_len for window in chosen)
        assert len(chosen) == num_samples
    else:
        assert list(chosen) == windows


def test_the_window_set_does_not_depend_on_what_is_not_sampled(tmp_path: Path) -> None:
    records = [{"text": "word " * 100}] * 10
    first = load(write_jsonl(tmp_path / "a.jsonl", *records), num_samples=2, seq_len=64)
    again = load(write_jsonl(tmp_path / "b.jsonl", *records), num_samples=2, seq_len=64)
    assert first.sha256 == again.sha256
    assert first.text_sha256 == again.text_sha256


def spread_over(words: Callable[[int], str], count: int) -> str:
    return "".join(words(index) for index in range(count))


def test_of_a_large_text_evenly_spread_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.quant.calibration.MIN_LIMIT_BYTES", 64 * 1024)
    path = tmp_path / "large.txt"
    path.write_text(spread_over(lambda index: f"{index:07d} é\n", 100_000))
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [int(word) for word in text.split() if word != "é"]

    calibration = load_calibration(encode, path=path, num_samples=8, seq_len=64, max_position=1024)
    assert len(seen) == calibration.documents_read == 64
    assert sum(len(text.encode()) for text in seen) <= 64 * 1024
    assert all(text.split()[0].isdigit() and len(text.split()[0]) == 7 for text in seen)
    firsts = [window[0] for window in calibration.windows]
    assert firsts == sorted(firsts)
    assert firsts[0] == 0
    assert firsts[-1] > 80_000  # up to the end, not the first part only
    assert calibration.text_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
