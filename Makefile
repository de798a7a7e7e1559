# Every target sets up what it needs: a virtual environment in .venv with the packages of pyproject.toml.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo precision test test-slow lint format docs models bench figures memory distributed dist clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml constraints.txt
	@echo "Making $(VENV) with torch and all that is developed with; this takes some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup ## Compare eight optimizers on handwritten digits; writes a report with figures to runs/demo
	$(BIN)/python -m ingot.lab compare digits --seeds 3 --threads 1 --out runs/demo

precision: setup ## Train in bfloat16 and in float32 and compare; writes a figure and a report to runs/precision
	$(BIN)/python -m ingot.lab precision --out runs/precision

test: setup ## Run the tests
	$(BIN)/python -m pytest -n 2

test-slow: setup ## Run the tests that take minutes, too
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Build the documentation into site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

models: setup ## Measure how much of real models is preconditioned, and write the table in docs/models.md
	$(BIN)/python -m tests.shares

$(VENV)/.bench-ready: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@touch $@

bench: $(VENV)/.bench-ready ## Measure times, memory and growth against peers; writes the page docs/benchmarks.md
	$(BIN)/python -m benchmarks all --out benchmarks/results
	$(BIN)/python -m benchmarks.pages

figures: setup ## Draw all figures and write all tables of README and docs from stored results; trains nothing
	$(BIN)/python -m benchmarks.pages

PROCESSES ?= 2
distributed: setup ## Count what several processes send, and time their steps; prints the tables of docs/distributed.md
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(PROCESSES) -m benchmarks.distributed

memory: setup ## Measure state and peaks in bfloat16; writes runs/memory and the tables in docs/precision.md
	$(BIN)/python -m benchmarks.state_memory

dist: setup ## Build wheel and sdist into dist, check them, and try the wheel in an environment with torch alone
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest -q -m slow tests/test_packaging.py --built dist

clean: ## Remove what the other targets made
	rm -rf $(VENV) site runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
