# Everything runs from .venv, which the first command makes: Python 3.11+ and make are all it takes.
# The environment is made anew when a set-up was cut short, and brought up to date when a file it depends on changes.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
GFX1250 := $(VENV)/gfx1250
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs demo-output setup clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: $(READY) ## score, select and attend over a text (ARGS="FILE ...": arguments of kvscout demo)
	@$(BIN)/python -m kvscout demo $(ARGS)

test: $(READY) $(GFX1250)/.ready ## run the test suite (ARGS="-k topk ...": arguments of pytest; WORKERS=0: one process)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(READY) ## check style and types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m mypy

docs: $(READY) ## write the generated parts of README.md and docs/
	@$(BIN)/python docs/generate.py

demo-output: $(READY) ## run the demo and put its output into README.md
	@$(BIN)/python docs/generate.py --demo

setup: $(READY) $(GFX1250)/.ready ## make or update the environment

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find kvscout tests docs -name __pycache__ -prune -exec rm -rf {} +

define TORCH_BRINGS_TRITON
import importlib.metadata as m, sys
sys.exit(not any('triton' in name.partition(';')[0] for name in m.requires('torch') or ()))
endef
export TORCH_BRINGS_TRITON

# The stamp is removed first and written last: an environment without it is never used, but made from nothing.
$(READY): pyproject.toml requirements/constraints.txt requirements/triton.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvscout needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -e $@ || { echo "Making $(VENV) (once; a minute or two)" >&2; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $@
	@$(PIP) install --constraint requirements/constraints.txt torch numpy
	@$(BIN)/python -c "$$TORCH_BRINGS_TRITON" || $(PIP) install --no-deps --requirement requirements/triton.txt
	@$(PIP) install --constraint requirements/constraints.txt --editable '.[dev]'
	@touch $@

# Another Triton, which nothing imports unless its folder is put first.
$(GFX1250)/.ready: requirements/triton-gfx1250.txt | $(READY)
	@echo "Installing another Triton into $(GFX1250) (once; 286 MB), for the tests that compile for gfx1250" >&2
	@rm -rf $(GFX1250)
	@$(PIP) install --no-deps --no-compile --target $(GFX1250) --requirement $<
	@touch $@
