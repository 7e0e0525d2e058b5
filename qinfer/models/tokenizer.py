"""Text to token ids and back, and chat templates: all from the files beside the weights.

The tokenizer is what tokenizer.json says, never what a model type suggests: `AutoTokenizer` picks
a class by model type and may replace the declared pre-tokenizer. Encoding and decoding go to the
Rust tokenizer directly, which holds no state between calls, so any thread may call.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from qinfer.errors import CheckpointError, ConfigError, RequestError
from qinfer.models.token_bytes import TokenBytes

_NO_TEMPLATE = (
    "this model has no chat template, so chat messages cannot be turned into a prompt; "
    "give one with --chat-template FILE, or send plain text to generate or /v1/completions"
)
# What a template may raise while it renders: Jinja's own errors and those of its expressions.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)

_LONG = 1000  # tokens that take about a millisecond to decode


class Tokenizer:
    """Encodes and decodes text and renders chats for one model.

    Attributes:
        vocab_size: ids run from 0 to `vocab_size - 1` (the model may have more rows).
        eos_token_id: the tokenizer's own end token; a model's EOS set may hold more.
        bos_token_id: the token that `encode` may put first, if the tokenizer says so.
        special_ids: ids that `decode` leaves out when asked to skip special tokens.
    """

    __slots__ = (
        "_backend",
        "_bytes",
        "_hf",
        "_known",
        "bos_token_id",
        "eos_token_id",
        "special_ids",
        "vocab_size",
    )

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self._hf = hf
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = TokenBytes(self._backend)
        added = self._backend.get_added_tokens_decoder()
        # The bytes of the tokens that were asked for; added tokens stand for themselves.
        self._known: dict[int, bytes] = {
            id_: token.content.encode() for id_, token in added.items()
        }
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_token_id: int | None = hf.eos_token_id
        self.bos_token_id: int | None = hf.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._hf.chat_template)

    @property
    def template_for_tools(self) -> str:
        """Jinja source of the template that renders chats with tools; "" if there is none."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with BOS and the like where the tokenizer adds them."""
        # As a batch of one, since only these let other threads run meanwhile.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD.

        No spaces are "cleaned up", so text that streams out in parts equals text decoded at once.
        """
        ids = list(ids)
        if len(ids) > _LONG:  # as with `encode`
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the output; empty for an id without a token."""
        known = self._known.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id)
            known = b"" if piece is None else self._bytes.convert(piece)
            self._known[token_id] = known
        return known

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a chat; `kwargs` reach the template (such as `tools`).

        Raises:
            RequestError: no template, or the template refuses these messages (its own words).
        """
        if not self.has_chat_template:
            raise RequestError(_NO_TEMPLATE, field="messages")
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", field="messages"
            ) from error
        return str(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt ids of a chat.

        No special tokens are added to the rendered text: the template writes its own BOS.

        Raises:
            RequestError: see `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(path: Path, *, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model directory.

    Args:
        path: directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja).
        chat_template: Jinja source that replaces the directory's own template.

    Raises:
        CheckpointError: tokenizer.json is missing or damaged.
        ConfigError: a chat template has a syntax error.
    """
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json; qinfer reads no other tokenizer format "
            "(transformers writes it: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        hf = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the Rust loader raises nothing narrower
        raise CheckpointError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    if chat_template is not None:
        hf.chat_template = chat_template
    _check_templates(hf, path)
    return Tokenizer(hf)


def _check_templates(hf: PreTrainedTokenizerFast, path: Path) -> None:
    """Refuse a template that does not parse when the model loads, not at the first request."""
    template = hf.chat_template
    named = {"default": template} if isinstance(template, str) else template or {}
    probe = [{"role": "user", "content": "x"}]
    for name, source in named.items():
        try:
            hf.apply_chat_template(probe, chat_template=source, tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template {name!r} of {path} does not parse: line {error.lineno}: "
                f"{error.message}; give another with --chat-template FILE"
            ) from error
        except _TEMPLATE_ERRORS:
            continue  # it parses; that it refuses the probe is a matter between it and a request
