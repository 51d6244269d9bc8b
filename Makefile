# Each target installs what it needs into $(VENV) by itself; `make help` lists them.
#   make test PYTHON=python3.12     another interpreter for the environment
#   make test-gpu VENV=             no environment: the current PYTHON with the packages it has (CUDA torch, say)
SHELL := bash
PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
export PYTHONPATH := src
run := $(PYTHON)
else
run := $(VENV)/bin/python
ready := $(VENV)/.installed
ready_docs := $(VENV)/.installed-docs
endif

# As many processes as cores, eight at most, each on one.
parallel := OMP_NUM_THREADS=1 $(run) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help demo test test-all test-gpu check tables docs bench
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): once, and again when pyproject.toml or constraints.txt change."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(run) -m pip install --quiet --constraint constraints.txt --editable ".[dev,report]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(run) -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

demo: $(ready) ## compare the encodings on Jane Austen's novels: table, figure, run folder
	@out=runs/demo; number=1; \
	while [ -e $$out/report.json ]; do number=$$((number + 1)); out=runs/demo-$$number; done; \
	if [ $$number -gt 1 ]; then echo "Earlier demos are kept; this one writes $$out."; fi; \
	if [ -e $$out/recipe.json ]; then resume=--resume; echo "Resuming the interrupted run in $$out."; fi; \
	$(run) -m phasewise compare --out $$out $$resume

test: $(ready) ## the tests that need no GPU and little time
	$(parallel) -m "not slow and not gpu"

test-all: $(ready) ## the same and the slow ones
	$(parallel) -m "not gpu"

test-gpu: $(ready) ## the tests that need a GPU, recorded in results/test-gpu.json
	$(run) -m tests.gpu_record write

check: $(ready) ## format, lint, types, ranks, sizes, age of the GPU record
	$(run) -m ruff format --check .
	$(run) -m ruff check .
	$(run) -m pyright --project pyproject.toml
	$(run) -m pytest -q tests/test_ranks.py
	$(run) -m tests.gpu_record check

tables: $(ready) ## the figures and tables of README.md and docs from results/
	$(run) -m experiments.readme_figure results/demo/report.json
	$(run) -m experiments.attention_figure results/attention/h200.json results/attention/flex-h200.json results/attention/peers-h200.json results/attention/peers-128-h200.json
	$(run) -m experiments.decode_table results/attention/decode-h200.json
	$(run) -m experiments.extend_demo
	cp results/evaluate/demo/figure.svg docs/figures/evaluate_demo.svg
	$(run) -m experiments.training_table results/training/h200.json
	$(run) -m experiments.small_models_page
	$(run) -m experiments.validation_tables
	$(run) -m experiments.parallel_tables results/parallel/h200

docs: $(ready_docs) ## the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(run) -m mkdocs build --strict

bench: $(ready) ## the CPU benchmark, into results/cpu
	$(run) -m phasewise bench cpu --out results/cpu
