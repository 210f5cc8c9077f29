# make demo | make test | make check | make lint: each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The Python whose torch sees the GPU: that of .venv, if there is one.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Each of the hundreds of processes that tests start would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check quick lint ruff types layers docs format gpu gpu-list gpu-coverage chaos clean
demo: $(VENV)/.installed
	$(BIN)/tandem demo

# Three files at a time on two cores: much of the time tests wait, most of all those with Ray.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3

# What to run before every commit: lint and the quick tests, beside each other.
check: $(VENV)/.installed
	$(MAKE) --jobs 2 ruff types layers quick

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --quick tests/unit tests/property tests/architecture

# All that needs a GPU; installs nothing. ARGS: --list, --only PART …
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# What each part of it shows with one GPU and with two, and from what figure on it passes.
gpu-list:
	$(GPU_PYTHON) -m benchmarks.gpu --list $(ARGS)

# Which lines of the code of devices run in tests without a GPU.
gpu-coverage: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[triton]' coverage
	$(BIN)/coverage run -m pytest -n 0 tests/unit/actors/channels tests/unit/actors/gather \
		tests/unit/actors/moe tests/unit/actors/offload tests/unit/actors/planning \
		tests/unit/kernels tests/unit/models/experts tests/oracle/test_decode_graphs.py
	$(BIN)/coverage combine
	$(BIN)/coverage report

# 200 faults under load, and what becomes of each answer: on one node, between two, on Ray. ARGS:
# --seed N, --dtype bfloat16 --undisturbed 60 …
chaos: $(VENV)/.installed
	$(BIN)/python -m benchmarks.robustness --faults 130 $(ARGS)
	$(BIN)/python -m benchmarks.robustness --two-nodes --faults 40 --output benchmarks/results/chaos_links.json $(ARGS)
	$(BIN)/python -m benchmarks.robustness --served --two-nodes --faults 30 --output benchmarks/results/chaos_served.json $(ARGS)

lint: ruff types layers docs

ruff: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

layers: $(VENV)/.installed
	$(BIN)/lint-imports

docs: $(VENV)/.installed  # fails for a dead link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first: its pinned version resolves to a build without gigabytes of CUDA packages.
# Bytecode by all cores, where pip takes one; of what is mostly never imported, when it is.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m compileall -qq -j 0 -x '/(transformers|sympy)/' $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
