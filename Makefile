# Set-up uses ordinary pip, so that this machine's own pip configuration is honoured.
# A finished step leaves a stamp in .venv, keyed by what it was made from. An interrupted one leaves .unfinished, and
# then .venv is made anew: a package that pip was writing looks installed to the next pip.

ENGINE ?= 0.5.23
TEST_ENGINES := 0.5.11 0.5.12.post1 0.5.13 0.5.23
ENGINES := $(TEST_ENGINES:%=engine-%)
# Some machines tell Python to keep no bytecode; tests start hundreds of processes that would compile it all again.
unexport PYTHONDONTWRITEBYTECODE
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

HAS_BROWSER := for b in chromium chromium-browser google-chrome; do command -v $$b; done 2>/dev/null | grep -q .
HAS_APT := { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
CAN_BROWSE := { $(HAS_BROWSER) || $(HAS_APT); }

.DEFAULT_GOAL := help
.PHONY: help setup run test test-no-engine browser lint docs clean $(ENGINES)

help:
	@echo "make run     set up, then the main job: SGLang $(ENGINE) against the reference (ENGINE=0.5.13 make run,"
	@echo "             or FAMILY=trained make run)"
	@echo "make test    set up, then linter, types, import contract and the whole CPU test suite"
	@echo "make test-no-engine    the tests that start no SGLang engine"
	@echo "make setup   the control environment in $(VENV) only"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make docs    write the generated pages anew: docs/modules.md and the index of docs/findings"
	@echo "make clean   remove $(VENV) and caches; engine environments stay in the user's cache directory"

setup: $(BASE)

run: $(BASE)
	@$(VENV)/bin/eaglecheck run --engine $(ENGINE) $(addprefix --family ,$(FAMILY))

# What tests need comes side by side: each part waits for the network, then keeps one core busy.
test:
	@$(MAKE) -s --no-print-directory -j4 lint $(ENGINES) browser
	@EAGLECHECK_REQUIRE_ENGINES=1 EAGLECHECK_REQUIRE_BROWSER=$$($(CAN_BROWSE) && echo 1) $(VENV)/bin/pytest -n auto

test-no-engine: $(DEV)
	@$(VENV)/bin/pytest -n auto -m "not engine"

# The first brings what all releases share, the others follow side by side.
$(ENGINES): engine-%: $(BASE)
	@$(VENV)/bin/python -m harness.engines.envs $*
$(filter-out $(firstword $(ENGINES)),$(ENGINES)): | $(firstword $(ENGINES))

# The HTML page is looked at in a real browser. Where apt can bring one it must be there, elsewhere those tests say what
# they lack and are skipped.
browser:
	@$(HAS_BROWSER) || if $(HAS_APT); then \
	  echo "installing chromium with apt-get: tests look at the HTML page in it (~300 MB, once)"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } \
	    >/dev/null || echo "apt-get could not install chromium; install a chromium by hand" >&2; \
	else echo "no chromium here: tests that look at the HTML page are skipped; install it:  apt-get install chromium"; fi

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: $(BASE)
	@$(VENV)/bin/python -m harness.suite.modules
	@$(VENV)/bin/eaglecheck findings --markdown docs/findings/README.md

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
	@echo "adding the test tools to $(VENV): ruff, mypy, import-linter, syrupy, transformers, playwright (~300 MB, once)"
	@touch $(VENV)/.unfinished
	@$(PIP) $(TORCH) -e '.[dev]'
	@rm -f $(VENV)/.unfinished; touch $@
