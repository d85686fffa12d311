PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= passive
SEED ?= 0

.PHONY: setup test test-mutants quickstart bench lint clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: setup lint
	$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal

test-mutants: setup  # does the suite notice a wrong line? Half an hour on two cores
	$(BIN)/python tests/mutants.py

lint: setup
	$(BIN)/ruff format --check verl tests examples bench
	$(BIN)/ruff check verl tests examples bench
	$(BIN)/mypy

quickstart: setup
	$(BIN)/python -m verl.quickstart run.seed=$(SEED)

bench: setup
	$(BIN)/python bench/laptop.py
	$(BIN)/python bench/ragged.py
	$(BIN)/python bench/breakdown.py
	$(BIN)/python bench/gpu.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
