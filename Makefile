# Every target sets up what it needs in .venv; a second run finds it there.
#
#   make demo       the main job on a real mesh, on the CPU; needs no PETSc, MPI or compiler
#   make test       all tests, Firedrake's included (builds PETSc and Firedrake once: a quarter of an hour)
#   make test-core  the tests that need no Firedrake, a few minutes
#   make test-mpi   loops on one to four processes, a few minutes
#   make lint       ruff and mypy
#   make format     let ruff rewrite the sources
#   make bench      the engine against the same loops in C (needs gcc)
#   make docs       the pages in docs/ as HTML, in site/
#   make clean      remove what was built, .venv included
#
# Variables: PYTHON (3.11 or later, makes .venv), PYTEST_ARGS, TESTS_CACHE (folder of modules that tests
# have compiled, by default in the user's cache; empty: each process compiles its own).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c ci/constraints.txt
# Two processes: the tests compile a lot, and IREE's compiler itself uses several threads.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
# What needs Firedrake; pyop3's are skipped where Firedrake comes without it.
BEYOND_CORE := tests/firedrake tests/mpi tests/pyop3
WITH_FIREDRAKE := $(filter-out tests/mpi, $(wildcard $(BEYOND_CORE)))

.PHONY: help demo test test-core test-firedrake test-mpi lint format bench docs clean

help:
	@sed -n '/^# *make /s/^# *//p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras.
$(VENV)/.installed-%: pyproject.toml ci/constraints.txt | $(BIN)/python
	$(PIP) --editable '.[$*]'
	touch $@

# Firedrake's own script knows whether all is in place, in a tenth of a second.
.PHONY: firedrake
firedrake: $(VENV)/.installed-test
	ci/system-packages.sh firedrake
	ci/firedrake.sh $(VENV)
	$(BIN)/python -c 'import pytest_mpi' 2>/dev/null || $(PIP) mpi-pytest

demo: $(VENV)/.installed-demo
	$(BIN)/python -m pyop3_mlir demo

test: test-core test-firedrake test-mpi

test-core: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) -p no:mpi-pytest $(BEYOND_CORE:%=--ignore=%) $(PYTEST_ARGS)

test-firedrake: firedrake
	if [ -n "$(WITH_FIREDRAKE)" ]; then
	    $(PYTEST) -n $(WORKERS) $(WITH_FIREDRAKE) $(PYTEST_ARGS)
	fi

# One launch for each number of processes: mpi-pytest alone would start one for each test. More
# processes than cores are wanted here, also by root.
test-mpi: export OMP_NUM_THREADS := 1
test-mpi: export OMPI_MCA_rmaps_base_oversubscribe := 1
test-mpi: export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
test-mpi: export OMPI_ALLOW_RUN_AS_ROOT := 1
test-mpi: export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
test-mpi: firedrake
	$(PYTEST) -n $(WORKERS) -m 'parallel[1]' tests/mpi $(PYTEST_ARGS)
	for processes in 2 3 4; do
	    mpiexec -n $$processes $(PYTEST) -q -m "parallel[$$processes]" tests/mpi $(PYTEST_ARGS)
	done

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test
	$(BIN)/python -m pyop3_mlir bench engine

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
