"""The rebuilt tokenizers; the oracles are transformers' own patterns and a textbook loop."""

import random
from itertools import pairwise
from typing import Any

import pytest
from support.gguf_files import byte_vocabulary
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from qinfer.checkpoint.gguf_config import Metadata
from qinfer.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, merges_by_score, read_tokenizer
from qinfer.errors import CheckpointError, UnsupportedModelError

TEXTS = [
    "I'LL say it's 12345.67  times\n\n  x = 10\t!",
    "naïve Ünïcode 日本語 中文１２ HelloWorld iPhone's /* a/b */\r\n",
    "  leading and trailing  ",
    "e\u0301\u00a0\u2028 🎉🎉 don't DON'T",
]


def metadata(**changes: Any) -> Metadata:
    tokens, types = byte_vocabulary()
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    values |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Metadata({k: v for k, v in values.items() if v is not None}, "test.gguf")


def words(pre: str, text: str) -> list[str]:
    tokenizer = read_tokenizer(metadata(pre=pre), 128).tokenizer
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("qwen2", QWEN2), ("llama-bpe", TikTokenConverter("x").pattern), ("gpt-2", None)],
)
def test_pre_tokenizers_are_those_of_transformers(pre, pattern, text) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    expected = pre_tokenizers.Sequence([*steps, byte_level]).pre_tokenize_str(text)
    assert words(pre, text) == [piece for piece, _ in expected]


def test_smollm_splits_single_digits() -> None:
    assert words("smollm", "x =  10") == ["x", "Ġ=", "ĠĠ", "1", "0"]
    assert words("gpt-2", "x =  10") == ["x", "Ġ=", "Ġ", "Ġ10"]


def test_tekken_splits_at_changes_of_case() -> None:
    assert words("tekken", "HelloWorld 12 a/b/\n") == [
        "Hello", "World", "Ġ", "1", "2", "Ġa", "/b", "/Ċ",
    ]  # fmt: skip


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_text_comes_back(pre: str) -> None:
    tokenizer = read_tokenizer(metadata(pre=pre, add_bos_token=False), 128).tokenizer
    for text in TEXTS:
        expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert tokenizer.decode(tokenizer.encode(text).ids) == expected


def test_qwen2_normalizes_to_nfc() -> None:
    encode = read_tokenizer(metadata(pre="qwen2"), 128).tokenizer.encode
    assert encode("e\u0301").ids == encode("\u00e9").ids
    encode = read_tokenizer(metadata(pre="smollm"), 128).tokenizer.encode
    assert encode("e\u0301").ids != encode("\u00e9").ids


@pytest.mark.parametrize(
    ("changes", "starts_with_bos"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_where_the_file_says(changes, starts_with_bos) -> None:
    tokenizer = read_tokenizer(metadata(**changes), 128).tokenizer
    assert (tokenizer.encode("hi").ids[0] == 256) == starts_with_bos
    assert tokenizer.encode("hi", add_special_tokens=False).ids[0] == ord("h")


def test_merges_specials_and_fillers() -> None:
    rebuilt = read_tokenizer(metadata(), 128)
    tokenizer = rebuilt.tokenizer
    assert tokenizer.encode("ab<|im_end|>b").ids == [261, 260, ord("b")]
    assert tokenizer.decode([261, 260], skip_special_tokens=True) == "ab"
    assert tokenizer.token_to_id("[PAD270]") is None
    assert rebuilt.config["eos_token"] == "<|eos|>"
    assert rebuilt.config["model_max_length"] == 128


def test_user_defined_tokens_are_found_but_not_special() -> None:
    tokens, types = byte_vocabulary()
    tokens[262], types[262] = "<tool>", 4
    tokenizer = read_tokenizer(metadata(tokens=tokens, token_type=types), 128).tokenizer
    assert tokenizer.encode("a<tool>").ids == [ord("a"), 262]
    assert tokenizer.decode([262], skip_special_tokens=True) == "<tool>"


def test_end_tokens_by_key_and_by_name() -> None:
    """A chat model's file often names one of the two that end its text."""
    tokens, types = byte_vocabulary()
    tokens[258] = "<|endoftext|>"
    rebuilt = read_tokenizer(metadata(tokens=tokens, eot_token_id=259), 128)
    assert rebuilt.generation["eos_token_id"] == [257, 259, 258, 260]
    types[260] = 1  # an ordinary token of that spelling ends nothing
    rebuilt = read_tokenizer(metadata(tokens=tokens, token_type=types), 128)
    assert rebuilt.generation["eos_token_id"] == [257, 258]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'chameleon'"):
        read_tokenizer(metadata(pre="chameleon"), 128)
    with pytest.raises(CheckpointError, match="merges is missing"):
        read_tokenizer(metadata(merges=None), 128)


# --- SentencePiece --------------------------------------------------------------------------------

PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "aa", "▁▁", "bb", "cab"]
SCORES = [-1000.0, -1001.0, -1002.0, -1003.0, -2.0, -1.0, -5.0, -3.0, -6.0, -4.0, -7.0, -8.0, -9.0,
          -10.0]  # fmt: skip


def sentencepiece(**changes: Any):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + SCORES
    values = {
        "model": "llama", "pre": None, "merges": None, "tokens": tokens, "token_type": types,
        "scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return read_tokenizer(metadata(**(values | changes)), 128).tokenizer


def textbook(text: str) -> list[str]:
    """SentencePiece BPE: join the neighbours whose union scores best, leftmost first."""
    score = dict(zip(PIECES, SCORES, strict=True))
    symbols = list(text)
    while True:
        joins = [
            (-score[left + right], index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in score
        ]
        if not joins:
            return symbols
        index = min(joins)[1]
        symbols[index : index + 2] = ["".join(symbols[index : index + 2])]


def test_sentencepiece_joins_by_score() -> None:
    tokenizer = sentencepiece()
    source = random.Random(0)
    for _ in range(300):
        text = "".join(source.choice("abc  ") for _ in range(source.randint(1, 12)))
        expected = textbook("▁" + text.replace(" ", "▁"))
        assert tokenizer.encode(text).tokens == ["<s>", *expected]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_bytes_specials_and_prefix() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é a").ids) == "é a"
    assert tokenizer.encode("</s>").ids[-1] == 2
    plain = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert plain.encode("a b").tokens == ["a", "▁", "b"]
    assert plain.decode(plain.encode(" a").ids) == " a"


def test_merges_are_ordered_by_score() -> None:
    merges = merges_by_score({"a": -9.0, "b": -8.0, "ab": -2.0, "aba": -1.0, "ba": -3.0})
    assert merges == [("ab", "a"), ("a", "ba"), ("a", "b"), ("b", "a")]
