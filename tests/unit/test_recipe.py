"""Recipes: what ships loads, and what is wrong is refused with the key that is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from qinfer.errors import ConfigError
from qinfer.recipe import find_recipe, load_recipe, shipped_recipes

MINIMAL = "name: mine\ndescription: A test.\nmodel: some/model\n"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_recipes_load_and_are_called_like_their_files() -> None:
    shipped = shipped_recipes()
    assert len(shipped) >= 3
    for name in shipped:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description


def test_sections_have_the_defaults_of_the_verbs(tmp_path: Path) -> None:
    recipe = load_recipe(_write(tmp_path, MINIMAL))
    assert recipe.quantize.weights == "int4"
    assert recipe.eval.window == 512
    assert recipe.bench.concurrency == (1, 4)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("quantise: {}\n", "quantise"),
        ("quantize: {wieghts: int4}\n", "quantize.wieghts"),
        ("quantize: {weights: int5}\n", "quantize.weights"),
        ("quantize: {asym: 1}\n", "quantize.asym"),
        ("eval: {kv_cache_dtypes: [int3]}\n", "eval.kv_cache_dtypes"),
        ("eval: {window: '512'}\n", "eval.window"),
        ("bench: {output_len: 1}\n", "bench.output_len"),
        ("bench: {concurrency: [0]}\n", "bench.concurrency.0"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(tmp_path: Path, extra: str, key: str) -> None:
    path = _write(tmp_path, MINIMAL + extra)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert key in str(caught.value)
    assert str(path) in str(caught.value)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.*description|description.*model"):
        load_recipe(_write(tmp_path, "name: mine\n"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [\n", ""])
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_recipe(_write(tmp_path, text))


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-int4"):
        find_recipe("no-such-recipe")
    with pytest.raises(ConfigError, match=r"no recipe file .*missing\.yaml"):
        find_recipe(tmp_path / "missing.yaml")


def test_reading_recipes_needs_no_torch() -> None:
    code = "import sys, qinfer.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
