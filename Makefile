# make chat      chat with the built-in model
# make test      run the checks and the tests
# make test-all  make test with slow tests and coverage, then make test-npu, the address sanitizer, aarch64 and the exam of guide
# make test-npu  run the tests of the Ascend backend over torch_npu and a fake of its runtime; downloads 45 MB once
# make bench     run all benchmarks of this machine and its GPU; takes many minutes and 5 GB of disk; stop other programs
# make wheel     build dist/localllm-*.whl for Linux with the CUDA kernels of all GPUs; needs nvcc and takes many minutes
# make build     compile the CPU kernels for every instruction set; MAX_JOBS=1 uses one core, CUDA=1 adds the CUDA kernels,
#                GGUF=1 adds llama.cpp for GGUF models (for a GPU: docs/gguf.md)
# make clean     delete .venv and all build results
# Each target first sets up .venv, which takes minutes once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# The kernels are built against the torch of .venv, with the installed cmake and ninja, or those that pip installs.
export PATH := $(PATH):$(CURDIR)/$(BIN)
# Apple silicon computes with MLX.
TORCH := $(if $(filter Darwin-arm64,$(shell uname -sm | tr ' ' -)),,torch==2.13.0)
INSTALL := $(PIP) --no-build-isolation --config-settings=wheel.cmake=false
CONFIGURE := cmake -S kernels -B build/kernels -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
REBUILD := test ! -f build/kernels/build.ninja || cmake --build build/kernels
ifdef MAX_JOBS
export CMAKE_BUILD_PARALLEL_LEVEL := $(MAX_JOBS)
endif

# llama.cpp as a wheel of llama-cpp-python. Each value of CMAKE_ARGS has its folder, so a wheel is compiled once.
LLAMACPP := build/llamacpp/$(shell echo '$(CMAKE_ARGS)' | cksum | cut -d' ' -f1)
LLAMACPP_ARGS := -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE=$(CURDIR)/scripts/llamacpp.cmake $(CMAKE_ARGS)

.PHONY: build chat test test-all test-npu wheel lint bench bench-cuda clean

chat: $(VENV)/.runtime
	@$(REBUILD) >/dev/null || true
	@$(BIN)/localllm chat

test: $(VENV)/.dev build lint
	scripts/test

# All tests with coverage, and the checks that are too slow for CI: the wheel with its CUDA kernels (if nvcc is installed),
# the address sanitizer, the kernels on aarch64 (if its compiler and an emulator are installed), and the complete exam of
# guide, which lists the facts that changed since its training.
test-all: $(VENV)/.dev build/clients/.made build lint
	! command -v nvcc >/dev/null || $(MAKE) wheel
	scripts/test --all
	! command -v nvcc >/dev/null || $(BIN)/python -m scripts.cuda_resources
	$(MAKE) test-npu
	scripts/sanitize
	scripts/aarch64
	$(BIN)/python -m scripts.train_guide.evaluate

# Client libraries of agents, whose requirements are not those of .venv.
CLIENTS := tests/app/daemon/clients/requirements.txt

build/clients/.made: $(CLIENTS)
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --disable-pip-version-check --quiet --requirement $(CLIENTS)
	@touch $@

# torch_npu, beside the packages of .venv, over a fake of CANN that gcc compiles: tests/npu/conftest.py.
test-npu: $(VENV)/.dev
	tests/npu/run pytest tests/npu

# The CPU kernels for every instruction set. The set-up compiles only those that this machine uses.
build: $(VENV)/.runtime
	@$(if $(TORCH),$(CONFIGURE) -UVARIANTS $(if $(CUDA),-DLOCALLLM_CUDA=ON) >/dev/null) || \
	  { echo "error: the kernels need a C++20 compiler; on Debian: apt install g++, then make build"; exit 1; }
	@$(REBUILD)
	@test -z "$(GGUF)" || $(MAKE) $(LLAMACPP)/.built
	@test -z "$(GGUF)" || $(PIP) --force-reinstall --no-deps $(LLAMACPP)/*.whl
	@test -z "$(GGUF)" || $(INSTALL) --editable '.[llamacpp]'

# A set-up with this wheel in dist needs no compiler.
wheel: $(VENV)/.dev
	scripts/wheel

lint: $(VENV)/.dev
	scripts/check

# The results replace the earlier ones in scripts/bench/results. llama.cpp and transformers are measured if they are
# installed; otherwise the output says that they are missing.
bench: $(VENV)/.dev
	$(BIN)/python scripts/bench/startup.py
	$(BIN)/python scripts/bench/host_step.py
	$(BIN)/python scripts/bench/quality.py
	$(BIN)/python scripts/bench/kernels.py
	$(BIN)/python scripts/bench/models.py --backend cpu --shape guide --formats bf16 --jobs decode:1x32
	$(BIN)/python scripts/bench/models.py --backend cpu
	@reason=$$($(BIN)/python -c 'from localllm.backends import cuda; print(getattr(cuda.probe(), "reason", ""))'); \
	  if [ -n "$$reason" ]; then echo "no GPU measured: $$reason"; else $(MAKE) bench-cuda; fi

# The kernels of an NVIDIA GPU, then models on it. make bench calls this target if the machine has such a GPU.
bench-cuda: $(VENV)/.dev
	$(BIN)/python scripts/bench/kernels.py --device cuda --shape llama-8b --experts qwen3-30b-a3b
	$(BIN)/python scripts/bench/models.py --backend cuda --shape qwen3-0.6b --formats bf16 --ways auto graphs=off \
	  --jobs decode:1x128,decode:1x1024,decode:8x1024,decode:64x1024,prefill:128,prefill:2048,requests:256x1024
	$(BIN)/python scripts/bench/models.py --backend cuda --shape llama-8b \
	  --jobs decode:1x128,decode:8x1024,decode:64x1024,prefill:128,prefill:512,prefill:2048,decode:64x64@8

clean:
	rm -rf $(VENV) build dist .coverage* .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; localllm needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: localllm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V); try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: Python's venv module is missing; on Debian: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV): this takes about a minute, and the time to download 300 MB."
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The editable installation lists the modules, so a module that is added or moved needs another installation.
MODULES := $(VENV)/.modules-$(shell find app assets backends engine kernels -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)

$(MODULES): $(VENV)/.made
	@rm -f $(VENV)/.modules-*
	@touch $@

# The kernels of this processor compile while pip installs torch and the other packages; only their link needs torch.
# --no-compile: Python compiles a module at its first import.
TOOLS := $(strip $(foreach tool,cmake ninja,$(shell command -v $(tool) >/dev/null || echo $(tool))))

$(VENV)/.runtime: $(VENV)/.made $(MODULES) pyproject.toml constraints.txt
	@$(if $(TOOLS),$(PIP) $(TOOLS))
	@$(if $(TORCH),CONFIGURE='$(CONFIGURE)' scripts/kernels &) \
	  $(PIP) --no-compile scikit-build-core $(TORCH) && $(INSTALL) --no-compile --editable . ; \
	  status=$$?; wait; exit $$status
	@$(REBUILD) >/dev/null || echo "warning: the CPU kernels do not compile, and localllm is slow; make build shows why"
	@touch $@

# The tests compute GGUF models with llama.cpp, which compiles while the other packages are installed. They also read the
# chat templates in its sources.
$(VENV)/.dev: $(VENV)/.made $(MODULES) pyproject.toml constraints.txt scripts/llamacpp.cmake
	@$(MAKE) --jobs=2 $(VENV)/.runtime $(LLAMACPP)/.built
	$(INSTALL) --find-links $(LLAMACPP) --editable '.[dev,llamacpp]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some files are for a later Python
	@touch $@

$(LLAMACPP)/.built: $(VENV)/.made constraints.txt scripts/llamacpp.cmake
	@echo "Compiling llama.cpp: this takes a few minutes."
	@rm -rf $(@D)
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --no-cache-dir --no-binary llama-cpp-python \
	  --constraint constraints.txt --dest $(@D) llama-cpp-python
	@mkdir $(@D)/templates
	tar --extract --gzip --file $(@D)/llama_cpp_python-*.tar.gz --directory $(@D)/templates --strip-components=5 \
	  --wildcards '*/models/templates/*.jinja'
	CMAKE_ARGS='$(LLAMACPP_ARGS)' $(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-cache-dir \
	  --wheel-dir $(@D) $(@D)/llama_cpp_python-*.tar.gz
	@rm $(@D)/llama_cpp_python-*.tar.gz
	@touch $@
