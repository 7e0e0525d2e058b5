"""What every route needs: the engine, the tokenizer, served names, and a thread to encode in."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from qinfer.engine.aio import AsyncEngine
from qinfer.engine.beams import BeamParams
from qinfer.engine.params import SamplingParams
from qinfer.errors import ContextLengthError, RequestError
from qinfer.models.tokenizer import Tokenizer
from qinfer.server.bodies.base import TokenIds
from qinfer.server.bodies.chat import Conversation
from qinfer.server.errors import ModelNotFoundError
from qinfer.server.settings import OperationSettings
from qinfer.server.tool_calls import FAMILIES, Family, family_of

DEFAULT_MAX_BODY_BYTES = 4 * 1024**2
AUTO_PARSER = "auto"
_CHARS_PER_TOKEN = 6  # more than most texts have
_PIECE = 16 * 1024  # characters

Params = SamplingParams | BeamParams
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server answers to.

    Args:
        served_model_names: names that requests may use; the first is shown in answers.
        max_model_len: tokens of prompt and answer that one request may use.
        max_body_bytes: larger request bodies are refused with 413.
        tool_call_parser: how the model spells calls of tools, a name in
            `tool_calls.FAMILIES`; "auto" = as its chat template shows.
        operations: who may call, what is written down, and how much is taken on.
    """

    served_model_names: tuple[str, ...]
    max_model_len: int
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    tool_call_parser: str = AUTO_PARSER
    operations: OperationSettings = field(default_factory=OperationSettings)


@dataclass(frozen=True, slots=True)
class Service:
    """One served model.

    Args:
        engine: generates.
        tokenizer: turns text and chats into token ids.
        settings: names and limits.
        started: Unix time, shown as the model's creation time.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    settings: ServerSettings
    started: int = field(default_factory=lambda: int(time.time()))
    # Two threads: a huge prompt does not delay the others' encoding, nor ever the event loop.
    _encoder: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="encode")
    )

    @property
    def name(self) -> str:
        """The name shown in answers."""
        return self.settings.served_model_names[0]

    @property
    def family(self) -> Family:
        """How the model spells calls of tools."""
        if self.settings.tool_call_parser == AUTO_PARSER:
            return family_of(self.tokenizer.template_for_tools)
        return FAMILIES[self.settings.tool_call_parser]

    @property
    def template_shows_tools(self) -> bool:
        """Whether the chat template tells the model which tools there are."""
        return "tools" in self.tokenizer.template_for_tools

    def new_id(self, prefix: str) -> str:
        """Return an id for an answer, such as `cmpl-…`."""
        return f"{prefix}-{uuid.uuid4().hex}"

    def check_model(self, model: str | None) -> None:
        """Refuse a name that is not served; no name means the served model.

        Raises:
            ModelNotFoundError: the message lists the names there are.
        """
        names = self.settings.served_model_names
        if model is not None and model not in names:
            raise ModelNotFoundError(
                f"model {model!r} is not served here; there is {', '.join(names)}", field="model"
            )

    async def prepare(self, params: Params, field: str | None) -> None:
        """Do what takes long before the engine gets a request: compile its grammar.

        Args:
            params: of the request.
            field: which asked for the structure of the output.

        Raises:
            RequestError: the output's structure cannot be followed.
        """
        if isinstance(params, BeamParams) or params.structured is None:
            return
        try:
            await self.in_thread(lambda: self.engine.prepare(params))
        except RequestError as error:
            raise RequestError(str(error), field=field) from error

    async def encode(
        self, prompts: Sequence[str | TokenIds], *, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Return the token ids of prompts; those that are ids stay as they are.

        Raises:
            ContextLengthError: one has many more than any request may use.
        """
        return await self.in_thread(
            lambda: [self._prompt_ids(prompt, add_special_tokens) for prompt in prompts]
        )

    async def decode(
        self, prompts: Sequence[str | TokenIds], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the texts of prompts; those that are text stay as they are.

        Raises:
            RequestError: an id outside of the vocabulary.
        """
        return await self.in_thread(
            lambda: [
                prompt
                if isinstance(prompt, str)
                else self._text(prompt, skip_special_tokens=skip_special_tokens)
                for prompt in prompts
            ]
        )

    async def encode_chat(
        self, body: Conversation, *, tools: list[dict[str, Any]] | None = None
    ) -> TokenIds:
        """Return the token ids of a conversation, ready for the model's answer.

        Args:
            body: messages, and how they are rendered.
            tools: what the template shows of tools; None = there are none.

        Raises:
            RequestError: no chat template, or it refuses the messages (with its own words).
        """
        fields = body.template_fields()
        if tools is not None:
            fields["tools"] = tools
        if body.continue_final_message:
            fields["continue_final_message"] = True
        return await self.encode_messages(
            body.rendered_messages(),
            add_generation_prompt=body.add_generation_prompt,
            **fields,
        )

    async def encode_messages(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **fields: Any
    ) -> TokenIds:
        """Return the token ids of messages in the form that templates know.

        Raises:
            RequestError: see `encode_chat`.
        """

        def encode() -> TokenIds:
            text = self.tokenizer.render_chat(
                messages, add_generation_prompt=add_generation_prompt, **fields
            )
            # The template writes its own BOS.
            return self._encode(text, add_special_tokens=False, field="messages")

        return await self.in_thread(encode)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do something that takes long, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def close(self) -> None:
        """End the encoding threads."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _prompt_ids(self, prompt: str | TokenIds, add_special_tokens: bool) -> TokenIds:  # noqa: FBT001 - forwards a keyword
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=add_special_tokens)
        if len(prompt) > self.settings.max_model_len:  # before each of them is looked at
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but the context holds "
                f"{self.settings.max_model_len}; shorten the prompt",
                field="prompt",
            )
        return prompt

    def _encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> TokenIds:
        """Return the ids of a text, unless it is certain to be too long.

        A text several times the context's size is encoded piece by piece first, so that refusing
        it costs what the context is worth, and not what a body may hold. Where the pieces are cut
        there may be a few tokens more than in the whole, hence the margin.

        Raises:
            ContextLengthError: see above.
        """
        limit = self.settings.max_model_len
        if len(text) > _CHARS_PER_TOKEN * limit:
            count = 0
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                count += len(self.tokenizer.encode(piece, add_special_tokens=False))
                if count > limit + limit // 8 + 64:
                    raise ContextLengthError(
                        f"the first {start + len(piece)} of {len(text)} characters have {count} "
                        f"tokens already, but the context holds {limit}; shorten the prompt",
                        field=field,
                    )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _text(self, ids: TokenIds, *, skip_special_tokens: bool) -> str:
        """Return the text of ids, each of which must be one of the vocabulary."""
        outside = [i for i in (min(ids, default=0), max(ids, default=0)) if not self._is_token(i)]
        if outside:
            raise RequestError(
                f"{outside[0]} is no token id; they lie in 0 to {self.tokenizer.vocab_size - 1}",
                field="tokens",
            )
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.tokenizer.vocab_size
