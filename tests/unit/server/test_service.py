"""From requests to token ids: chat templates, BOS, and an event loop that stays free."""

import asyncio
import threading

import pytest
from support.tokenizers import BOS, byte_level, write_tokenizer

from qinfer.models.tokenizer import load_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def make_tokenizer(tmp_path):
    def make(**options):
        write_tokenizer(tmp_path, byte_level(), **options)
        return load_tokenizer(tmp_path)

    return make


def test_s12_exactly_one_bos_at_both_endpoints(call, engine, make_tokenizer):
    template = "<|bos|>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"tokenizer": make_tokenizer(add_bos=True, chat_template=template)}
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
        answer = call("POST", path, json=body, settings=settings).json()
        assert answer["usage"]["prompt_tokens"] == 3
        assert engine.seen.pop()[0] == [BOS, *b"hi"]
    plain = {"prompt": "hi", "add_special_tokens": False}
    assert call("POST", COMPLETIONS, json=plain, settings=settings).status_code == 200
    assert engine.seen.pop()[0] == [*b"hi"]


def test_s11_no_template_tells_how_to_give_one(call, engine, make_tokenizer):
    settings = {"tokenizer": make_tokenizer(chat_template=None)}
    response = call("POST", CHAT, json={"messages": [USER]}, settings=settings)
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]
    assert call("POST", COMPLETIONS, json={"prompt": "a"}, settings=settings).status_code == 200


def test_s11_a_refused_role_is_told_in_the_templates_words(call, make_tokenizer):
    template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ messages[0]['content'] }}"
    )
    settings = {"tokenizer": make_tokenizer(chat_template=template)}
    messages = [{"role": "system", "content": "x"}, USER]
    response = call("POST", CHAT, json={"messages": messages}, settings=settings)
    assert response.status_code == 400
    assert "System role not supported" in response.json()["error"]["message"]
    assert call("POST", CHAT, json={"messages": [USER]}, settings=settings).status_code == 200


def test_template_fields_reach_the_template(call, engine, make_tokenizer):
    settings = {"tokenizer": make_tokenizer(chat_template="{{ mood }}")}
    body = {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}}
    assert call("POST", CHAT, json=body, settings=settings).status_code == 200
    assert engine.seen[0][0] == [*b"calm"]


def test_s04_long_texts_are_refused_before_all_is_encoded(client, tokenizer):
    seen = []

    class CountingTokenizer:
        def encode(self, text, **options):
            seen.append(len(text))
            return tokenizer.encode(text, **options)

    async def go():
        async with client(tokenizer=CountingTokenizer()) as http:
            response = await http.post(COMPLETIONS, json={"prompt": "a" * 3_000_000})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(go())
    assert sum(seen) < 100_000


def test_s04_health_answers_while_a_prompt_is_encoded(client, tokenizer):
    """The tokenizer here waits until /health has answered, so a blocked loop would time out."""
    answered = threading.Event()

    class SlowTokenizer:
        def encode(self, text, **options):
            assert answered.wait(20)
            return tokenizer.encode(text, **options)

    async def go():
        async with client(tokenizer=SlowTokenizer()) as http:
            task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a"}))
            await asyncio.sleep(0.05)
            assert (await http.get("/health")).status_code == 200
            answered.set()
            assert (await task).status_code == 200

    asyncio.run(go())
