# The whole workflow. `make up` runs the main job, `make test` passes the default suite.
PYTHON ?= python3
# PyTorch's CPU wheel index; without it pip takes the build that your own index offers.
TORCH_INDEX ?=
# Flags for `warmroute up`, e.g. make up ARGS="--port 9000 --replicas 3"
ARGS ?=

VENV := .venv
PIP_FLAGS := -q --disable-pip-version-check -c constraints.txt
PIP_FLAGS += $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: setup up test slow lint bench clean

NATIVE := $(wildcard kvstore/*.cpp kvstore/*.h router/*/*.cpp router/*/*.h replica/native/*.cpp replica/native/*.h)

setup: $(VENV)/.kernels

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setup: python environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: packages (torch is the large one: some minutes without a word)"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[test,bench,lint]'
	@echo "setup: default model"
	@$(VENV)/bin/python -m tools.fetch
	@touch $@

$(VENV)/.kernels: $(VENV)/.ready $(NATIVE)
	@echo "setup: native kernels"
	@$(VENV)/bin/python -m replica.native.library
	@for each in kvstore.chainhash router.locality.planes router.locality.promises router.choice.pricer \
	    router.policies.heat router.dispatch.chutes router.openai.quotes router.openai.contents \
	    router.rendering.shelves; do \
	    $(VENV)/bin/python -W ignore::RuntimeWarning:runpy -m $$each || exit 1; done
	@touch $@
	@echo "setup: done; make up starts a cluster"

up: setup
	@exec $(VENV)/bin/warmroute up $(ARGS)

# How many processes share the default suite, e.g. make test WORKERS=4
WORKERS ?= 2

test: setup
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile

slow: setup
	@$(VENV)/bin/python -m pytest -m "slow or soak or traces"

lint: setup
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy && $(VENV)/bin/mypy -p replica -p router -p tools

# Flags for the book of benchmarks, e.g. make bench BENCH_ARGS="siblings slow live --peers FOLDER"
BENCH_ARGS ?=

bench: setup
	@$(VENV)/bin/warmroute bench book $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
