# `make demo` and `make test` do all the set-up: a virtual environment, torch first as one
# exact build (so that nothing else pulls another), then the package with its dev group.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Built for that torch; without dependencies, which would bring another. The dev group has what it imports.
TORCHREC ?= torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
BIN := .venv/bin

.PHONY: demo test sweep mutants kills fuzz lint types layers check clean

demo: .venv/ready
	$(BIN)/loka demo --out runs/demo

# One torch thread a worker: two pools of threads on the same cores wait for each other.
# Halves first: chunks let two make the same fixtures, and start ranks at once. A worker more than cores,
# since a third of what they do is to wait for ranks and for processes that are to be killed.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Bytecode is kept, whatever the environment says: without it each worker takes 10 s more to read the tests.
test: .venv/ready
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

# What `make test` leaves out for time: the rest of the sweeps over foreign models and long parametrizations.
sweep: .venv/ready
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m slow

# Does a test fail where the code is wrong? 300 small mistakes, an hour; SHARD=2/8 makes every eighth of them.
SHARD ?= 1/1
# The tool is in the history, with the score of 2026-11-22: 273 of 300.
mutants: .venv/ready
	test -f tests/mutation/mutants.py || git archive 71fcabd tests/mutation | tar x --skip-old-files
	$(BIN)/python tests/mutation/mutants.py --shard $(SHARD) --out runs/mutants/$(subst /,of,$(SHARD)).jsonl

# Two hundred kills of five commands at random moments; goes on where it stopped. The tally is in docs/hardening.md,
# the tool in the history.
kills: .venv/ready
	test -f tests/robustness/kills.py || git archive d711f79a tests/robustness/kills.py tests/robustness/killed.py | tar x
	OMP_NUM_THREADS=1 $(BIN)/python tests/robustness/kills.py

# 2,000 damaged records, and 172 hostile files and folders of rows.
fuzz: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/robustness/fuzz.py

check: lint types layers test

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

layers: .venv/ready
	$(BIN)/lint-imports

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[data]' --group dev
	$(if $(TORCHREC),$(BIN)/python -m pip install --quiet --no-deps $(TORCHREC))
	touch .venv/ready

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
