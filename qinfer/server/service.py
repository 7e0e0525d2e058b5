"""What every route needs: the engine, the tokenizer, served names, and a thread to encode in."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from qinfer.engine.aio import AsyncEngine
from qinfer.models.tokenizer import Tokenizer
from qinfer.server.errors import ModelNotFoundError
from qinfer.server.settings import OperationSettings
from qinfer.server.wire import ChatRequest, TokenIds

DEFAULT_MAX_BODY_BYTES = 4 * 1024**2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server answers to.

    Args:
        served_model_names: names that requests may use; the first is shown in answers.
        max_model_len: tokens of prompt and answer that one request may use.
        max_body_bytes: larger request bodies are refused with 413.
        operations: who may call, what is written down, and how much is taken on.
    """

    served_model_names: tuple[str, ...]
    max_model_len: int
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
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
    # One thread: a huge prompt delays other prompts' encoding, but never the event loop.
    _encoder: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="encode")
    )

    @property
    def name(self) -> str:
        """The name shown in answers."""
        return self.settings.served_model_names[0]

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

    async def encode(
        self, prompts: Sequence[str | TokenIds], *, add_special_tokens: bool
    ) -> list[TokenIds]:
        """Return the token ids of prompts; those that are ids stay as they are."""
        return await self._in_thread(
            lambda: [self._prompt_ids(prompt, add_special_tokens) for prompt in prompts]
        )

    async def encode_chat(self, body: ChatRequest) -> TokenIds:
        """Return the token ids of a conversation, ready for the model's answer.

        Raises:
            RequestError: no chat template, or it refuses the messages (with its own words).
        """
        messages = [message.rendered() for message in body.messages]
        fields = body.template_fields()
        return await self._in_thread(lambda: self.tokenizer.apply_chat_template(messages, **fields))

    def close(self) -> None:
        """End the encoding thread."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def _prompt_ids(self, prompt: str | TokenIds, add_special_tokens: bool) -> TokenIds:  # noqa: FBT001 - forwards a keyword
        if not isinstance(prompt, str):
            return prompt
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
