"""Byte tokenizers for tests: ids 0-255 are the bytes, special tokens above, then aliases.

An alias is a further id of the same byte, so that a scripted output can hold a byte twice with
different successors. It is spelled `<byte><ALIAS_MARK><number>` and decodes to the byte.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, PAD, IM_START, IM_END = range(256, 261)
FIRST_ALIAS = 261
ALIAS_MARK = "⁑"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-in of every byte, in byte order (bytes_to_unicode)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (value for value in range(256) if value not in printable)
    shifted = {value: 256 + index for index, value in enumerate(others)}
    return [chr(shifted.get(value, value)) for value in range(256)]


def byte_level(aliases: Sequence[int] = ()) -> Tokenizer:
    """Return a GPT-2 style tokenizer without merges; `aliases[i]` is the byte of id 261 + i."""
    alphabet = byte_alphabet()
    vocab = {symbol: value for value, symbol in enumerate(alphabet)}
    vocab |= {token: 256 + index for index, token in enumerate(SPECIALS)}
    for index, value in enumerate(aliases):
        vocab[f"{alphabet[value]}{ALIAS_MARK}{index}"] = FIRST_ALIAS + index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    strip_alias = decoders.Replace(Regex(f"{ALIAS_MARK}[0-9]+"), "")
    tokenizer.decoder = decoders.Sequence([strip_alias, decoders.ByteLevel()])
    return _with_specials(tokenizer)


def byte_fallback() -> Tokenizer:
    """Return a Llama-2 style tokenizer whose every piece is `<0xNN>`, with the `▁` for spaces."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)}
    vocab |= {token: 256 + index for index, token in enumerate(SPECIALS)}
    vocab["▁"] = FIRST_ALIAS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_specials(tokenizer)


def write_tokenizer(
    path: Path,
    tokenizer: Tokenizer | None = None,
    *,
    add_bos: bool = False,
    chat_template: str | None = CHATML,
) -> None:
    """Write tokenizer.json and tokenizer_config.json (default: `byte_level()`) into `path`."""
    tokenizer = tokenizer or byte_level()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return tokenizer
