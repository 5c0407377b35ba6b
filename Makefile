# make demo and make test are all that a newcomer needs: every target sets up what it uses. make help lists them.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

# One worker takes the tests that start rank processes, the others share the rest: the two kinds do not wait for each other.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help install test check lint types demo faults bench clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(STAMP)  ## .venv with the package, editable, and everything for development (PYTHON=python3.12 chooses another Python)

# torch comes first and by its exact version, so that a build for this machine (without CUDA, say) that pip has been pointed at is taken and
# nothing that depends on torch brings another. Without build isolation pip builds with the pinned setuptools and needs no second download.
$(STAMP): pyproject.toml constraints.txt storage/_kernels.c
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "dcp-engine needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make install PYTHON=python3.12"; exit 1; } >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): some minutes the first time"
	$(PIP) -c constraints.txt setuptools torch
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

test: $(STAMP)  ## all tests
	$(PYTEST)

check: lint types test  ## what CI runs: format, lint, types, import contracts, then all tests, documents' code blocks included

lint: $(STAMP)  ## format and lint, changing nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check

# Type checkers and import-linter read folders, and do not see where package-dir puts planners/ and storage/: they get an installed copy.
types: $(STAMP)  ## mypy --strict and the import contracts, on an installed copy
	rm -rf build/lib build/typed
	$(PIP) --no-deps --no-build-isolation --target build/typed .
	cp -R examples build/typed/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p dcp_engine -p examples
	cd build/typed && PYTHONPATH=. ../../$(BIN)/lint-imports ../../pyproject.toml

demo: $(STAMP)  ## the main job: train, lose a rank in the middle of a save, come back on other topologies, prove it
	$(BIN)/dcp-engine demo

faults: $(STAMP)  ## the whole fault campaign, an hour or more; its tables go to docs/reliability.md
	PYTHONPATH=tests $(BIN)/python -P -m faults.campaign --full --record --workers $(WORKERS)

# A peer that cannot be installed here costs its own figures only: the rows say so.
$(VENV)/.peers: $(STAMP)
	$(PIP) -c constraints.txt --no-build-isolation -e '.[bench]' || echo "Not all peers could be installed: the rows say which." >&2
	@touch $@

bench: $(VENV)/.peers  ## the engine beside its peers, some twenty minutes; tables and pictures go to benchmarks/README.md
	$(BIN)/python -m benchmarks --readme

clean:  ## remove what builds and tests leave behind; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-out
	find benchmarks dcp_engine planners storage tests -name __pycache__ -type d -prune -exec rm -rf {} +
