"""JSON written in slices: the same values as pydantic writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from qinfer.server import json_writing


class Leaf(BaseModel):
    number: float | None = None
    hidden: str | None = Field(default=None, exclude_if=lambda value: value is None)


class Tree(BaseModel):
    name: str
    ids: list[int]
    leaves: list[Leaf | None]
    table: dict[str, Leaf]
    nested: list[dict[str, float] | None]


LEAVES = st.builds(Leaf, number=st.none() | st.floats(allow_nan=False, allow_infinity=False))
TREES = st.builds(
    Tree,
    name=st.text(),
    ids=st.lists(st.integers(), max_size=9),
    leaves=st.lists(st.none() | LEAVES | st.just(Leaf(hidden="x")), max_size=9),
    table=st.dictionaries(st.text(), LEAVES, max_size=5),
    nested=st.lists(st.none() | st.dictionaries(st.text(), st.just(0.5), max_size=3), max_size=9),
)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(json_writing, "SLICE", 2)


@given(TREES)
def test_the_values_are_pydantics(tree):
    assert json.loads(json_writing.dumps(tree)) == json.loads(tree.model_dump_json())


def test_fields_can_be_left_out():
    tree = Tree(name="x", ids=[1, 2, 3], leaves=[], table={}, nested=[])
    text = json_writing.dumps(tree, exclude=frozenset({"leaves", "table", "nested"}))
    assert text == '{"name":"x","ids":[1,2,3]}'
