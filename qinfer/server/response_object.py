"""The answer of /v1/responses: OpenAI's response object, as far as text needs it."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from qinfer.server.responses import CachedTokens, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ReasoningTokens(BaseModel):
    """Tokens of reasoning are not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts, under the names of this API."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: list[Any] = Field(default=[], max_length=0)


class OutputMessage(BaseModel):
    """The message that the model wrote."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why a response ended before its text did."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """A response; what was not asked for has the value that means so."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = Field(default=[], max_length=0)
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


def response_usage(usage: Usage) -> ResponseUsage:
    """Return token counts under the names of this API."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details or CachedTokens(cached_tokens=0),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
