# Set-up uses ordinary pip, so that this machine's own pip configuration is honoured.
# A finished step leaves a stamp in .venv, keyed by what it was made from. An interrupted one leaves .unfinished, and
# then .venv is made anew: a package that pip was writing looks installed to the next pip.

ENGINE ?= 0.5.23
TEST_ENGINES := 0.5.11 0.5.12.post1 0.5.13 0.5.23
TORCH := torch==2.13.0
CANDIDATES := $(PYTHON) python3.11 python3.12 python3

VENV := .venv
PIP := $(VENV)/bin/python -m pip install -qq --progress-bar off --disable-pip-version-check
KEY := $(shell { echo "$(CURDIR) $(TORCH)"; cat pyproject.toml; } | sha256sum | cut -c1-12)
BASE := $(VENV)/.ready-$(KEY)
DEV := $(VENV)/.ready-dev-$(KEY)

# A removed or upgraded system Python leaves a dead .venv behind: its stamps count for nothing either.
ifeq ($(shell [ ! -e $(VENV)/.unfinished ] && $(VENV)/bin/python -c 'print("alive")' 2>/dev/null),)
$(shell rm -f $(VENV)/.ready-*)
endif

.DEFAULT_GOAL := help
.PHONY: help setup run test lint clean

help:
	@echo "make run     set up, then the main job: SGLang $(ENGINE) against the reference (ENGINE=0.5.13 make run)"
	@echo "make test    set up, then the whole CPU test suite"
	@echo "make setup   the control environment in $(VENV) only"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make clean   remove $(VENV) and caches; engine environments stay in the user's cache directory"

setup: $(BASE)

run: $(BASE)
	@$(VENV)/bin/eaglecheck run --engine $(ENGINE)

test: $(DEV)
	@$(VENV)/bin/python -m harness.envs $(TEST_ENGINES)
	@EAGLECHECK_REQUIRE_ENGINES=1 $(VENV)/bin/pytest -n auto

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# Candidates are run, not just looked up: a version manager's shim may exist for a Python that does not.
$(BASE):
	@python=; for p in $(CANDIDATES); do \
	  if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "eaglecheck needs Python 3.11 or newer with venv; tried: $(CANDIDATES)" >&2; \
	  echo "  python3 is: $$(python3 --version 2>&1 | head -1)" >&2; \
	  echo "  install python3.11 and python3.11-venv, or name one:  make PYTHON=/path/to/python3.11 setup" >&2; exit 1; fi; \
	[ ! -e $(VENV)/.unfinished ] && $(VENV)/bin/python -m pip --version >/dev/null 2>&1 \
	  && grep -qsF "$(CURDIR)/$(VENV)" $(VENV)/bin/activate || $$python -m venv --clear $(VENV)
	@touch $(VENV)/.unfinished
	@echo "installing the control environment in $(VENV): $(TORCH) (CPU), pandas, pyarrow, hypothesis, pytest (~1 GB, once)"
	@$(PIP) $(TORCH) -e .
	@rm -f $(VENV)/.ready-* $(VENV)/.unfinished; touch $@

$(DEV): $(BASE)
	@echo "adding the test tools to $(VENV): ruff, mypy, import-linter, syrupy, transformers (~150 MB, once)"
	@touch $(VENV)/.unfinished
	@$(PIP) $(TORCH) -e '.[dev]'
	@rm -f $(VENV)/.unfinished; touch $@
