"""What is known of every HTTP request: who asked, what it took, how it ended; for logs and metrics.

The outermost layer but for the request's id. It gives each request a record, counts it, and writes
one line when it is over. Text of prompts gets into a line only if the operator asked for it.
"""

import json
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.engine.latency import SequenceTimes
from qinfer.engine.request import TokenEvent
from qinfer.server.errors import error_response
from qinfer.server.jsonlog import JsonLog
from qinfer.server.request_ids import request_id

_log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status; only logs and metrics see it
UNMATCHED: Final = "(none)"  # the route of paths that there are not: metrics must stay few
_METHODS: Final = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
_RECORD: Final = "qinfer.record"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request.

    Args:
        request_id: the client's `X-Request-Id`, or the server's (`request_ids`).
        method: of HTTP.
        path: as sent, without the query.
        client: address and port.
        started: monotonic seconds.
        key: name of the API key; None = none was needed, or it was not known.
        status: of the response; 0 = none was begun.
        complete: the response was handed over whole.
        response_id: the answer's own id.
        prompt_tokens: of all its prompts.
        cached_tokens: of them, those found in the prefix cache.
        completion_tokens: generated, whether the client got them or not.
        finish_reasons: of its sequences, in the order in which they ended.
        queue: seconds until the engine began with the last of them.
        ttft: seconds in the engine until the first token of any.
        body: what the client sent, if it is to be logged.
    """

    request_id: str
    method: str
    path: str
    client: str | None
    started: float = field(default_factory=time.monotonic)
    key: str | None = None
    status: int = 0
    complete: bool = False
    response_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue: float | None = None
    ttft: float | None = None
    body: bytearray | None = None

    def admitted(self, response_id: str, prompt_tokens: int) -> None:
        """Note what the request has become."""
        self.response_id = response_id
        self.prompt_tokens += prompt_tokens

    def sequence_ended(self, event: TokenEvent, times: SequenceTimes) -> None:
        """Note the end of one of its sequences."""
        self.completion_tokens += times.tokens
        self.finish_reasons.append(event.finish_reason or "")
        if event.usage is not None and event.index == 0:
            self.cached_tokens += event.usage.cached_tokens
        if times.queue is not None:
            self.queue = times.queue if self.queue is None else min(times.queue, self.queue)
        if times.ttft is not None:
            self.ttft = times.ttft if self.ttft is None else min(times.ttft, self.ttft)

    def line(self, route: str, seconds: float) -> dict[str, Any]:
        """Return the line of the request log."""
        entry: dict[str, Any] = {
            "event": "request",
            "request_id": self.request_id,
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "route": route,
            "path": self.path,
            "status": self.status,
            "complete": self.complete,
            "seconds": round(seconds, 6),
        }
        if self.response_id is not None:
            entry |= {
                "response_id": self.response_id,
                "queue_seconds": _rounded(self.queue),
                "ttft_seconds": _rounded(self.ttft),
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "finish_reasons": self.finish_reasons,
            }
        if self.body:
            entry["body"] = _readable(bytes(self.body))
        return entry


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request that is being answered."""
    record: RequestRecord = scope[_RECORD]
    return record


@dataclass(slots=True)
class HttpCounts:
    """Counts over a server's life.

    Args:
        responses: by (route, method, status).
        in_progress: requests that are being answered now.
    """

    responses: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    in_progress: int = 0


@dataclass(frozen=True, slots=True)
class Observer:
    """ASGI middleware that records, counts and logs every request.

    Args:
        app: what is observed.
        counts: where requests are counted.
        log: where they are logged; None = nowhere.
        audit: gets the requests that were refused for their key; None = nobody asks.
        log_bodies: log what clients send, prompts and all.
    """

    app: ASGIApp
    counts: HttpCounts
    log: JsonLog | None = None
    audit: JsonLog | None = None
    log_bodies: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and note how."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = _new_record(scope)
        scope[_RECORD] = record
        if self.log is not None and self.log_bodies:
            record.body = bytearray()
            receive = _kept(receive, record.body)
        self.counts.in_progress += 1
        noted = _noted(send, record)
        try:
            await self.app(scope, receive, noted)
        except Exception as error:  # the edge of the process: the client needs an answer
            _log.exception("request %s failed", record.request_id)
            if record.status:
                raise  # too late for a status; the connection will be closed
            await error_response(error)(scope, receive, noted)
        finally:
            self.counts.in_progress -= 1
            self._note_end(scope, record)

    def _note_end(self, scope: Scope, record: RequestRecord) -> None:
        if record.status == 0:
            record.status = CLIENT_CLOSED_REQUEST
        route = _route(scope)
        method = record.method if record.method in _METHODS else "other"
        self.counts.responses[route, method, record.status] += 1
        if self.log is not None:
            self.log.write(record.line(route, time.monotonic() - record.started))
        if self.audit is not None and record.status == 401:
            self.audit.write(
                {
                    "event": "refused",
                    "reason": "no known API key",
                    "request_id": record.request_id,
                    "client": record.client,
                    "method": record.method,
                    "path": record.path,
                }
            )


def _new_record(scope: Scope) -> RequestRecord:
    client = scope.get("client")
    return RequestRecord(
        request_id=request_id(scope) or uuid.uuid4().hex,
        method=scope["method"],
        path=scope["path"],
        client=f"{client[0]}:{client[1]}" if client else None,
    )


def _noted(send: Send, record: RequestRecord) -> Send:
    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            record.complete = True

    return noted


def _kept(receive: Receive, body: bytearray) -> Receive:
    async def kept() -> Message:
        message = await receive()
        body.extend(message.get("body", b""))
        return message

    return kept


def _route(scope: Scope) -> str:
    """Return the path of the matched route with its parameters' names."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    # Plain routes of the framework, such as /openapi.json, leave their endpoint only.
    return str(scope["path"]) if "endpoint" in scope else UNMATCHED


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _readable(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "backslashreplace")
