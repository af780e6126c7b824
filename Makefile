# Every path here is relative, so the checkout may live in a folder with spaces in its name.

PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
BENCH_INSTALLED := .venv/.bench-installed
PEERS_PYTHON := .venv-peers/bin/python
PEERS_INSTALLED := .venv-peers/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-slurm lint format docs docs-serve peers speed bench bench-table bench-smoke clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED)  ## create .venv and install the package and its tools into it

demo: $(INSTALLED)  ## from a model and data to a report in demo/, and the same posterior by MCMC (minutes)
	rm -rf demo
	.venv/bin/cpejax infer examples/hierarchical.py --given examples/hierarchical.json --out demo --steps 10000 --check-simulations 300
	$(PYTHON) benchmarks/examples.py picture demo

test: $(INSTALLED)  ## run the tests
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)  ## run the tests that take longer
	$(PYTHON) -m pytest -m slow

test-slurm: $(INSTALLED)  ## run the tests that need a Slurm; SLURM_UP and SLURM_DOWN name commands that start and end one
	@if ! sinfo -h >/dev/null 2>&1; then \
	  if [ -z "$(SLURM_UP)" ]; then echo "make: no Slurm answers; SLURM_UP=command names what starts one" >&2; exit 1; fi; \
	  $(SLURM_UP); \
	fi; \
	$(PYTHON) -m pytest -m slurm; status=$$?; \
	if [ -n "$(SLURM_DOWN)" ]; then $(SLURM_DOWN); fi; \
	exit $$status

lint: $(INSTALLED)  ## check formatting, style and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

format: $(INSTALLED)  ## format the code and fix what can be fixed
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

docs: $(DOCS_INSTALLED)  ## build the documentation into site/ (tutorials that have changed are run: minutes each)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --clean

docs-serve: $(DOCS_INSTALLED)  ## show the documentation in a browser while you write it
	NO_MKDOCS_2_WARNING=1 CPEJAX_DOCS_RUN=no $(PYTHON) -m mkdocs serve

peers: $(PEERS_INSTALLED)  ## create .venv-peers, with what the benchmarks compare with

speed: $(INSTALLED) $(PEERS_INSTALLED)  ## measure the speed beside a peer (idle machine, minutes)
	$(PYTHON) benchmarks/speed.py

bench: $(BENCH_INSTALLED)  ## all tasks and methods, 10,000 and 100,000 simulations, into bench/ (many hours; resumes)
	.venv/bin/cpejax data sbibm
	.venv/bin/cpejax bench --tasks paper,sbibm --methods all --budgets 10000 --seeds 0,1,2,3,4 --out bench --known benchmarks/results/bench.csv
	.venv/bin/cpejax bench --tasks paper,sbibm --methods all --budgets 100000 --seeds 0 --out bench --known benchmarks/results/bench.csv

bench-table: $(INSTALLED)  ## put what is done in bench/ into the committed table, the documentation and the README
	$(PYTHON) benchmarks/bench.py bench

bench-smoke: $(BENCH_INSTALLED)  ## the benchmark's whole workflow on two tasks, with little of everything (minutes)
	rm -rf bench-smoke
	.venv/bin/cpejax bench --tasks gaussian_mixture_1,two_moons --methods CPE-no-emulation,TriangularCPE-reverse \
	  --budgets 300 --seeds 0 --draws 200 --epochs 2 --out bench-smoke

clean:  ## remove .venv and everything generated
	rm -rf .venv .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache build dist site demo bench-smoke
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An install is bound to the folder it was made in (scripts and the editable package hold its path), so the stamp holds
# that folder's name, and a checkout that was moved or copied gets a new one.
BOUND_HERE := [ "$$(cat $(INSTALLED) 2>/dev/null)" = "$$(pwd -P)" ] && $(PYTHON) -c '' 2>/dev/null
ifneq ($(shell $(BOUND_HERE) || echo stale),)
.PHONY: $(INSTALLED)
endif

# The stamp goes first and is written last: an install that fails is never taken for one that succeeded.
# Bytecode is compiled here because with PYTHONDONTWRITEBYTECODE set every later import would parse its sources again.
$(INSTALLED): pyproject.toml
	@set -e; \
	$(BOUND_HERE) && reuse=yes || reuse=no; \
	rm -f $(INSTALLED); \
	if [ $$reuse = no ]; then \
	  found=; \
	  for candidate in python3 python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "make: Python 3.11 or newer is needed: none of python3, python3.13, python3.12, python3.11 on PATH is" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating .venv with $$("$$found" --version)"; \
	  rm -rf .venv; \
	  if command -v uv >/dev/null; then uv venv --quiet --seed --python "$$("$$found" -c 'import sys; print(sys.executable)')" .venv; \
	  else "$$found" -m venv .venv; fi; \
	fi; \
	echo "Installing cpejax and its tools (a few minutes the first time)"; \
	if command -v uv >/dev/null; then uv pip install --quiet --compile-bytecode --python $(PYTHON) -e '.[dev]'; \
	else $(PYTHON) -m pip install --quiet --compile --disable-pip-version-check -e '.[dev]'; fi; \
	pwd -P >$(INSTALLED)

# What builds the documentation, and what runs the benchmark, come into .venv when they are first asked for.
$(DOCS_INSTALLED) $(BENCH_INSTALLED): .venv/.%-installed: $(INSTALLED)
	@set -e; rm -f $@; \
	if command -v uv >/dev/null; then uv pip install --quiet --compile-bytecode --python $(PYTHON) -e '.[dev,$*]'; \
	else $(PYTHON) -m pip install --quiet --compile --disable-pip-version-check -e '.[dev,$*]'; fi; \
	touch $@

# The peers' environment, with the Python of .venv. It has no cpejax, so that neither's dependencies bind the other's.
PEERS_BOUND_HERE := [ "$$(cat $(PEERS_INSTALLED) 2>/dev/null)" = "$$(pwd -P)" ] && $(PEERS_PYTHON) -c '' 2>/dev/null
ifneq ($(shell $(PEERS_BOUND_HERE) || echo stale),)
.PHONY: $(PEERS_INSTALLED)
endif

$(PEERS_INSTALLED): benchmarks/peers/requirements.txt | $(INSTALLED)
	@set -e; \
	$(PEERS_BOUND_HERE) && reuse=yes || reuse=no; \
	rm -f $(PEERS_INSTALLED); \
	if [ $$reuse = no ]; then \
	  rm -rf .venv-peers; \
	  if command -v uv >/dev/null; then uv venv --quiet --seed --python "$$($(PYTHON) -c 'import sys; print(sys._base_executable)')" .venv-peers; \
	  else $(PYTHON) -m venv .venv-peers; fi; \
	fi; \
	echo "Installing the peers (a few minutes the first time)"; \
	for package in torch sbi; do \
	  $(PEERS_PYTHON) -m pip install --quiet --compile --disable-pip-version-check -c benchmarks/peers/requirements.txt $$package; \
	done; \
	pwd -P >$(PEERS_INSTALLED)
