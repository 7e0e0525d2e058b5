"""/tokenize and /detokenize."""

import json

import pytest
from pydantic import ValidationError

from qinfer.server.bodies.tokens import DetokenizeRequest


def post(call, path, status=200, **body):
    response = call("POST", path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_text(call):
    assert post(call, "/tokenize", model="m", prompt="aé") == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [97, 195, 169],
        "token_strs": None,
    }
    strings = post(call, "/tokenize", prompt="aé", return_token_strs=True)["token_strs"]
    assert strings == ["a", "�", "�"]


def test_a_conversation_as_generation_would_get_it(call, engine):
    messages = [{"role": "user", "content": "hi"}]
    found = post(call, "/tokenize", messages=messages)
    post(call, "/v1/chat/completions", messages=messages)
    assert found["tokens"] == engine.seen[0][0]
    bare = post(call, "/tokenize", messages=messages, add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < found["count"]


def test_a_message_to_be_continued(call, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}]
    found = post(call, "/tokenize", messages=messages, continue_final_message=True)
    assert tokenizer.decode(found["tokens"]).endswith("we")


def test_back_to_text(call):
    assert post(call, "/detokenize", tokens=[104, 195, 169, 260]) == {"prompt": "hé<|im_end|>"}
    assert post(call, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ],
)
def test_refusals(call, path, body, field):
    content = json.dumps(body)
    response = call("POST", path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_the_wrong_model(call):
    assert post(call, "/tokenize", 404, model="x", prompt="a")["error"]["code"] == "model_not_found"
    assert post(call, "/detokenize", 404, model="x", tokens=[1])["error"]["param"] == "model"


def test_many_ids():
    assert len(DetokenizeRequest(tokens=[5] * 200_000).tokens) == 200_000
    with pytest.raises(ValidationError, match="at most"):
        DetokenizeRequest(tokens=[5] * 300_000)
