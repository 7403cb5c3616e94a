# Each target sets up what it needs in .venv, once; `make` alone lists them.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
PINS := requirements/test.txt
SYSTEM_PYTHON ?= python3
ARGS ?=
BACKENDS ?= triton

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run bench test lint format types check gpu-test gpu-sanitize gpu-check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

run: $(READY) ## a language model answers three prompts, its KV cache in kvattn's pages
	$(VENV)/bin/kvattn generate --verify \
		"What is the capital of France?" \
		"Explain in one sentence what a cache is." \
		"Why is the sky blue?"

bench: $(READY) ## speed beside other libraries, and a page about it in build/bench
	$(VENV)/bin/kvattn bench --out build/bench/results.json --report build/bench $(ARGS)

test: $(READY) ## all tests, on the CPU (ARGS="-k name" picks some)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 $(ARGS)
	suite=$$($(PYTHON) tests/gpu_check.py --list triton) && \
		TRITON_INTERPRET=1 KVATTN_TEST_BACKENDS=triton OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 \
		$$suite tests/field_reports tests/test_triton_random.py $(ARGS)

lint: $(READY) ## style and formatting
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(READY) ## mends what lint finds, where it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: $(READY) ## static types
	$(PYTHON) -m mypy

check: lint types test ## what a change has to pass

gpu-test: ## a backend's suite on this machine's GPU, with its own Python (BACKENDS=hopper,triton)
	$(SYSTEM_PYTHON) tests/gpu_check.py --parts $(BACKENDS) $(ARGS)

gpu-sanitize: ## reads and writes outside tensors, and races, on this machine's GPU; some minutes
	$(SYSTEM_PYTHON) tests/gpu_check.py --parts memcheck,racecheck $(ARGS)

gpu-check: ## both suites and memcheck at once (ARGS="--seconds 500 --parts triton,racecheck")
	$(SYSTEM_PYTHON) tests/gpu_check.py $(ARGS)

clean: ## removes the virtual environment and the tools' caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A torch built for CUDA brings the Triton that it was built with; a CPU build brings none.
$(READY): pyproject.toml $(PINS)
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kvattn needs Python 3.10 or newer as $(SYSTEM_PYTHON)" >&2; exit 1; }
	@$(SYSTEM_PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y python3-venv; } || \
		{ echo "$(SYSTEM_PYTHON) cannot make virtual environments: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV): PyTorch and the test tools, some minutes the first time"
	@$(SYSTEM_PYTHON) -m venv $(VENV)
	@$(PYTHON) -m pip install -q "$$(grep '^torch==' $(PINS))"
	@$(PYTHON) -c 'import triton' 2>/dev/null || $(PYTHON) -m pip install -q "$$(grep '^triton==' $(PINS))"
	@grep -v '^triton==' $(PINS) | $(PYTHON) -m pip install -q -r /dev/stdin
	@$(PYTHON) -m pip install -q --no-deps -e .
	@touch $@
