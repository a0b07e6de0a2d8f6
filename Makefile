# Needs Python 3.11 or later, pip and make. Everything is installed into .venv, at the versions that CONSTRAINTS pins.

PYTHON ?= python3
CONSTRAINTS ?= constraints/torchrl0.14.1-trl1.16.0.txt
DEMO_OUT ?= demo-out
BIN := .venv/bin
READY := .venv/.ready-$(basename $(notdir $(CONSTRAINTS)))

# Tests download nothing and hash strings alike in every run.
OFFLINE := HF_HUB_OFFLINE=1 PYTHONHASHSEED=0

.PHONY: help setup demo test matrix bench lint format types check clean

help:
	@echo "make demo     run the whole job once: collect, score, train; writes $(DEMO_OUT)/"
	@echo "make test     run all tests, the examples in docstrings and the code in README.md"
	@echo "make matrix   run all tests on every pinned set of versions; ROW=<name of a file of constraints/> runs one"
	@echo "make bench    measure speed and memory beside torchrl's own classes and by hand, in some minutes; QUICK=1 tries it"
	@echo "make lint     report style and formatting faults"
	@echo "make format   repair them"
	@echo "make types    type-check the package"
	@echo "make check    lint, types, test"
	@echo "make clean    delete .venv, caches and the demo's output"

setup: $(READY)

# The environment is made anew when the metadata or the pinned set changes, and left alone otherwise.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "The pinned set needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[test]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/torchrl-trl-bridge demo --out $(DEMO_OUT)

test: $(READY)
	$(OFFLINE) $(BIN)/python -m pytest

# Makes its own environments, in .venv-matrix.
matrix:
	$(PYTHON) tools/matrix.py $(foreach row,$(ROW),--row $(row))

# Leave the machine alone meanwhile. With QUICK=1 nothing is written.
bench: $(READY)
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf .venv .venv-matrix .mypy_cache .pytest_cache .ruff_cache .hypothesis $(DEMO_OUT)
