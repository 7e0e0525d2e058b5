"""JSON and text files of records: what UTF-8 cannot spell is escaped, all else stays."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.report.jsonio import dump_json, load_json, write_atomic

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of pairs too


@given(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=4))
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> None:
    """What JSON itself makes of it: two halves that meet are read as one character."""
    file = tmp_path_factory.getbasetemp() / "record.json"
    write_atomic(file, dump_json(data))
    assert load_json(file) == json.loads(json.dumps(data))


def test_other_files_hold_escapes_too(tmp_path: Path) -> None:
    """A folder whose name is no UTF-8, as Python hands it over, in a page."""
    folder = b"m\xff\xc3\xbc".decode("utf-8", "surrogateescape")
    write_atomic(tmp_path / "page.html", f"<p>{folder}</p>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "<p>m\\udcffü</p>"


def test_what_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json({"value": float("nan")})
