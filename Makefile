# The two commands of README.md, `make demo` and `make test`, and their helpers. Each prepares .venv by itself.
# Needs only make, a Python >= 3.10 and pip's own index configuration: no compiler, no linker, no tar.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# 3.11 comes first because CI runs it. realpath keeps the venv valid when the name on PATH is only a link or a shim.
FIND_BASE := import os, sys, ensurepip, venv; assert sys.version_info >= (3, 10); print(os.path.realpath(sys.executable))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.10 python3 python; do \
	"$$name" -c '$(FIND_BASE)' 2>/dev/null && break; done)

.PHONY: setup demo test lint format bench endurance clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "mlc_nb needs Python 3.10 or newer with the venv module on PATH; none was found" \
		"(name one: make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing mlc_nb and its development tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m tools.run_notebook notebooks/quickstart.ipynb

lint: $(STAMP)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

test: lint
	@$(BIN)/python -m pytest

format: $(STAMP)
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.bench
	@$(BIN)/python -m benchmarks.versus

endurance: $(STAMP)
	@$(BIN)/python -m benchmarks.endurance soak
	@$(BIN)/python -m benchmarks.endurance equal
	@$(BIN)/python -m benchmarks.endurance_cycles loads
	@$(BIN)/python -m benchmarks.endurance_cycles switches
	@$(BIN)/python -m benchmarks.endurance_cycles interrupts

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
