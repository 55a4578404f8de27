# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One pip command: torch is named first, so that the package's own range takes what is already chosen.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0

# Some environments forbid Python to keep compiled modules: then each of the tests' processes compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test tests test-long wheel-test docs lint clean

# Threads that wait for one another give the core back soon: on a busy machine that is a third faster or more,
# on an idle one it costs nothing.
quickstart: $(VENV)/.ready
	GOMP_SPINCOUNT=3000 $(BIN)/python -m tcore quickstart

# Types are checked beside the tests, which often wait for processes and disks.
test: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

test-long: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The documentation as web pages, in build/docs; a warning is an error. Only the installation needs the package index.
docs: $(VENV)/.ready
	$(INSTALL) --editable ".[docs]"
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# The wheel in an empty environment: built, installed, used (needs the package index).
wheel-test: $(VENV)/.ready
	$(BIN)/python -m pytest tests/test_wheel.py

lint: $(VENV)/.ready
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(filter-out runs/%.sh,$(wildcard runs/*)) .mypy_cache .ruff_cache .pytest_cache
