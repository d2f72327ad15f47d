# One command per chore. Everything lives in .venv; nothing needs root, a GPU, Slurm or a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# make run run_dir=DIR args="trainer.optimizer.lr=1e-4 mode=sync"
run_dir ?=
args ?=

# Byte code is written, whatever the shell says: every rank and sandbox starts faster with it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all faults lint scripts clean

run: $(VENV)/.installed
	$(BIN)/areal-hpc run configs/demo.yaml $(if $(run_dir),"run_dir=$(run_dir)") $(args)

# Two at a time: jobs on the test cluster mostly wait, and most tests use one core only (tests/conftest.py).
BY_TWO := -n 2

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(BY_TWO) $(args)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=1800 $(args)

# Breaks everything there is a promise about, and prints what each fault cost.
faults: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=1800 -m fault $(BY_TWO) $(args)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check areal_hpc analysis tests
	$(BIN)/mypy areal_hpc

# Every script in slurm/ names the command that makes it; this makes them anew.
scripts: $(VENV)/.installed
	for script in slurm/*.sbatch; do \
	  sed -n 's/^# areal-hpc //p' "$$script" | xargs $(BIN)/areal-hpc > "$$script.new" && mv "$$script.new" "$$script"; \
	done

clean:
	rm -rf $(VENV) .cache runs build *.egg-info

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[cpu]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[cpu,dev]"
	touch $@
