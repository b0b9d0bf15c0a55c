# The two commands are `make demo` and `make test`; both do all the set-up on a fresh machine.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The rooms are folders here (kernels, ops, ...): the current folder must not shadow packages of the same name.
export PYTHONSAFEPATH := 1
# Spinning threads of two processes on two cores slow each other down by a factor of 20, and thread count changes bits.
export OMP_NUM_THREADS := 1

BIN := .venv/bin
# A file's tests stay together, since they share what they make; every process imports torch, so there are few.
SHARED := -n auto --maxprocesses=4 --dist=loadfile
ARGS ?=

.PHONY: help setup demo test check static fuzz clean

help:  ## Say what there is
	@echo "Rollwire: the event-sourced data plane for RL post-training."
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-8s %s\n", $$1, $$2 }'

setup:  ## Install what is missing: programs, Python packages, jars (the first time about 6 GB; later nothing)
	@ops/setup.sh

demo: setup  ## Train a small policy live, from rollout to served weights: make demo ARGS="--steps 250 --seed 0"
	@$(BIN)/rollwire demo $(ARGS)

test: setup static  ## All checks and all tests, those on the real broker, S3 server and Redis included
	@echo "== tests, fast ones, shared out among the cores"
	@$(BIN)/pytest -m "not system" $(SHARED)
	@echo "== tests, on the real services, one after the other"
	@$(BIN)/pytest -m system --durations=25 --durations-min=5

check: setup static  ## All checks and the fast tests (no servers)
	@echo "== tests, fast ones"
	@$(BIN)/pytest -m "not system" $(SHARED)

static:
	@echo "== format (ruff)";        $(BIN)/ruff format --check --quiet .
	@echo "== lint (ruff)";          $(BIN)/ruff check --quiet .
	@echo "== imports (import-linter)"; $(BIN)/lint-imports --no-logo
	@echo "== types (mypy strict)";  $(BIN)/mypy
	@echo "== types (pyright)";      $(BIN)/python -m rollwire.ops.typecheck

fuzz: setup  ## Fuzz the readers of deltas, guided by coverage: make fuzz ARGS="-max_total_time=3600"
	@$(BIN)/python tests/fuzz/delta_fuzz.py --seeds .rollwire/fuzz -max_total_time=60 -timeout=20 -rss_limit_mb=1024 -max_len=65536 $(ARGS)

clean:  ## End a running stack, delete .rollwire, .venv and all caches of this checkout (downloads of the user's stay)
	@if [ -x $(BIN)/rollwire ] && [ -f .rollwire/stack.json ]; then $(BIN)/rollwire down; fi
	rm -rf .rollwire .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
