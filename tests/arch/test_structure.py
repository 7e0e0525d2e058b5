"""The house rules that no linter checks: sizes, packages, imports at a distance, start-up."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from qinfer.cli.main import VERBS, cli
from qinfer.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qinfer"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80
OUTSIDE = {"eval", "benchmarks", "tests", "support", "conftest"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    last = node.end_lineno or node.lineno
    docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    documented = 0
    if docstring is not None:
        documented = (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return last - node.lineno + 1 - documented


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", MODULES, ids=relative(MODULES))
def test_module_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    tree = parse(path)
    long = {
        node.name: length_without_docstring(node)
        for node in functions(tree)
        if length_without_docstring(node) > MAX_FUNCTION_LINES
    }
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"
    assert not OUTSIDE.intersection(name.split(".")[0] for name in imported(tree))
    if path.name == "__init__.py" and path.parent != PACKAGE:
        assert not text, "package __init__ files are empty"


def contract(name: str) -> dict[str, list[str]]:
    """Return a layer contract of the project file by its id."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    found: dict[str, list[str]] = next(item for item in contracts if item["id"] == name)
    return found


def test_every_package_has_its_layer() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    modules = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    layers = set(re.findall(r"\w+", " ".join(contract("layers")["layers"])))
    assert packages | modules <= layers


def test_folders_with_modules_are_packages() -> None:
    folders = {path.parent for path in MODULES}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=["help", "version"])
def test_the_command_line_starts_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from qinfer.cli.main import cli
try:
    cli({arguments!r}, prog_name="qinfer")
except SystemExit as end:
    assert not end.code, end.code
heavy = sorted({{"torch", "transformers", "numpy", "fastapi"}} & set(sys.modules))
assert not heavy, heavy
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "qinfer" in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_command_and_a_help_text(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert command.help
    assert r"\b" not in command.help, "a raw docstring hides click's line-break mark"


def test_facts_sizes_and_bookkeeping_load_without_torch() -> None:
    modules = contract("torch-free")["source_modules"]
    imports = "\n".join(f"import {name}" for name in ["qinfer", *modules])
    result = run_python(f"import sys\n{imports}\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=relative(RECIPES))
def test_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(path.stem) == recipe  # by its name, as a user gives it


def test_recipes_ship() -> None:
    assert len(RECIPES) >= 3
