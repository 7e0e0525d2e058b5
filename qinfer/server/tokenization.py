"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes."""

from fastapi.responses import Response

from qinfer.errors import RequestError
from qinfer.server.bodies.base import TokenIds
from qinfer.server.bodies.tokens import DetokenizeRequest, TokenizeRequest
from qinfer.server.json_writing import dumps
from qinfer.server.observer import RequestRecord
from qinfer.server.responses import DetokenizeResponse, TokenizeResponse
from qinfer.server.service import Service


async def tokenize(body: TokenizeRequest, service: Service, _record: RequestRecord) -> Response:
    """Return the ids of a text or a conversation, exactly as generation would get them.

    Raises:
        RequestError: the template refuses the messages.
    """
    service.check_model(body.model)
    tokens = await _encode(body, service)

    def write() -> str:
        answer = TokenizeResponse.model_construct(  # a million integers need no second look
            count=len(tokens),
            max_model_len=service.settings.max_model_len,
            tokens=tokens,
            token_strs=_texts(service, tokens) if body.return_token_strs else None,
        )
        return dumps(answer)

    return Response(await service.in_thread(write), media_type="application/json")


async def detokenize(body: DetokenizeRequest, service: Service, _record: RequestRecord) -> Response:
    """Return the text of token ids, special tokens shown.

    Raises:
        RequestError: an id outside of the vocabulary.
    """
    service.check_model(body.model)
    (text,) = await service.decode([body.tokens], skip_special_tokens=False)
    return Response(
        DetokenizeResponse(prompt=text).model_dump_json(), media_type="application/json"
    )


async def _encode(body: TokenizeRequest, service: Service) -> TokenIds:
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        text = body.prompt
        # Whatever its length: the count may be what is asked for.
        return await service.in_thread(
            lambda: service.tokenizer.encode(text, add_special_tokens=special)
        )
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is for prompt: a chat template writes its special tokens itself",
            field="add_special_tokens",
        )
    tools = [tool.rendered() for tool in body.tools] if body.tools else None
    return await service.encode_chat(body, tools=tools)


def _texts(service: Service, tokens: TokenIds) -> list[str]:
    """Return the text of every token; bytes that are no characters of their own are replaced."""
    return [service.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
