"""Bodies of POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import PlainValidator, model_validator

from qinfer.errors import RequestError
from qinfer.server.bodies.base import Name, Text, TokenIds, Unused, Wire
from qinfer.server.bodies.chat import Conversation, Messages
from qinfer.server.bodies.completions import are_ids

MAX_TOKENS = 262_144  # more than most contexts hold


class TokenizeRequest(Conversation):
    """Text, or a conversation, whose token ids are wanted."""

    unsupported: ClassVar[Unused] = {"chat_template": (None,)}

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None  # type: ignore[assignment] # here either is enough
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("one of prompt and messages is needed", field="prompt")
        return self


def parse_tokens(value: Any) -> TokenIds:
    """Return token ids, of which there may be very many.

    Raises:
        ValueError: it is no list of integers from 0 on, or too long.
    """
    if isinstance(value, list) and len(value) > MAX_TOKENS:
        raise ValueError(f"{len(value)} tokens; at most {MAX_TOKENS} are allowed")
    if not isinstance(value, list) or (value and not are_ids(value)):
        raise ValueError("a list of token ids is needed")
    if value and min(value) < 0:
        raise ValueError(f"{min(value)} is no token id")
    return value


class DetokenizeRequest(Wire):
    """Token ids whose text is wanted."""

    model: Name | None = None
    tokens: Annotated[TokenIds, PlainValidator(parse_tokens, json_schema_input_type=TokenIds)]
