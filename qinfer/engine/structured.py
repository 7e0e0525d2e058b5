"""Structured output: which tokens may come next, by llguidance (Earley parser over token bytes).

A grammar is compiled once and kept; each request follows it with a matcher of its own. Compiling
may take as long as the grammar is large, within the library's limits on work and states, so a
server compiles in the thread that tokenizes (`GrammarCompiler.compile`) and the engine finds it
done.

The tokenizer is described by the bytes of its tokens, so byte-level BPE and SentencePiece are
alike. Control tokens are never part of the text; the end tokens are allowed where the text may
end, and nothing else once it can only end.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from qinfer.engine.output import TextTokenizer
from qinfer.engine.params import StructuredOutput
from qinfer.errors import RequestError

MAX_COMPILED = 64
# A model that has lost its way likes to indent for ever; a reader of JSON needs no more than this.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_MAX_REASON_CHARS = 300


class Matcher:
    """Follows the output of one request through its grammar.

    Args:
        matcher: at the start of the grammar; owned from now on.
        vocab_size: width of a row of logits.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._consumed: list[int] = []
        self._mask: np.ndarray | None = None

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None while it can."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self, tokens: Sequence[int], num_prompt: int) -> np.ndarray:
        """Return the tokens that may follow, uint32 `[ceil(vocab / 32)]`; 0 after an error.

        Args:
            tokens: of the request; its output may have grown, or lost tokens of a draft.
            num_prompt: how many of them are the prompt.
        """
        self._advance(tokens, num_prompt)
        if self._mask is None:
            words = np.zeros(self._num_words, dtype=np.uint32)
            if not self._matcher.is_error():
                bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
                size = min(len(bits), self._num_words)
                words[:size] = bits[:size]
            self._mask = words
        return self._mask

    def _advance(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Catch up with the output, which may have been rolled back behind some token."""
        consumed = self._consumed
        surplus = max(num_prompt + len(consumed) - len(tokens), 0)
        while surplus < len(consumed) and _differs(consumed, tokens, num_prompt, surplus):
            surplus += 1
        if surplus:
            self._matcher.rollback(surplus)
            del consumed[len(consumed) - surplus :]
            self._mask = None
        new = list(tokens[num_prompt + len(consumed) :])
        if new:
            self._matcher.consume_tokens(new)
            consumed += new
            self._mask = None


class GrammarCompiler:
    """Compiles structured output for one tokenizer; any thread may call.

    Args:
        tokenizer: whose tokens the output is made of.
        vocab_size: width of a row of logits, at least the tokenizer's.
        eos_ids: the tokens that end a text.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, vocab_size: int, eos_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._table: LLTokenizer | None = None
        self._table_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> None:
        """Compile a grammar unless it is at hand.

        Raises:
            RequestError: it cannot be compiled, or the model has no end token; names the field
                and the reason.
        """
        self._get(structured)

    def matcher(self, structured: StructuredOutput) -> Matcher:
        """Return a matcher at the start of a grammar.

        Raises:
            RequestError: see `compile`.
        """
        return Matcher(self._get(structured).deep_copy(), self._vocab_size)

    def _get(self, structured: StructuredOutput) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(structured)
            if found is not None:
                self._compiled.move_to_end(structured)
                return found
        compiled = self._compile(structured)  # without the lock: nobody waits for a large grammar
        with self._lock:
            self._compiled[structured] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        field, grammar = _grammar(structured)
        matcher = LLMatcher(
            self._tokens(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if matcher.is_error():
            raise _refusal(field, matcher.get_error())
        return matcher

    def _tokens(self) -> LLTokenizer:
        """Return the library's view of the tokenizer, made at first use."""
        if not self._eos_ids:
            raise RequestError(
                "structured output needs a model with an end token, and this one has none",
                field="structured",
            )
        with self._table_lock:
            if self._table is None:
                table = _Table(self._tokenizer, self._vocab_size, self._eos_ids[0])
                self._table = LLTokenizer(
                    table,  # type: ignore[arg-type]  # it has all that is read of a wrapper
                    n_vocab=self._vocab_size,
                    eos_token=list(self._eos_ids),
                )
            return self._table


class _Table:
    """A tokenizer in the form that llguidance reads (its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        size = min(vocab_size, tokenizer.vocab_size)
        padding = [b""] * (vocab_size - size)  # rows without a token, which no text contains
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)] + padding
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokenizer.encode(text, add_special_tokens=False)


def _grammar(structured: StructuredOutput) -> tuple[str, str]:
    """Return the name of the given field and its grammar in llguidance's form."""
    if structured.json is not None:
        return "structured.json", _json_grammar(str(structured.json))
    if structured.regex is not None:
        # \d and \w are ASCII, as in JSON Schema: who asks for digits means 0 to 9.
        pattern = regex_to_lark(structured.regex, use_ascii="dw")
        return "structured.regex", LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    if structured.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return "structured.choice", LLMatcher.grammar_from_lark(f"start: {texts}")
    return "structured.grammar", LLMatcher.grammar_from_lark(_as_lark(structured.grammar or ""))


def _json_grammar(schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _refusal("structured.json", f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _refusal("structured.json", "a JSON schema is an object")
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})


def _as_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation; the EBNF of llama.cpp (GBNF) is translated."""
    if is_lark_syntax(grammar) or "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the translator raises whatever its parser stumbles over
        raise _refusal("structured.grammar", f"not readable as GBNF: {error}") from error


def _refusal(field: str, message: str) -> RequestError:
    return RequestError(f"{field} cannot be followed: {_reason(message)}", field=field)


def _reason(message: str) -> str:
    """Return the part of the library's message that is about the grammar."""
    text = " ".join(message.partition("<non-verbose/>")[0].split())
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + " ..."


def _differs(consumed: list[int], tokens: Sequence[int], num_prompt: int, surplus: int) -> bool:
    """Tell whether the last consumed token, but for `surplus`, is not what the output holds."""
    last = len(consumed) - surplus - 1
    return consumed[last] != tokens[num_prompt + last]
