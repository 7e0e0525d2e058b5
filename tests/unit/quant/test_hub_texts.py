"""Data sets of the hub, through a stand-in for the library `datasets`."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from qinfer.errors import ConfigError
from qinfer.quant import hub_texts
from qinfer.quant.calibration import load_calibration

ROWS: list[dict[str, Any]] = [{"text": f"row {index} " * 10, "id": index} for index in range(50)]


class Library(ModuleType):
    """Answers `load_dataset` with rows, or with an error after some of them."""

    def __init__(self, rows: list[dict[str, Any]], error: Exception | None = None) -> None:
        super().__init__("datasets")
        self.rows, self.error = rows, error
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.taken = 0

    def load_dataset(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        self.calls.append((path, options))
        if self.error is not None and not self.rows:
            raise self.error
        return self._stream()

    def _stream(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            self.taken += 1
            yield row
        if self.error is not None:
            raise self.error


def install(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], error: Exception | None = None
) -> Library:
    library = Library(rows, error)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


@pytest.mark.parametrize(
    ("spec", "path", "options"),
    [
        ("hf:org/name", "org/name", {"name": None, "split": "train"}),
        ("hf:name:en", "name", {"name": "en", "split": "train"}),
        ("hf:org/name::test", "org/name", {"name": None, "split": "test"}),
        ("hf:org/name:en:test:text", "org/name", {"name": "en", "split": "test"}),
    ],
)
def test_every_part_of_the_name_reaches_the_library(
    monkeypatch: pytest.MonkeyPatch, spec: str, path: str, options: dict[str, Any]
) -> None:
    library = install(monkeypatch, ROWS)
    corpus = hub_texts.read_dataset(spec, limit=1 << 20)
    assert library.calls == [(path, options | {"streaming": True})]
    assert (corpus.name, corpus.kind, corpus.found) == (spec, "documents", 50)
    assert [item.content for item in corpus.documents] == [row["text"] for row in ROWS]


def test_reading_stops_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, ROWS)
    corpus = hub_texts.read_dataset("hf:org/name", limit=700)
    assert library.taken == len(corpus.documents) < 15
    assert corpus.found is None
    monkeypatch.setattr(hub_texts, "MAX_ROWS", 3)
    assert len(hub_texts.read_dataset("hf:org/name", limit=700).documents) == 3


def test_the_hash_is_that_of_the_documents_read(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ROWS)
    first, longer = (hub_texts.read_dataset("hf:a/b", limit=limit).sha256 for limit in (700, 900))
    assert first != longer
    install(monkeypatch, [{**row, "id": 0} for row in ROWS])
    assert hub_texts.read_dataset("hf:a/b", limit=700).sha256 == first


def test_a_column_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hello"}]
    install(monkeypatch, [{"dialogue": chat, "text": "other"}] * 40)
    calibration = load_calibration(
        lambda text: [len(word) for word in text.split()],
        path="hf:org/chats:::dialogue",
        num_samples=2,
        seq_len=50,
        max_position=512,
        render=lambda messages, **_: " ".join(m["role"] + " " + m["content"] for m in messages),
    )
    assert calibration.windows == (((4, 5, 5, 9, 5) * 10),) * 2
    assert calibration.source == "hf:org/chats:::dialogue"
    assert (calibration.kind, calibration.documents) == ("conversations", 40)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no route"), r"the hub cannot be reached .*HF_HUB_OFFLINE.*no route"),
        (HfHubHTTPError.__bases__[0]("no route"), r"the hub cannot be reached"),
        (FileNotFoundError("Dataset 'org/x' doesn't exist"), "doesn't exist"),
        (ValueError("BuilderConfig 'fr' not found. Available: ['en']"), r"Available: \['en'\]"),
    ],
)
@pytest.mark.parametrize("rows", [[], ROWS[:3]])
def test_what_the_library_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, rows: list[dict[str, Any]]
) -> None:
    install(monkeypatch, rows, error)
    with pytest.raises(ConfigError, match=rf"hf:org/x: .*{reason}"):
        hub_texts.read_dataset("hf:org/x", limit=1 << 20)


def test_without_the_library_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        hub_texts.read_dataset("hf:org/name", limit=100)


@pytest.mark.parametrize("spec", ["hf:", "hf::en", "hf:a:b:c:d:e"])
def test_a_name_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"write hf:DATASET"):
        hub_texts.read_dataset(spec, limit=100)


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        ("hf:a/b:::body", ROWS, r"hf:a/b, train\[0\]: no column 'body'; there are text, id"),
        ("hf:a/b:::id", ROWS, r"train\[0\]: id is 0; text or a list of messages is needed"),
        ("hf:a/b", [{"x": 1}], r"train\[0\]: .* found the keys x"),
        ("hf:a/b", [*ROWS[:2], {"text": 7}], r"train\[2\]: text is 7"),
    ],
)
def test_rows_that_are_no_documents_are_named(
    monkeypatch: pytest.MonkeyPatch, spec: str, rows: list[dict[str, Any]], message: str
) -> None:
    install(monkeypatch, rows)
    with pytest.raises(ConfigError, match=message):
        hub_texts.read_dataset(spec, limit=1 << 20)
