PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= passive
SEED ?= 0

.PHONY: setup browser test test-distributed test-all test-mutants vllm-env test-vllm quickstart bench lint clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	@touch $@

# A Chromium for the tests of the report's page: Debian's, where there is none and apt may install it.
browser:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; \
	done; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell; } >/dev/null 2>&1 || \
	echo "no Chromium, and none could be installed: the report's page is not opened in the tests"

test: setup browser lint
	$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal

test-distributed: setup  # many ranks, Ray, kills: ten minutes on two cores
	GLOO_SOCKET_IFNAME=lo $(BIN)/python -m pytest -q tests/distributed

test-all: test  # and every combination of layout, packing and role
	GLOO_SOCKET_IFNAME=lo FULL_GRID=1 $(BIN)/python -m pytest -q tests/distributed

test-mutants: setup  # does the suite notice a wrong line? Half an hour on two cores
	$(BIN)/python tests/mutants.py

# vLLM for CPUs in an environment of its own (3.4 GB, some minutes the first time)
VLLM_ENV ?= $(CURDIR)/.venv-vllm

vllm-env: setup
	$(BIN)/python -m bench.environments $(VLLM_ENV)

test-vllm: vllm-env  # a real vLLM on CPU: the contract, its traps, faults, and runs that learn
	VLLM_PYTHON=$(VLLM_ENV)/bin/python $(BIN)/python -m pytest -q tests/vllm

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
