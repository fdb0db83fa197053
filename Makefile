# setup, train, test, check: a fresh clone needs python3 with venv, a C++ compiler and a package registry.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.penstock-setup
NATIVE := CMakeLists.txt $(wildcard csrc/*)
STRICT := build/.strict-built
OTHERS := $(VENV)/.penstock-integrations
BEFORE := build/previous
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
ARGS   ?=

.PHONY: setup setup-tests setup-integrations train test test-thorough test-integrations check gpu-check gpu-bench clean

setup: $(STAMP)

# And the device of tests/device, a minute of compiling. Where it fails, the tests that need it say so.
setup-tests: $(STRICT)

# The build tools are installed first and used without isolation: pinned like everything else, and the next build
# compiles only what changed.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[train,tensorboard,dev]'
	touch $@

$(STRICT): $(STAMP) $(wildcard tests/device/csrc/*)
	-$(BIN)/python -m tests.device.building && touch $@

# The libraries whose loops penstock.integrations takes part in; and their releases before, in a folder that a run puts
# before the others.
setup-integrations: $(OTHERS)

$(OTHERS): $(STAMP) constraints-previous.txt
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[integrations]'
	rm -rf $(BEFORE)
	$(BIN)/python -m pip install -q --no-deps --target $(BEFORE) -r constraints-previous.txt
	touch $@

train: setup
	$(BIN)/penstock train $(ARGS)

# Two workers, one torch thread each: the suite is made for two cores. Its many processes share the bytecode that the
# first one writes.
test: setup-tests
	$(PYTEST) $(ARGS)

# The rows of the tables that are left out there, because others are much like them.
test-thorough: setup-tests
	$(PYTEST) -m thorough $(ARGS)

# Beside the plain libraries, in their pinned releases and in the ones before.
test-integrations: setup-integrations
	$(PYTEST) -m integrations tests/integrations $(ARGS)
	PYTHONPATH=$(BEFORE) $(PYTEST) -m integrations tests/integrations $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/meta/test_layers.py

# For a machine with a GPU whose PYTHON has torch and the build tools, and no registry: builds into that python, and
# leaves a report in OUT that is whole at every moment. BUDGET is in seconds, of the run: the build comes before.
OUT     ?= benchmarks/results
BUDGET  ?= 300

gpu-check:
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	$(PYTHON) benchmarks/gpu_check.py --out $(OUT) --budget-seconds $(BUDGET) $(ARGS)

# On the same machine and python: placements beside the systems that people use.
gpu-bench:
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	$(PYTHON) benchmarks/gpu/run.py --out $(OUT) --budget-seconds $(BUDGET) $(ARGS)

clean:
	rm -rf build $(STAMP) $(OTHERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
