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

.DEFAULT_GOAL := help
.PHONY: help demo test lint types docs clean

help:
	@echo "make demo    caption the pictures and clips in examples/images; writes $(DEMO)/captions.html"
	@echo "make test    run the tests (CPU, offline)"
	@echo "make lint    ruff: check and format"
	@echo "make types   mypy"
	@echo "make docs    build the guide into site/"
	@echo "make clean   remove .venv and what was written"

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

# Threads that wait do not spin: those of one process would take the cores of another.
test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal \
		$(PYTEST_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the renamed folders of an editable install; it can follow links, which
# pyproject.toml names as mypy_path.
types: $(STAMP)
	@mkdir -p .mypy_cache/paths
	@ln -sfn ../../plugins .mypy_cache/paths/mmdeploy_llm_plugins
	@ln -sfn ../../processors .mypy_cache/paths/mmdeploy_llm_processors
	$(BIN)/mypy

# The guide as a website in site/. Its tools are installed on first use.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html in a browser; its search needs a server: python3 -m http.server -d site -b 127.0.0.1"

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[docs]"
	@touch $@

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
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --upgrade pip "setuptools>=77"
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable ".[dev]"
	@touch $@
