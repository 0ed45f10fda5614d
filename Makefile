# Each target works alone on a fresh clone: it makes .venv, installs what it needs once, and runs.
#   make demo      eight ranks combine the output of an MoE layer in every mode
#   make test      the tests that a change must pass;  make test ARGS="tests/test_world.py -x"
#   make test-all  those and the long ones
#   make test-gpu  the tests that need a GPU (eight ranks share one);  make memcheck  some of them under compute-sanitizer
#   make lint      ruff and mypy;  make format lets ruff repair what it can

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV := .venv
PY := $(VENV)/bin/python
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
# The first of these that is 3.11 or newer. Another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=

# Eight processes may share one GPU, and multicast stays off: see tests/gpu/.
GPU := TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

.PHONY: demo test test-all test-gpu memcheck lint format clean

demo: $(RUNS)
	launch/torchrun.sh -m bicomm.demo $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

test-all: $(READY)
	$(PY) -m pytest --long $(ARGS)

test-gpu: $(READY)
	$(GPU) $(PY) -m pytest tests/gpu $(ARGS)

memcheck: $(READY)
	$(GPU) compute-sanitizer --tool memcheck --error-exitcode 9 $(PY) -m pytest tests/gpu/test_barriers.py \
		tests/gpu/test_kernels.py -k "in_turn or uneven_tokens or owner_with_weights or multimem_but" --timeout 600 $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# With a GPU, a torch that is already installed fits its driver and is kept. Without one, torch comes first and in one
# fixed version, so that every such machine tests the same CPU kernels.
$(RUNS): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "bicomm needs Python 3.11 or newer; none found. make PYTHON=/path/to/python3.11"; exit 1; }
	if nvidia-smi -L >/dev/null 2>&1; then gpu=1; else gpu=; fi; \
	if [ ! -x $(PY) ]; then \
		if [ -n "$$gpu" ] && $(PYTHON) -c 'import torch' 2>/dev/null; then site=--system-site-packages; else site=; fi; \
		$(PYTHON) -m venv $$site $(VENV) || { rm -rf $(VENV); exit 1; }; \
	fi; \
	if [ -z "$$gpu" ] && ! $(PY) -c 'import torch' 2>/dev/null; then \
		$(PY) -m pip install --disable-pip-version-check torch==2.13.0; \
	fi; \
	$(PY) -m pip install --disable-pip-version-check -e '.[mpi]'
	@touch $@

$(READY): $(RUNS)
	$(PY) -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
