# Every target sets up what it needs: `make run` is enough on a machine with only Python 3.10 or newer.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# With a GPU, torch must fit its driver: pip chooses. Without one, the tested versions.
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)

MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.PHONY: help setup run demo bench docs test browser screenshots test-slow test-gpu support lint types format clean

help:
	@echo "make run       a small trained pipeline, eager and accelerated, side by side"
	@echo "make demo      the same in a browser: your prompt, your model (ARGS='--model ID --capture-shapes 512x512')"
	@echo "make docs      the documentation, into out/docs; a warning is an error"
	@echo "make test      lint, types and tests, as CI does"
	@echo "make test-slow the rest of them: quantised weights, variants of pipelines, the compiler itself, benchmarks, soak, several ranks, replicas under load"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make support   try every denoiser of diffusers; writes SUPPORT.md"
	@echo "make bench     one denoiser call a family and shape: eager, breakable, full"
	@echo "make lint | types | format | clean"

setup: $(READY)

$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "diffgraph needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, diffusers and the rest: about two minutes"
	@# Python compiles what is imported when it is; all of it would take a minute more.
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(CONSTRAINTS) -e ".[dev]"
	@touch $@

run: $(READY)
	$(PY) -m demo.run $(ARGS)

demo: $(READY)
	$(PY) -m demo $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.denoiser $(ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir out/docs

# One torch thread a worker: two workers with a pool each would fight for the two cores. Files in their own order: by their number of
# tests, those of few long ones (the demo's page) would come last, on one worker alone.
# Without Chromium, the tests of the demo's page fail in CI; elsewhere they are left out, and it is said.
test:
	@$(MAKE) -j3 lint types browser
	@marks="not gpu and not slow"; $(CHROMIUM) || [ -n "$$CI" ] || { marks="not gpu and not slow and not browser"; \
		echo "NOT RUN: tests/test_demo_browser.py, which needs chromium and chromium-driver"; }; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$$marks" $(ARGS)

CHROMIUM := command -v chromium >/dev/null && command -v chromedriver >/dev/null

# Installed where it is missing and may be: with Debian's packages, and as root.
browser:
	@$(CHROMIUM) || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || { \
		echo "installing chromium, in which the demo's page is tested"; apt-get update -qq >/dev/null; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-liberation \
		>/dev/null || true; }

screenshots: $(READY) browser
	PYTHONPATH=.:tests $(PY) tests/screenshots.py

# Quantised weights, variants of pipelines, the compiler itself, benchmarks, soak, several ranks, replicas under load: more CPU than ten minutes of CI have room for.
test-slow: $(READY) browser
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "slow and not gpu" $(ARGS)

test-gpu: $(READY)
	$(PY) -m pytest -q -m gpu $(ARGS)

support: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m support $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m pyright

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
