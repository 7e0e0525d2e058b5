"""POST /v1/responses: OpenAI's newer way to ask for text, whole or as typed events."""

import json
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel

from qinfer.engine.request import FinishReason, TokenEvent
from qinfer.server.answer import Answer, answer_streamed, answer_whole
from qinfer.server.bodies.responses_api import ResponsesRequest
from qinfer.server.errors import body_of
from qinfer.server.generation import Choice, Job
from qinfer.server.observer import RequestRecord
from qinfer.server.response_object import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
    response_usage,
)
from qinfer.server.responses import Usage, total_usage
from qinfer.server.service import Service
from qinfer.server.streaming import sse


async def respond(body: ResponsesRequest, service: Service, record: RequestRecord) -> Response:
    """Answer one request for a response.

    Raises:
        QinferError: the request is invalid, or the engine could not finish it.
    """
    service.check_model(body.model)
    params = body.params()
    await service.prepare(params, "text")
    prompt = await service.encode_messages(body.messages())
    job = Job(service.new_id("resp"), [prompt], params, record)
    writer = ResponseWriter(Answer(job.id, service), body, service.new_id("msg"))
    if not body.stream:
        return await answer_whole(service, job, writer)
    return await answer_streamed(service, job, writer)


@dataclass(slots=True)
class ResponseWriter:
    """Writes responses, and the events of a streamed one.

    Args:
        answer: what all events share.
        body: what was asked for.
        message_id: of the only message.
    """

    answer: Answer
    body: ResponsesRequest
    message_id: str
    _text: list[str] = field(default_factory=list)
    _number: int = 0
    _last: TokenEvent | None = None

    def full(self, choices: list[Choice], usage: Usage) -> ResponseObject:
        """Return the whole response."""
        (choice,) = choices
        return self._response(
            _status(choice.finish_reason), "".join(choice.text), response_usage(usage)
        )

    def begin(self) -> bytes:
        """Return the events that announce the response, its message and its text."""
        begun = self._response("in_progress", None, None)
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event(
                "response.output_item.added",
                output_index=0,
                item=self._message("in_progress", None),
            )
            + self._part_event("response.content_part.added", part=OutputText(text=""))
        )

    def event(self, index: int, event: TokenEvent) -> bytes:  # noqa: ARG002 - the protocol's signature
        """Return the event with more text; nothing if there is none."""
        self._last = event
        if not event.text:
            return b""
        self._text.append(event.text)
        return self._part_event("response.output_text.delta", delta=event.text, logprobs=[])

    def end(self) -> bytes:
        """Return the events that close the text, its message and the response."""
        text, last = "".join(self._text), self._last
        status = _status(None if last is None else last.finish_reason)
        usage = None
        if last is not None and last.usage is not None:
            usage = response_usage(total_usage([last.usage]))
        item = self._message(status, text)
        return (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=OutputText(text=text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=self._response(status, text, usage))
        )

    def error(self, error: Exception) -> bytes:
        """Return the event of a response that failed, and the error as clients raise it."""
        detail = body_of(error)["error"]
        code = detail["code"] or detail["type"]
        failed = self._response("failed", "".join(self._text), None)
        failed.error = ResponseError(code=code, message=detail["message"])
        return self._event("response.failed", response=failed) + self._event(
            "error", code=code, message=detail["message"], param=detail["param"]
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self.message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number}
        for name, value in fields.items():
            data[name] = value.model_dump() if isinstance(value, BaseModel) else value
        self._number += 1
        return sse(json.dumps(data), kind)

    def _message(self, status: Status, text: str | None) -> OutputMessage:
        content = [] if text is None else [OutputText(text=text)]
        return OutputMessage(id=self.message_id, status=status, content=content)

    def _response(
        self, status: Status, text: str | None, usage: ResponseUsage | None
    ) -> ResponseObject:
        body = self.body
        wanted = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            wanted = body.text.format.model_dump(by_alias=True, exclude_none=True)
        return ResponseObject(
            id=self.answer.id,
            created_at=self.answer.created,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.answer.service.name,
            output=[] if text is None else [self._message(status, text)],
            temperature=body.temperature,
            text={"format": wanted},
            top_p=body.top_p,
            usage=usage,
        )


def _status(reason: FinishReason | None) -> Status:
    return "incomplete" if reason == "length" else "completed"
