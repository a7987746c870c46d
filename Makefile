# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test

train: .venv/installed
	$(BIN)/pith train

# One OpenMP thread a process: ranks and test workers share the cores. A file of tests goes to one
# worker whole: what its fixtures run, they run once.
test: export OMP_NUM_THREADS = 1
test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch .venv/installed $@
