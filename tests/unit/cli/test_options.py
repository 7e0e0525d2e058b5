"""The shared options: defaults from one place, refusals before anything is loaded."""

import click
import pytest
from click.testing import CliRunner

from qinfer.cli.options import DEFAULTS, EngineOptions, engine_options
from qinfer.engine.config import EngineConfig
from qinfer.errors import ConfigError


def run(arguments, **decorator):
    seen = []

    @click.command()
    @engine_options(**decorator)
    def command(engine: EngineOptions) -> None:
        seen.append(engine)

    result = CliRunner().invoke(command, arguments)
    return result, (seen[0] if seen else None)


def test_no_options_mean_the_defaults_of_the_engine():
    result, engine = run([])
    assert result.exit_code == 0, result.output
    assert EngineConfig(**engine.config) == EngineConfig()
    assert engine.revision is None


def test_options_arrive_as_engine_fields():
    _, engine = run(
        [
            *("--kv-cache-dtype", "fp8", "--max-model-len", "64", "--memory", "8GiB"),
            *("--no-enable-prefix-caching", "--revision", "v1", "--seed", "3"),
        ]
    )
    assert engine.revision == "v1"
    assert engine.config["kv_cache_dtype"] == "fp8"
    assert engine.config["max_model_len"] == 64
    assert engine.config["memory"] == "8GiB"
    assert engine.config["enable_prefix_caching"] is False
    assert engine.config["seed"] == 3
    _, engine = run(["--batching", "static", "--num-blocks", "40", "--max-queue", "0"])
    config = EngineConfig(**engine.config)
    assert (config.batching, config.num_blocks, config.max_queue) == ("static", 40, 0)


def test_a_verb_may_leave_options_out():
    result, engine = run([], without={"kv_cache_dtype"})
    assert "kv_cache_dtype" not in engine.config
    result, _ = run(["--kv-cache-dtype", "int8"], without={"kv_cache_dtype"})
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "int3"], "int3"),
        (["--memory", "lots"], "lots"),
        (["--max-num-seqs", "0"], "0"),
        (["--device", "tpu"], "tpu"),
        (["--memory-fraction", "0"], "0"),
        (["--num-blocks", "0"], "0"),
        (["--max-queue", "-1"], "-1"),
        (["--batching", "dynamic"], "dynamic"),
    ],
)
def test_k12_bad_values_end_at_the_command_line(arguments, message):
    result, engine = run(arguments)
    assert result.exit_code == 2
    assert engine is None
    assert message in result.output


def test_help_shows_the_defaults():
    result, _ = run(["--help"])
    assert f"[default: {DEFAULTS['max_num_seqs']};" in result.output


def test_config_errors_are_the_engines_own():
    with pytest.raises(ConfigError):
        EngineConfig(max_num_seqs=0)
