"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and the EOS set.

GGUF stores vocabulary, merges or scores, and the *name* of a pre-tokenizer (`tokenizer.ggml.pre`),
whose rules live in llama.cpp's source (`llama-vocab.cpp`). Each name is one row here; an unknown
one is refused, because a wrong pre-tokenizer gives wrong ids without any sign of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from qinfer.checkpoint.gguf_config import Metadata
from qinfer.errors import CheckpointError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType

# Tokens that end a turn or a text, whatever the file's own `eos_token_id` says (llama.cpp has the
# same list): a chat model's file often names only one of the two that its model writes.
_END_TOKENS = frozenset(
    {
        "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
        "<|end|>", "<end_of_turn>",
    }
)  # fmt: skip

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for.

    Args:
        splits: makes the splitters that run before bytes are mapped to characters.
        gpt2_regex: GPT-2's own splitting rule applies.
        nfc: text is normalized to NFC first.
        whole_words: a word that is in the vocabulary is not built from merges.
        add_bos: BOS is added if the file does not say.
    """

    splits: Callable[[], list[Any]]
    gpt2_regex: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _regex(pattern: str) -> Callable[[], list[Any]]:
    return lambda: [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]


_LLAMA3 = PreTokenizer(_regex(_CASELESS + r"\p{N}{1,3}" + _TAIL), whole_words=True, add_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(list, gpt2_regex=True),
    "default": PreTokenizer(list, gpt2_regex=True),
    "smollm": PreTokenizer(
        lambda: [pre_tokenizers.Digits(individual_digits=True)], gpt2_regex=True
    ),
    "qwen2": PreTokenizer(_regex(_CASELESS + r"\p{N}" + _TAIL), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": PreTokenizer(_regex(_TEKKEN), whole_words=True, add_bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What the output directory needs.

    Args:
        tokenizer: to be saved as tokenizer.json.
        config: tokenizer_config.json.
        generation: generation_config.json: BOS, padding and the EOS set.
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]


def read_tokenizer(meta: Metadata, max_length: int) -> GgufTokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: an unknown kind of tokenizer or pre-tokenizer; the message names it.
        CheckpointError: the vocabulary is missing or inconsistent.
    """
    tokens = _list(meta, "tokenizer.ggml.tokens", str)
    types = _list(meta, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(f"{meta.source}: {len(tokens)} tokens but {len(types)} token types")
    kind = meta.values.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(meta, tokens, types)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(meta, tokens, types), True
    else:
        raise UnsupportedModelError(
            f"{meta.source}: tokenizer.ggml.model {kind!r} is not supported; qinfer converts gpt2 "
            "(byte-level BPE) and llama (SentencePiece BPE)"
        )
    _add_tokens(tokenizer, tokens, types)
    bos = meta.optional("tokenizer.ggml.bos_token_id")
    if bos is not None and meta.values.get("tokenizer.ggml.add_bos_token", add_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return GgufTokenizer(
        tokenizer, _tokenizer_config(meta, tokens, max_length), _generation(meta, tokens, types)
    )


def _list(meta: Metadata, key: str, kind: type) -> list[Any]:
    value = meta.values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise CheckpointError(f"{meta.source}: {key} is missing or damaged")
    return value


def _byte_level(meta: Metadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return a GPT-2 style tokenizer, and whether it adds BOS by default."""
    name = meta.values.get("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{meta.source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; qinfer "
            f"knows {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(pair.split(" ")) for pair in _list(meta, "tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocab(tokens, types), merges=merges, ignore_merges=rule.whole_words)
    )
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*rule.splits(), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentencepiece(meta: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """Return a Llama-2 style tokenizer: merges ordered by score, bytes as fallback."""
    scores = _list(meta, "tokenizer.ggml.scores", float)
    skip = {_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED}
    ordinary = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in skip
    }
    unknown = meta.optional("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab(tokens, types),
            merges=merges_by_score(ordinary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(meta.values.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
    )
    return tokenizer


def merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE vocabulary, best first.

    SentencePiece joins the neighbours whose union has the highest score; so each piece gives one
    merge per way to cut it into two pieces, ordered by the piece's score. Longer left parts come
    first among equals, as in transformers' `generate_merges`.
    """
    order = {piece: index for index, piece in enumerate(scores)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(left, right) for left, right in cuts if left in order and right in order]
        pairs.sort(key=lambda pair: (order[pair[0]], order[pair[1]]))
        merges.extend((score, len(left), len(right), left, right) for left, right in pairs)
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return token -> id without the fillers that pad a vocabulary to the model's rows."""
    pairs = zip(tokens, types, strict=True)
    return {token: index for index, (token, kind) in enumerate(pairs) if kind != _UNUSED}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    kinds = {_UNKNOWN, _CONTROL, _USER_DEFINED}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
    )


def _tokenizer_config(meta: Metadata, tokens: list[str], max_length: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for role, key in roles.items():
        token_id = meta.optional(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{role}_token"] = tokens[token_id]
    template = meta.values.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _generation(meta: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return BOS, padding and the EOS set: what the file names, then what ends a turn by name."""
    named = [meta.optional(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in _END_TOKENS and kind in {_CONTROL, _USER_DEFINED}
    ]
    ends = list(dict.fromkeys([index for index in named if index is not None] + known))
    generation: dict[str, Any] = {"eos_token_id": ends}
    for role, key in (("bos", "bos"), ("pad", "padding")):
        token_id = meta.optional(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            generation[f"{role}_token_id"] = token_id
    return generation
