# The two commands for a fresh machine: `make demo` and `make test`. PYTHON picks another interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# -P: the checkout is not on sys.path, so the installed package is what runs.
PYTEST := $(BIN)/python -P -m pytest
# Files of tests are shared out over a few processes; what measures (`make slow`) runs alone.
SHARED_OUT := -n auto --maxprocesses 4 --dist loadfile
SOURCES := pyproject.toml README.md LICENSE $(shell find tokamax data models -type f -not -name '*.pyc' -not -name '*.lock')
MATRIX ?= 3.12 3.13

.PHONY: demo test slow lint types docs matrix ci clean

demo: $(VENV)/installed
	$(BIN)/tokamax demo

test: $(VENV)/installed-test
	$(PYTEST) $(SHARED_OUT)

slow: $(VENV)/installed-test
	$(PYTEST) -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# A site of docs/ and a reference of the public names, in build/docs; warnings are errors.
docs: $(VENV)/installed-docs
	$(BIN)/python -P -m sphinx -W --keep-going -b html docs build/docs

# The suite on other Pythons, each with the newest JAX that it can install.
matrix:
	@for version in $(MATRIX); do \
	  python=$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	  python=$${python:-$$(command -v python$$version || true)}; \
	  if ! "$${python:-false}" -c 'import ensurepip' 2>/dev/null; then echo "Python $$version: not found, skipped"; continue; fi; \
	  echo "Python $$version: $$python"; \
	  $(MAKE) --no-print-directory VENV=$(VENV)-$$version PYTHON="$$python" test || exit 1; \
	done

ci:
	.ci/run

clean:
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check .
	@touch $@

$(VENV)/installed-%: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[$*]'
	@touch $@ $(VENV)/installed
