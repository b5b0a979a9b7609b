# Everything that a newcomer, a developer or a CI machine does, one word each. Needs make and Python 3.11 or newer;
# all else goes into .venv, once, and again when setup.cfg or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
# with all that tests, types and the documentation need
INSTALLED := .venv/.installed
# the library, compiled for CPUs, and its reports: all that the demo needs
RUNNABLE := .venv/.runnable
TORCH := .venv/.torch
# what an editable installation copies
PACKAGE := setup.cfg pyproject.toml scripts/nmt-launch scripts/nmt-slurm
# Python compiles what is imported. pip would compile 15,000 files first, which takes most of a minute.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Without a GPU, torch's small build is enough. The package index has the one for CUDA, of some gigabytes.
SMALL_TORCH := --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 20
# every file of tests that has a longer form
SOAKED = $(shell grep -rlE 'mark.soak|support.rings' tests --include='test_*.py')

DOCS_TYPES := python_blocks_have_no_type_errors

# Hundreds of processes import the same files: what Python compiles is kept, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo check style types test tests docs soak gpu gpu-dry audit sbom bench bench-data bench-floors clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## the virtual environment .venv with this package, editable, and its tools

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is missing or older than 3.11; try make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv .venv \
		|| { echo "cannot make .venv; does this Python have its venv module (Debian: python3-venv)?" >&2; exit 2; }

$(TORCH): constraints.txt | $(BIN)/python
	@command -v nvidia-smi >/dev/null || $(PIP) $(SMALL_TORCH) --no-deps torch \
		|| echo "torch's build for CPUs cannot be installed (see above); the package index decides which one is" >&2
	@touch $@

$(INSTALLED): $(PACKAGE) constraints.txt $(TORCH)
	$(PIP) -e '.[dev]'
	@touch $@ $(RUNNABLE)

$(RUNNABLE): $(PACKAGE) constraints.txt $(TORCH)
	$(PIP) -e '.[cpu,report]'
	@touch $@

demo: $(RUNNABLE)  ## train on the embedded corpus, average, evaluate, translate: minutes on two cores
	$(BIN)/nmt-train --config demo.yaml out=runs/demo
	$(BIN)/nmt-average runs/demo --last 5
	$(BIN)/nmt-eval runs/demo/average
	$(BIN)/nmt-report runs/demo
	@cat scripts/demo.en >&2
	@$(BIN)/nmt-translate runs/demo/average < scripts/demo.en

check: style types  ## format, lint, types, architecture
	$(BIN)/pytest tests/test_architecture.py

style: $(INSTALLED)
	$(BIN)/ruff format --check nmt tests scripts examples
	$(BIN)/ruff check nmt tests scripts examples

types: $(INSTALLED)  # examples/ apart, because scripts/ has modules of the same names
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/pytest tests/docs/test_blocks.py -k $(DOCS_TYPES)  # mypy has just filled its cache

# The tests leave processor time idle, so types are checked alongside them.
test: style  ## format, lint, types and every test, three at a time
	$(MAKE) --no-print-directory --jobs 2 --keep-going types tests

tests: $(INSTALLED)
	$(BIN)/pytest -n 3 --dist worksteal -k 'not $(DOCS_TYPES)'  # many tests wait, for signals or other processes

docs: $(INSTALLED)  ## the documentation as a site: build/site/index.html; a broken link or anchor is an error
	$(BIN)/python scripts/make_docs.py
	$(BIN)/zensical build --clean --strict

soak: $(INSTALLED)  ## every test that has a longer form: 600 kills, each signal ten times, damage, a million hostile files; over an hour
	NMT_SOAK=1 $(BIN)/pytest -n 2 --dist worksteal -rP tests/soak $(SOAKED)

# Not part of check: it asks the package index, and check must not depend on a server.
audit: build/audit/.installed  ## ask the package index for known vulnerabilities of the versions in constraints.txt
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt \
		|| { echo "make audit: there is a vulnerability, or the index could not be asked about every package; see above" >&2; exit 1; }

sbom: $(INSTALLED) build/audit/.installed  ## list all that is installed, with licences, in build/sbom.json (CycloneDX)
	build/audit/bin/cyclonedx-py environment --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

build/audit/.installed:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

gpu: $(INSTALLED)  ## check what this machine's GPUs compute and time it: ten minutes, no data
	$(BIN)/python scripts/bench/first_gpu.py

# The oldest that setup.cfg allows, the one after it and the newest: each compiles otherwise
TORCHES = torch-2.11 torch-2.12 torch

gpu-dry: $(INSTALLED) $(TORCHES:%=build/%/.installed)  ## all that can be checked of the GPU path without a GPU; 20 minutes, 16 GB
	NMT_GPU_DRY=1 $(BIN)/pytest -n 2 -rP --timeout 600 tests/scripts/test_gpu_dry.py tests/scripts/test_first_gpu.py \
		tests/train/test_shares.py
	@# a fusion undone or a residual stream in fp32 makes no result wrong, only slow
	$(BIN)/python scripts/bench/count_kernels.py --config base.yaml big.yaml --ranks 1 8 --json build/kernels.json
	cmp build/kernels.json scripts/bench/kernels.json \
		|| { echo "if it is meant, copy the first over the second: the roofline is made of it" >&2; exit 1; }
	$(BIN)/python scripts/bench/first_gpu.py --dry
	$(BIN)/python scripts/bench/first_gpu.py --dry --only europarl-text europarl peers shared-gpu
	set -e; for name in $(TORCHES); do \
		NMT_GPU_DRY=1 PYTHONPATH=$(CURDIR) build/$$name/bin/python -m pytest -p no:cacheprovider tests/scripts/test_fake_cuda.py \
			tests/train/test_shares.py tests/train/test_fast_paths.py tests/train/test_update_gpu.py; \
	done
	$(BIN)/python scripts/bench/roofline.py

$(TORCHES:%=build/%/.installed): build/%/.installed:
	@echo "making build/$* with its CUDA build: some gigabytes" >&2
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --disable-pip-version-check $(subst -,==,$*) \
		numpy pyyaml tqdm safetensors sentencepiece sacrebleu sacremoses sentencex numba pytest pytest-timeout hypothesis
	@touch $@

bench-floors: $(INSTALLED)  ## has a speed been lost? ratios to yardsticks, six minutes on a quiet machine, no data
	$(BIN)/python scripts/bench/floors.py

bench: $(INSTALLED)  ## time training beside eole and others, decoding beside CTranslate2, on DATA=a folder like multi30k
	@test -n "$(DATA)" || { echo "make bench DATA=DIR: a folder with {train,valid,test}.{en,de}" >&2; exit 2; }
	$(MAKE) --no-print-directory build/peers/.installed
	$(BIN)/python scripts/bench/train.py --data-root $(DATA) --peer-python build/peers/bin/python
	$(BIN)/python scripts/bench/decoding.py --data $(DATA)

build/peers/.installed: scripts/bench/peers.txt constraints.txt
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps eole==0.6.4
	@touch $@

bench-data: $(INSTALLED)  ## time nmt-prepare on 4.5M pairs made from real text in folders of DATA: some minutes, 3 GB of disk
	@test -n "$(DATA)" || { echo "make bench-data DATA=DIR: see scripts/bench/data.py --help, --data" >&2; exit 2; }
	$(BIN)/python scripts/bench/data.py --data $(DATA)

clean:  ## remove what was built (.venv and caches); runs/ and data/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
