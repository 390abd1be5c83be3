# Every target sets up .venv by itself; `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests scripts benchmarks models training
CHECKPOINT ?= reader-v4
OUTPUT ?= bench-cpu.json

.PHONY: demo serve test check format bench clean

demo: .venv/run
	$(BIN)/longread demo $(FILE) $(ARGS)

serve: .venv/run
	$(BIN)/longread serve $(CHECKPOINT) $(ARGS)

# Small tensors gain nothing from threads, and threads that wait for each other spin: one thread a process, a few processes.
test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

check: .venv/dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/null/test_rooms_imports.py

format: .venv/dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: .venv/dev
	$(BIN)/longread bench cpu --output $(OUTPUT) $(ARGS)

clean:
	rm -rf .venv

# Two stamps: what a user needs, and that plus what developers need. A changed pyproject.toml installs again.
.venv/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Longread needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

.venv/run: pyproject.toml models/pyproject.toml | .venv/pip
	@echo "Installing Longread and torch into .venv (some minutes the first time) ..."
	$(BIN)/python -m pip install --quiet --editable . --editable ./models
	touch $@

.venv/dev: .venv/run
	@echo "Installing what tests and checks need ..."
	$(BIN)/python -m pip install --quiet --group check --group test
	touch $@
