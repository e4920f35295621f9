# Needs Python >= 3.11 and make. Every target makes its own environment in .venv, once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo real evidence test wheel-test lint types docs docs-check site clean

# The first Python that is new enough; another one with: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dsbd needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY) ## show what this is with the built-in pair: four beams of eight prompts, and the same by transformers
	@$(BIN)/dsbd demo

real: $(READY) ## fetch SmolLM2-135M and Gemma-3-270m (350 MB) into models/, and show the same with them
	$(BIN)/python -m benchmarks.real smollm2-135m-instruct gemma-3-270m
	@for model in models/smollm2-135m-instruct models/gemma-3-270m; do \
		echo; echo "══ $$model"; \
		$(BIN)/dsbd demo --target $$model; \
	done

evidence: $(READY) ## the table of README: fetch Qwen2.5-Coder-1.5B and SmolLM2-135M, and measure beside other engines
	$(BIN)/python -m benchmarks.real --gguf --q8 qwen2.5-coder-1.5b-instruct smollm2-135m-instruct
	BIN=$(BIN) benchmarks/peers/setup models/qwen2.5-coder-1.5b-instruct models/smollm2-135m-instruct
	$(BIN)/python -m benchmarks.evidence --equal models/smollm2-135m-instruct
	$(BIN)/python -m benchmarks.evidence --weights int4 --name evidence-int4

PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q

test: $(READY) ## run the suite
	$(PYTEST)

wheel-test: ## build the wheel, install it into an empty environment, use it away from the clone
	.ci/wheel-test

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy
	$(BIN)/mypy

docs: $(READY) ## write docs/cli.md and the request fields, and draw the picture of an iteration from its trace
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_fields.py
	$(BIN)/python docs/site/iteration_picture.py

docs-check: $(READY) ## fail if docs/cli.md is not what the commands say, or fields are not those of their table
	$(BIN)/python docs/generate_cli.py --check
	$(BIN)/python docs/generate_fields.py --check

# The site has an environment of its own: it reads docstrings from the source and imports nothing.
SITE := $(VENV)-site
$(SITE)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dsbd needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt --group site
	touch $@

site: $(SITE)/.ready ## build the site into build/site; a dead link or a page that nothing leads to is an error
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(SITE) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
