PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= passive
unexport PYTHONDONTWRITEBYTECODE  # each worker and child would compile everything anew: half of a collection
SEED ?= 0
TASK ?= arithmetic
# On two, processors waited a quarter of the time for one test each.
TEST_WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

.PHONY: setup browser bubblewrap test test-processes style types test-distributed test-ranks test-clusters test-runs test-slow queue-package nixl-package triton-package reference-packages mooncake-package test-all test-pythons test-gpu test-mutants vllm-env test-vllm veomni-env megatron-env worker-env test-veomni test-megatron test-worker quickstart bench lint clean

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

# The code sandbox has two tiers; the tests of this one are skipped without it.
bubblewrap:
	@command -v bwrap >/dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 || \
	echo "no bubblewrap, and it could not be installed: its tier of the code sandbox is not tested"

# mypy is one process (a minute where nothing is cached): beside the tests, so that no processor waits for it.
test: setup browser bubblewrap triton-package reference-packages style
	$(MAKE) --no-print-directory -j 2 types test-processes

test-processes: setup
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not slow"

# Many ranks, Ray, kills, and then what make test leaves out. What starts processes waits for them half of its time, so
# three parts run beside each other. The slow tests do not wait: beside the others they would only make deadlines expire.
test-distributed: queue-package nixl-package browser bubblewrap triton-package
	$(MAKE) --no-print-directory -j 3 --output-sync=target test-ranks test-clusters test-runs
	$(MAKE) --no-print-directory test-slow

# The rows and whole runs that are marked `slow`, of the folders that make test runs.
test-slow: setup
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m slow

test-ranks test-clusters test-runs: export GLOO_SOCKET_IFNAME := lo
test-ranks: setup nixl-package
	$(BIN)/python -m pytest -q -m "not cluster and not runs" tests/distributed

test-clusters: queue-package
	$(BIN)/python -m pytest -q -m cluster tests/distributed

test-runs: queue-package
	$(BIN)/python -m pytest -q -m runs tests/distributed

# And every combination of layout, packing and role, recipes that have to learn, what is marked `full`, other Pythons.
test-all: mooncake-package
	FULL_GRID=1 $(MAKE) test
	FULL_GRID=1 $(MAKE) test-distributed
	FULL_GRID=1 $(MAKE) test-vllm
	FULL_GRID=1 $(MAKE) test-veomni test-megatron test-worker
	$(MAKE) test-pythons

# The tests of one process by other Pythons, where they are installed.
PYTHONS ?= 3.12 3.13
test-pythons: setup
	@for version in $(PYTHONS); do \
		command -v python$$version >/dev/null && python$$version --version >/dev/null 2>&1 || \
		{ echo "no python$$version here: it is not tested"; continue; }; \
		$(MAKE) --no-print-directory VENV=.venv-$$version PYTHON=python$$version setup && \
		.venv-$$version/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal || exit 1; \
	done

# The TransferQueue package; of what it asks for, ray's dashboard and torch again are left out.
queue-package: setup
	@$(BIN)/python -c "import transfer_queue" 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps TransferQueue==0.1.11 tensordict==0.15.3 \
		pyvers==0.2.3 pyzmq==27.3.0 prometheus_client==0.26.0 cloudpickle==3.1.2

# NIXL moves weights between hosts. What it asks for is here (torch) or for devices that are not.
nixl-package: setup
	@$(BIN)/python -c "import nixl" 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1

# Triton interprets our CUDA kernels on a CPU, and compiles them for GPUs that are not here. A CUDA build of torch brings it.
triton-package: setup
	@$(BIN)/python -c "import triton" 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0 || \
	echo "no Triton here: the CUDA kernels are not tested"

# Implementations that ours are compared with. They are in a folder of their own: no run finds them.
reference-packages: setup
	@test -d $(VENV)/references/peft || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/references \
		adam-mini==1.1.1 apollo-torch==1.0.3 torchao==0.18.0 bitsandbytes==0.50.2 peft==0.21.2 accelerate==1.15.0 || \
	echo "the reference packages could not be installed: optimizers are not compared with them"

# Mooncake, a store of the TransferQueue package: its wheel without CUDA, and what Debian has of InfiniBand.
mooncake-package: setup
	@$(BIN)/python -c "import mooncake.store" 2>/dev/null || \
	{ { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 libnl-3-200 libnl-route-3-200; } \
	>/dev/null 2>&1; $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	mooncake-transfer-engine-non-cuda==0.3.13.post1; } || echo "no Mooncake here: it is not tested"

# The tests that compare on a device, on one card, at most eight minutes; in this environment, or that of GPU_PYTHON with
# its CUDA build of torch. GPU_TESTS="--no-install --only decode" goes to the script.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_TESTS ?=
test-gpu:
	$(GPU_PYTHON) tests/gpu.py $(GPU_TESTS)

test-mutants: setup  # does the suite notice a wrong line? Half an hour on two cores
	$(BIN)/python tests/mutants.py

# vLLM for CPUs in an environment of its own (3.4 GB, some minutes the first time)
VLLM_ENV ?= $(CURDIR)/.venv-vllm
VLLM_TESTS ?= tests/vllm
VLLM_PYTEST := $(BIN)/python -m pytest -q -p no:unraisableexception -p no:threadexception

vllm-env: setup
	$(BIN)/python -m bench.environments $(VLLM_ENV)

# A real vLLM on CPU: the contract, its traps, faults, and runs that learn. These tests kill servers and close event loops
# under requests: what is collected when all have ended is no verdict on them.
# Whole runs need both processors for their servers, so they follow one by one (exit code 5: none was chosen).
test-vllm: export VLLM_PYTHON = $(VLLM_ENV)/bin/python
test-vllm: vllm-env
	$(VLLM_PYTEST) -n 2 --dist loadfile -m "not runs" $(VLLM_TESTS)
	$(VLLM_PYTEST) -m runs $(VLLM_TESTS) || [ $$? = 5 ]

# Model engines that need other packages than the driver has, and workers with another torch: an interpreter of their own.
veomni-env megatron-env worker-env: setup
	$(BIN)/python -m bench.environments $(CURDIR)/.venv-$(@:-env=) $(@:-env=)

test-veomni: export GLOO_SOCKET_IFNAME := lo
test-veomni: veomni-env
	$(CURDIR)/.venv-veomni/bin/python -m pytest -q tests/veomni
	$(BIN)/python -m pytest -q tests/distributed/test_child_run.py -k veomni

test-megatron: export GLOO_SOCKET_IFNAME := lo
test-megatron: megatron-env
	$(CURDIR)/.venv-megatron/bin/python -m pytest -q tests/megatron
	$(BIN)/python -m pytest -q tests/distributed/test_child_run.py -k megatron

# Our engine in workers with another torch (with the libraries of CUDA that its wheel wants: some GB, some minutes).
test-worker: export GLOO_SOCKET_IFNAME := lo
test-worker: export VERL_WORKER_PYTHON = $(CURDIR)/.venv-worker/bin/python
test-worker: worker-env
	$(BIN)/python -m pytest -q -rP tests/distributed/test_child_engine.py
	$(BIN)/python -m pytest -q tests/distributed/test_child_run.py -k one_process_learns

lint: style types

style: setup
	$(BIN)/ruff format --check verl tests examples bench
	$(BIN)/ruff check verl tests examples bench

types: setup
	$(BIN)/mypy

quickstart: setup
	$(BIN)/python -m verl.quickstart task=$(TASK) run.seed=$(SEED)

bench: setup
	$(BIN)/python bench/laptop.py
	$(BIN)/python bench/ragged.py
	$(BIN)/python bench/breakdown.py
	$(BIN)/python bench/gpu.py --record

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
