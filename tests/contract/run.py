"""Schemathesis over the server's own OpenAPI document: `make test-contract`.

A tiny model is served on a free loopback port, and its document is taken at its word: requests
that it allows and requests that it forbids, for as long as was asked. No answer may be a server
error, every answer must be one that the document describes, and afterwards the engine must be
idle, with all of its cache free again.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import torch
from support.checkpoints import edit_json, write_tiny
from support.live import live_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)
REQUEST_SECONDS = 30
TEMPLATE = (  # knows tools, and calls as plain JSON
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
SETTINGS = """
[checks.negative_data_rejection]
# What is forbidden may also be too large to be looked at.
expected-statuses = ["400", "404", "405", "413"]
"""


def command(url: str, seconds: int, settings: Path) -> list[str]:
    """Return the command that tests the server at `url`.

    Not checked: that all data of the right form are accepted. A prompt that is too long, or a
    model that is not served, has the right form too.
    """
    return [
        str(Path(sys.executable).with_name("schemathesis")),
        *["--config-file", str(settings), "--no-color", "run", f"{url}/openapi.json"],
        *["--checks", ",".join(CHECKS)],
        *["--phases", "examples,coverage,fuzzing"],
        *["--mode", "all", "--max-time", str(seconds), "--continue-on-failure"],
        *["--request-timeout", str(REQUEST_SECONDS)],
        *["--generation-database", "none", "--suppress-health-check", "all", "--warnings", "off"],
    ]


def main() -> int:
    """Serve, test, and see that nothing is left over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(Path(folder) / "model")
        edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
        with live_server(model) as live:
            settings = Path(folder) / "schemathesis.toml"
            settings.write_text(SETTINGS, encoding="utf-8")
            arguments = command(live.url, seconds, settings)
            status = subprocess.run(arguments, cwd=folder, check=False).returncode
            health = httpx.get(f"{live.url}/health")
            if health.status_code != 200:
                sys.stdout.write(f"the server is not well: {health.text}\n")
                return 1
            live.wait_until_idle()
    return status


if __name__ == "__main__":
    sys.exit(main())
