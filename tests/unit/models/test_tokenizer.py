import json
import threading
from pathlib import Path

import pytest
from support.checkpoints import write_tiny
from support.tokenizers import (
    BOS,
    CHATML,
    EOS,
    IM_END,
    IM_START,
    byte_fallback,
    byte_level,
    write_tokenizer,
)
from tokenizers import decoders
from transformers import AutoTokenizer

from qinfer.errors import CheckpointError, ConfigError, RequestError
from qinfer.models.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def test_matches_transformers(tiny_llama: Path) -> None:
    ours, theirs = load_tokenizer(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    text = "Hello  wörld, 깰 <|im_end|>\n\t x"
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == text
    expected = theirs.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(HELLO) == expected


def test_facts(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.special_ids == frozenset(range(256, 261))
    assert tokenizer.vocab_size == 261
    assert tokenizer.has_chat_template


def test_d03_byte_fallback_decodes_to_characters(tmp_path: Path) -> None:
    """D03: pieces like <0xEA> are bytes of a character, not text."""
    write_tokenizer(tmp_path, byte_fallback())
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("깰 a")
    assert tokenizer.decode(ids) == "깰 a"
    assert b"".join(tokenizer.token_bytes(id_) for id_ in ids) == "깰 a".encode()
    assert tokenizer.token_bytes(ids[0]) == b"\xea"


def test_token_bytes_of_byte_level_aliases_and_specials(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(aliases=[0xEA, 0x20]))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.token_bytes(id_) for id_ in range(256)] == [bytes([v]) for v in range(256)]
    assert tokenizer.token_bytes(261) == b"\xea"
    assert tokenizer.token_bytes(262) == b" "
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>"
    assert tokenizer.token_bytes(9999) == b""


def test_token_bytes_of_metaspace_pieces(tmp_path: Path) -> None:
    backend = byte_fallback()
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="never")
    write_tokenizer(tmp_path, backend)
    assert load_tokenizer(tmp_path).token_bytes(261) == b" "


def test_s12_exactly_one_bos(tmp_path: Path) -> None:
    """S12: the template writes BOS for chats, the tokenizer adds it for plain text."""
    write_tokenizer(tmp_path, add_bos=True, chat_template="<|bos|>" + CHATML)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hi") == [BOS, ord("h"), ord("i")]
    assert tokenizer.encode("hi", add_special_tokens=False) == [ord("h"), ord("i")]
    assert tokenizer.apply_chat_template(HELLO)[:3] == [BOS, IM_START, ord("u")]


def test_s11_no_template_tells_how_to_give_one(tmp_path: Path) -> None:
    """S11: no silent guess."""
    write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="--chat-template"):
        load_tokenizer(tmp_path).apply_chat_template(HELLO)


def test_s11_a_template_may_refuse_a_role(tmp_path: Path) -> None:
    """S11: the template's own message reaches the caller."""
    refuse = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    write_tokenizer(tmp_path, chat_template=refuse + CHATML)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(HELLO)
    with pytest.raises(RequestError, match="System role not supported"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    joining = load_tokenizer(tmp_path, chat_template="{{ 'x' + messages[0]['content'] }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        joining.render_chat([{"role": "user", "content": None}], add_generation_prompt=False)


@pytest.mark.parametrize("given", [True, False])
def test_s11_syntax_error_is_found_at_load(tmp_path: Path, *, given: bool) -> None:
    """S11: a template that does not parse fails when the model loads."""
    bad = "{% for m in messages %}{{ m.content }"
    write_tokenizer(tmp_path, chat_template=CHATML if given else bad)
    with pytest.raises(ConfigError, match="does not parse: line 1"):
        load_tokenizer(tmp_path, chat_template=bad if given else None)


def test_given_template_replaces_the_own_one(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama, chat_template="{{ messages[0]['content'] }}{{ extra }}")
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO, extra="!")) == "hi!"


def test_template_file_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("[{{ messages[0]['content'] }}]")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == "[hi]"


def test_d04_spaces_are_not_cleaned_up(tmp_path: Path) -> None:
    """D04: decode keeps what the model wrote, whatever the config says about cleaning."""
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["clean_up_tokenization_spaces"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(" a , b . do n't")) == " a , b . do n't"


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    write_tokenizer(tmp_path, backend)
    assert len(load_tokenizer(tmp_path).encode("123456")) == 6


def test_the_declared_pre_tokenizer_wins_over_the_model_type(tmp_path: Path) -> None:
    """A qwen2 directory with this tokenizer.json must not get Qwen's normalizer and splitter."""
    path = write_tiny(tmp_path / "model", "qwen2")
    decomposed = "e\u0301"
    assert load_tokenizer(path).encode(decomposed) == list(decomposed.encode())


def test_damaged_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "X"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_threads_share_a_tokenizer(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    results: list[list[int]] = []

    def work() -> None:
        results.extend(tokenizer.encode("some text to encode") for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 800
    assert all(ids == results[0] for ids in results)
