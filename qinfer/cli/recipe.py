"""`qinfer run`: a recipe from model to report in one go."""

from pathlib import Path

import click

from qinfer.cli import console
from qinfer.cli.evaluate import OWN_OPTIONS, show_evaluation
from qinfer.cli.options import EngineOptions, engine_options
from qinfer.recipe import load_recipe
from qinfer.report.tables import stage_line
from qinfer.workflows.recipe_run import REPORT_HTML, REPORT_JSON, run_recipe


@click.command(short_help="Run a recipe: quantize, evaluate and measure in one go.")
@click.argument("recipe", metavar="RECIPE")
@click.option("--model", metavar="MODEL", help="Another model than the recipe's own.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for checkpoint and reports; named like the recipe if not given.",
)
@engine_options(without=OWN_OPTIONS | {"gguf_weights"})  # a recipe quantizes the dense model
def command(recipe: str, *, model: str | None, out: Path | None, engine: EngineOptions) -> None:
    """Quantize, evaluate and measure as RECIPE says: a name that ships, or a .yaml file.

    OUT receives checkpoint/, report.json and report.html. A limit of the recipe that is not kept
    ends the run with exit code 8, after the reports are written.

    \b
    Examples:
      qinfer run smollm2-int4
      qinfer run smollm2-int8 --model ./my-model -o results
      qinfer run my-recipe.yaml --device cuda
    """
    loaded = load_recipe(recipe)
    folder = Path(loaded.name) if out is None else out
    options = engine.config | {"revision": engine.revision}
    with console.Stages() as stages:
        record = run_recipe(loaded, out=folder, model=model, on_progress=stages.update, **options)
    show_evaluation(record.evaluation)
    console.show(stage_line(record))
    console.show(f"Written: {folder / REPORT_JSON} and {folder / REPORT_HTML}")
