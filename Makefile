# labkit: the two commands are `make lab` and `make test`. Works with GNU make 3.81 and newer, without root.
#
#   PYTHON=python3.12   which Python makes .venv (3.10 to 3.13)
#   PIP_FLAGS="..."     what to add to every pip install, for example the line that pytorch.org gives for a CPU-only torch
#   ARGS="..."          what to add to the command itself: make lab ARGS=--no-browser, make unit ARGS="-k bpe"
#   JOBS=2              test processes side by side;  TESTS=tests/tokenizer  only these unit tests

.DEFAULT_GOAL := help
.PHONY: help lab demo test unit notebooks browser lint format types bench prepare doctor badges offline-bundle clean

VENV ?= .venv
JOBS ?= 2
TESTS ?= tests
ARGS ?=
PIP_FLAGS ?=
ifeq ($(OS),Windows_NT)
  PYTHON ?= python
  PY := $(VENV)/Scripts/python.exe
else
  PYTHON ?= python3
  PY := $(VENV)/bin/python
endif

# What is installed is named by what it was installed from and where: when any of it changes, the stamp's name does,
# and the set-up runs again. A folder that was moved counts as changed (an editable install holds its path).
KEY := $(shell (pwd; cat pyproject.toml constraints.txt) | cksum | cut -d' ' -f1)
LAB := $(VENV)/.labkit-lab-$(KEY)
DEV := $(VENV)/.labkit-dev-$(KEY)

PIP_INSTALL := $(PY) -m pip install $(if $(CI),--quiet) --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
SKIPPED := $(VENV)/labkit-skipped.txt
PYTEST := LABKIT_SKIPPED=$(SKIPPED) $(PY) -m pytest -p tests.deadline
# One thread a process where JOBS processes share the machine: two on two cores beat four.
SHARED := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1

help:  ## what can be done here
	@echo "make lab      set up what is missing, then open the first notebook in JupyterLab"
	@echo "make demo     a page of demos without code: switchboard, race, batching, diagnose, roofline (Voila)"
	@echo "make test     set up what is missing, then run every test: unit, notebooks, browser"
	@echo "              (or one part of it: make unit, make notebooks, make browser)"
	@echo "make lint     ruff, pyright, and that notebooks are stripped;  make format  mends what can be mended"
	@echo "make bench    every figure that the README and the lessons state, measured on this machine"
	@echo "make badges   Colab and Binder links to your copy: make badges REPO=owner/name"
	@echo "make offline-bundle  wheels, model and notebooks in dist/labkit-offline, for a class without a network"
	@echo "make doctor   what works on this machine, what does not, and what to do about it"
	@echo "make clean    remove .venv and build products (the fetched model stays in your cache folder)"

lab: $(LAB) prepare  ## JupyterLab on the first notebook
	@$(PY) -m labkit.cli lab $(ARGS)

demo: $(LAB) prepare  ## the demos under Voila
	@$(PY) -m labkit.cli demo $(ARGS)

prepare: $(LAB)
	@$(PY) -m labkit.cli prepare

doctor: $(LAB)
	@$(PY) -m labkit.cli doctor $(ARGS)

# Every part runs even when one before it failed, so one run shows all that is wrong.
test: $(DEV)
	@$(PY) -m labkit.cli prepare
	@status=0; rm -f $(SKIPPED); \
	for part in unit notebooks browser; do $(MAKE) --no-print-directory $$part || status=1; done; \
	if [ $$status -eq 0 ]; then echo "All tests passed."; else echo "Something failed: see the summaries above."; fi; \
	if [ -s $(SKIPPED) ]; then echo "Skipped:"; sort -u $(SKIPPED); fi; \
	exit $$status

unit: $(DEV)
	@echo "== Unit tests ($(JOBS) processes)"
	@$(SHARED) $(PYTEST) $(TESTS) -m "not browser" -n $(JOBS) --dist loadscope $(ARGS)

notebooks: $(DEV)
	@echo "== Notebooks, each from a fresh kernel ($(JOBS) processes)"
	@$(SHARED) $(PYTEST) -p tests.notebook_memory --nbval-lax --nbval-current-env --nbval-cell-timeout 120 -n $(JOBS) --dist loadscope notebooks/ $(ARGS)

# axe-core looks for what keeps people out; the browser tests load it from disk, and check its sum.
AXE := tests/browser/node_modules/axe-core/axe.min.js
$(AXE): tests/browser/package.json
	@npm install --prefix tests/browser --no-package-lock --ignore-scripts --no-audit --no-fund --silent && touch $@ \
	  || echo "axe-core was not fetched (is npm there?): its tests are skipped"

browser: $(DEV) $(if $(wildcard tests/browser/package.json),$(AXE))
	@echo "== JupyterLab and Voila in a headless browser"
	@$(PYTEST) tests/browser -m browser $(ARGS)

lint: $(DEV)
	@echo "== ruff, nbstripout, pyright"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@find notebooks -name '*.ipynb' -not -path '*/.*' -exec $(PY) -m nbstripout --verify {} +
	@$(PY) -m pyright

types: $(DEV)
	@$(PY) -m pyright

format: $(DEV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@find notebooks -name '*.ipynb' -not -path '*/.*' -exec $(PY) -m nbstripout {} +

bench: $(DEV)
	@$(PY) -m labkit.cli prepare
	@status=0; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(PY) $$script $(ARGS) || status=1; done; exit $$status

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "labkit needs Python 3.10 to 3.13; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v[:2])' \
	  || { echo "No usable Python as '$(PYTHON)'. Install Python 3.10 to 3.13, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 14) or print("Note: labkit is tested on Python 3.10 to 3.13; this one is newer.")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python's venv module is missing or broken. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(LAB): | $(PY)
	@echo "Installing labkit and JupyterLab into $(VENV) (the first time takes minutes: torch is large)"
	@$(PIP_INSTALL) -e ".[jupyter]"
	@rm -f $(VENV)/.labkit-*; touch $@

$(DEV): | $(PY)
	@echo "Installing labkit with its test and development tools into $(VENV) (the first time takes minutes: torch is large)"
	@$(PIP_INSTALL) -e ".[dev]"
	@rm -f $(VENV)/.labkit-*; touch $@ $(LAB)

badges:
	@$(PYTHON) .ci/badges.py "$(REPO)"

# PIP_FLAGS chooses torch's build here too.
offline-bundle: $(LAB)
	@$(PY) .ci/offline_bundle.py -q --disable-pip-version-check $(PIP_FLAGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
