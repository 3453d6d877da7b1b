# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv by itself, once.

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready
BACKENDS ?= FA2,FA4,cuDNN,math
# How long `make fuzz` goes on.
SECONDS ?= 60
# Processes that share the GPU: the tests wait for the host, which compiles kernels and computes references.
GPU_PROCESSES ?= 4
# The tests run with what attnreg compiles where there is a C++ compiler, which is looked for
# as attnreg does; ROUTERS=python leaves it out.
ROUTERS ?= $(shell set -- $$CXX; for name in $${1:-c++ g++ clang++}; do \
	command -v $$name >/dev/null 2>&1 && echo compiled && exit; done; echo python)

DOCS_READY := .venv/docs-ready

.DEFAULT_GOAL := help
.PHONY: help venv lint docs test test-slow sanitize fuzz fuzz-gpu test-gpu test-gpu-slow matrix demo bench wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(READY) ## set up .venv, as every other target does when it has to

# The pinned list goes in alone and first: pip would build the package with whatever versions it
# finds. With all of it there, the second install resolves nothing and downloads nothing.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "attnreg needs Python 3.11 or later, got $(PYTHON): make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up .venv: once, a few hundred megabytes with the CPU build of torch"
	@"$(PYTHON)" -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check --requirement constraints.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable '.[plots]'
	@touch $@

lint: $(READY) ## ruff (rules and format) and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

$(DOCS_READY): $(READY) docs/requirements.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement docs/requirements.txt
	@touch $@

docs: $(DOCS_READY) ## build the site into site/; a warning, such as a link that leads nowhere, is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# A process for each core, so that each of them needs one thread; where a test asks for more, a thread that waits doesn't
# spin, which takes a core from another process. They and the Python processes that they start keep bytecode, whatever the
# shell says: each would compile attnreg and the tests anew.
test: $(READY) ## every quick test that needs no GPU; ROUTERS=python leaves out what is compiled
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
		$(PY) -m pytest --numprocesses=auto --dist=worksteal --routers=$(ROUTERS)

test-slow: $(READY) ## the tests that take minutes
	$(PY) -m pytest -m "slow and not gpu" --routers=$(ROUTERS)

# Torch isn't compiled with the sanitizers: its classes can't be checked, and what it keeps looks like leaks. Of the tests
# that are left out one limits the address space, of which ASan takes terabytes, and two have Inductor compile, which takes
# no compiler with options.
SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
SANITIZED := tests/dispatch tests/aten tests/varlen tests/test_assignment.py $(wildcard tests/backends/test_cpu_*.py)

sanitize: $(READY) ## the tests of attnreg's C++, compiled by g++ with ASan and UBSan
	CXX="g++ $(SANITIZE)" LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
		$(PY) -m pytest --numprocesses=auto --dist=worksteal --routers=compiled $(SANITIZED) \
		--deselect tests/backends/test_cpu_kernel.py::test_a_thread_without_memory_is_an_error_and_does_not_end_the_process \
		-k "not offsets_that_inductor_has_put_in_the_same_tensor"

fuzz: $(READY) ## random calls compared with float64; SECONDS=600, ARGS="--seed 3 --only 17" repeats one
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --seconds $(SECONDS) $(ARGS)

fuzz-gpu: $(READY) ## the same on a GPU, with each of BACKENDS and efficient
	OMP_NUM_THREADS=2 $(PY) tests/fuzz.py --seconds $(SECONDS) --device cuda --backends $(BACKENDS),efficient $(ARGS)

# Two threads for each process: references are computed on the host, and with a thread for each core in every process
# the tests took more than five times as long.
test-gpu: $(READY) ## the tests on a GPU; BACKENDS=FA2,math names the backends
	OMP_NUM_THREADS=2 $(PY) -m pytest -m "gpu and not slow" --numprocesses=$(GPU_PROCESSES) --dist=worksteal --backends=$(BACKENDS) --routers=$(ROUTERS)

test-gpu-slow: $(READY) ## those that take minutes there: FA4 and cuDNN on the whole input matrix
	OMP_NUM_THREADS=2 $(PY) -m pytest -m "gpu and slow" --numprocesses=$(GPU_PROCESSES) --dist=worksteal --backends=$(BACKENDS) --routers=$(ROUTERS)

matrix: $(READY) ## `test` on other versions of torch, Python and dependencies; VERSIONS=2.11,2.15 picks some
	$(PY) tests/matrix.py --versions=$(VERSIONS) --venvs=$(or $(VENVS),.matrix) --routers=$(ROUTERS)

demo: $(READY) ## train on real text, packed and padded, and compare
	@echo "compiling the call cache and the CPU kernel where that hasn't been done and a compiler is there"
	@$(PY) -m attnreg build --missing || true
	@$(PY) -m attnreg demo

bench: $(READY) ## list the benchmarks that `attnreg bench` doesn't have; NAME=cpu_sdpa runs that one, ARGS go to it
ifdef NAME
	@$(PY) benchmarks/$(NAME).py $(ARGS)
else
	@echo "$(PY) -m attnreg bench fresh, varlen, sdpa, overhead or selection"
	@for file in benchmarks/[a-z]*.py; do echo "make bench NAME=$$(basename "$$file" .py)"; done
endif

wheels: $(READY) ## the sdist, and the wheel with the compiled CPU kernel: built, checked, installed and run
	release/wheels

clean: ## remove .venv, caches and outputs
	rm -rf .venv .wheels .matrix build dist site demo-output .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
