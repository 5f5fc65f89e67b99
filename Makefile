# Every target sets up what it needs. VENV names the environment to make or to use, PYTHON the
# interpreter (3.11 or newer) that a new one is made with: make test VENV=~/envs/llmbench

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.llmbench-installed
DEMO_MODEL := smollm2-135m
PEERS := gptqmodel llmcompressor autoawq bitsandbytes lm-eval
DEMO_RESULTS := results/demo

.PHONY: help setup demo test test-peers static check fix

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

setup: $(INSTALLED)  ## make the environment and install llmbench into it, editable

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) \
	  else "llmbench needs Python 3.11 or newer; name one: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'from llmbench.engine.kernels.cpu_build import load_library; load_library()' \
	  2> /dev/null || echo 'no compiled CPU kernels (see llmbench doctor): plain torch will run'
	@touch $@

demo: setup  ## fetch the demo model, sweep nine load points, draw the plots: a few minutes
	$(BIN)/llmbench models pull $(DEMO_MODEL)
	$(BIN)/llmbench serve-bench $(DEMO_MODEL) --num-prompts 36 \
	  --random-input-len 128 --random-output-len 32 --kv-cache-memory 1GiB \
	  --request-rate 2,4,inf --max-concurrency 1,4,16 --goodput ttft:500 tpot:100 \
	  --output $(DEMO_RESULTS)

test: setup  ## run the default test suite; tests of the demo model are skipped if it is out of reach
	-@$(BIN)/llmbench models pull $(DEMO_MODEL) > /dev/null
	$(BIN)/python -m pytest -m "not slow and not peers"

test-peers: setup  ## hold checkpoints against other projects' tools (environments of 12 GB in .peers)
	-@$(MAKE) --no-print-directory --keep-going $(PEERS:%=.peers/%/installed)
	$(BIN)/python -m pytest -m peers tests/peers

# A peer whose environment cannot be made is skipped by its tests, with that reason.
# autoawq's build imports torch, so torch comes first and its build sees the environment.
.peers/%/installed: tests/peers/requirements-%.txt
	@test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check setuptools wheel \
	  $$(grep '^torch==' $<)
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(filter autoawq,$*),--no-build-isolation) -r $<
	@touch $@

static: setup  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: static test  ## all that a change has to pass

fix: setup  ## format, and repair what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
