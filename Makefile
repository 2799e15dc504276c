# Everything from a fresh machine with Python 3.11 and pip: `make demo` and `make test` set up .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two levels of quiet leave pip's errors and drop its notes on the machine's own index settings.
PIP := $(BIN)/python -m pip install -q -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo    train and compare on the embedded model; the report is in demo/"
	@echo "make test    lint, types, and all tests with coverage"
	@echo "make lint    lint and types only"
	@echo "make clean   remove .venv, caches and demo/"
	@echo "PYTHON=...   which Python (3.11 or newer) to set up with; now: $(PYTHON)"

demo: $(STAMP)
	$(BIN)/drople demo --out demo

# One thread a worker: two workers with a thread pool each would fight over the cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs --cov=drople --cov-report=term

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

# torch comes first and alone, so that no other package's wish can bring a different build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "drople needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "setting up $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
