# Every target sets up its own environment the first time. PYTHON=... chooses the interpreter, VENV=... the folder.
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/installed.stamp

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PYTHONUNBUFFERED = 1

.PHONY: help demo test lint bench bench-peers clean

help:
	@echo "make demo   fine-tune a small GPT-2 privately on Python's docstrings and write its model card"
	@echo "make test   run all tests"
	@echo "make lint   ruff and mypy"
	@echo "make bench  time the private step against the plain one"
	@echo "make bench-peers  time it against jax_privacy and Opacus, each in an environment of its own"

$(STAMP): pyproject.toml
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then python=$$(sh .ci/find-python 3.11 3.12 3.13) || exit 1; fi; \
	sh .ci/install "$(VENV)" "$$python" -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/tfdp demo

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: $(STAMP)
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

clean:
	rm -rf "$(VENV)" .venv-peers .mypy_cache .pytest_cache .ruff_cache build dist
