# make demo, make test: on a clean clone they first make a virtual environment with all that they need.
#
#   PYTHON=python3.12   the Python that makes it
#   VENV=folder         where it is; with VENV= (empty) PYTHON's own packages are used, which then must
#                       have torch, pytest, hypothesis, setuptools, pybind11, ninja and, for the kernels,
#                       nvidia-cutlass, and nothing is installed
#   ARGS="--steps 50"   arguments for demo, test, test-gpu, bench, evaluate, nightly and report
#
# The build reads DASH_JOBS, DASH_SKIP_CUDA, DASH_REQUIRE_CUDA, CUTLASS_PATH and CUDA_HOME: see csrc/build_kernels.py.

PYTHON ?= python3
VENV ?= .venv

CPP_FILES = $(shell find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
BUILD_INPUTS = $(CPP_FILES) csrc/build_kernels.py setup.py pyproject.toml

ifeq ($(strip $(VENV)),)
BIN =
RUN = $(PYTHON)
READY = in-place
else
BIN = $(VENV)/bin/
RUN = $(BIN)python
READY = $(VENV)/ready
endif

.PHONY: demo test test-gpu bench evaluate nightly report kernels format lint in-place

demo: $(READY)
	$(RUN) -m dash_flash_attn demo $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(ARGS)

# Where no kernel can run this fails, unlike `make test`, which skips the GPU tests there. Leaves a record.
test-gpu: $(READY)
	$(RUN) -c 'import sys; from dash_flash_attn import info; sys.exit(info.unusable())'
	DASH_GPU_RECORD=benchmarks/results/gpu_tests.json $(RUN) -m pytest -m gpu $(ARGS)

# The paper's figure. `make bench ARGS=--quick`; `python -m benchmarks --help` lists the other measurements.
bench: $(READY)
	$(RUN) -m benchmarks backward $(ARGS)

# Every measurement of docs/evaluation.md, and then that page from the records.
evaluate: $(READY)
	$(RUN) -m benchmarks evaluate $(ARGS)
	$(RUN) -m benchmarks publish

# Fails if a test fails, a cell got slower, or a bit differs: docs/evaluation.md. Leaves nightly/report.html.
nightly: $(READY)
	$(RUN) -m benchmarks nightly $(ARGS)

# From the committed records, without a GPU: charts, docs/evaluation.md, report.html.
report: $(READY)
	$(RUN) -m benchmarks publish $(ARGS)

format: $(READY)
	$(BIN)ruff check --fix
	$(BIN)ruff format
	$(BIN)clang-format -i $(CPP_FILES)

lint: $(READY)
	$(BIN)ruff check
	$(BIN)ruff format --check
	$(BIN)clang-format --dry-run -Werror $(CPP_FILES)

ifeq ($(strip $(VENV)),)
in-place:
	$(PYTHON) setup.py -q build_ext --inplace

kernels:
	$(PYTHON) csrc/build_kernels.py
else
kernels: $(READY)

$(READY): requirements-dev.txt $(BUILD_INPUTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -r requirements-dev.txt
	$(RUN) -m pip install -e '.[test]'
	touch $@
endif
