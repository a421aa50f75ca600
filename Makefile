# make chat   set up what is missing, then chat with the built-in model
# make test   set up what is missing, then every check and test
# make test-all  make test with slow tests and coverage, then slower checks: out-of-bounds reads and writes, the examination of guide
# make bench  every figure of this machine, its GPU too, with nothing else running; takes many minutes and 5 GB of disk
# make build  the CPU's kernels for every instruction set, or after a change to them; MAX_JOBS=1 leaves the other cores free, CUDA=1 adds a GPU's
# Set-up lives in .venv and takes minutes once; after that both start in seconds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# The kernels are built against the torch of .venv, by the tools that are here or that pip brings.
export PATH := $(PATH):$(CURDIR)/$(BIN)
INSTALL := $(PIP) --quiet --no-build-isolation
REBUILD := test ! -f build/kernels/build.ninja || cmake --build build/kernels
ifdef MAX_JOBS
export CMAKE_BUILD_PARALLEL_LEVEL := $(MAX_JOBS)
endif

.PHONY: build chat test test-all lint bench bench-cuda clean

chat: $(VENV)/.runtime
	@$(REBUILD) >/dev/null || true
	@$(BIN)/localllm chat

test: $(VENV)/.dev build lint
	scripts/test

# All tests with coverage, and the checks that CI has no time for: reads and writes out of bounds, kernels on another
# processor (where its compiler and an emulator are installed), and the built-in model's whole examination, with warnings
# about facts that the program has outgrown since the model was trained.
test-all: $(VENV)/.dev build lint
	scripts/test --all
	scripts/sanitize
	scripts/aarch64
	$(BIN)/python -m scripts.train_guide.stale
	$(BIN)/python -m scripts.train_guide.evaluate

# The CPU's kernels for every instruction set. The set-up compiles only those that this machine uses.
build: $(VENV)/.runtime
	@test -f build/kernels/build.ninja || $(INSTALL) --editable . --no-deps
	@test -f build/kernels/build.ninja || \
	  { echo "error: the CPU's kernels need a C++20 compiler; on Debian: apt install g++, then make build"; exit 1; }
	@! grep -q '^VARIANTS:.*=native$$' build/kernels/CMakeCache.txt || cmake -UVARIANTS build/kernels
	@test -z "$(CUDA)" || cmake -DLOCALLLM_CUDA=ON build/kernels
	@$(REBUILD)

lint: $(VENV)/.dev
	scripts/check

# Rows of figures, kept in scripts/bench/results as the last ones. llama.cpp and transformers are raced where they are
# installed, and said to be missing where not.
bench: $(VENV)/.dev
	$(BIN)/python scripts/bench/startup.py
	$(BIN)/python scripts/bench/host_step.py
	$(BIN)/python scripts/bench/guide.py
	$(BIN)/python scripts/bench/overhead.py
	$(BIN)/python scripts/bench/kernels.py
	$(BIN)/python scripts/bench/cpu.py
	@why=$$($(BIN)/python -c 'from localllm.backends import cuda; print(getattr(cuda.probe(), "reason", ""))'); \
	  if [ -n "$$why" ]; then echo "not measured on a GPU: $$why"; else $(MAKE) bench-cuda; fi

# The kernels of an NVIDIA GPU, then models on it; make bench does it where there is one.
bench-cuda: $(VENV)/.dev
	for part in kernels linear attention steps; do $(BIN)/python scripts/bench/cuda_$$part.py || exit 1; done
	$(BIN)/python scripts/bench/cuda_models.py --shape qwen3-0.6b,qwen3-8b,llama-8b

clean:
	rm -rf $(VENV) build dist .coverage* .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; localllm needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: localllm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V); try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: Python's venv module is missing; on Debian: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV): this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone: once it is here, nothing later asks for another build of it. Apple silicon computes with
# MLX and has no use for it.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	test "$$(uname -sm)" = "Darwin arm64" || $(PIP) --quiet torch==2.13.0
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	$(PIP) --quiet scikit-build-core $(shell command -v cmake >/dev/null || echo cmake) $(shell command -v ninja >/dev/null || echo ninja)
	$(INSTALL) --config-settings=cmake.define.VARIANTS=native --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) --editable '.[dev]'
	@touch $@
