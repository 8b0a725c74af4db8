# `make demo` and `make test` do all set-up on a fresh machine: Python 3.11 or newer is all they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
DEMO_LLM ?= demo-llm
EXTRAS := cpu,peft,gguf,evaluate,ray,docs,dev
CHECKED := engine indexer service tests examples benchmarks docs
# One thread per process: tests run in two processes, and small matrices gain nothing from more.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo demo-llm serve test test-slow lint types format docs docker-check clean

$(VENV)/installed: pyproject.toml constraints.txt examples/demo/packages.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --no-deps --requirement examples/demo/packages.txt
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo/run.py $(DEMO)

demo-llm: $(VENV)/installed
	$(BIN)/python examples/demo/run_llm.py $(DEMO_LLM)

serve: $(VENV)/installed
	@test -e $(DEMO)/store/CURRENT || { echo "no store in $(DEMO)/store: run 'make demo' first"; exit 2; }
	$(BIN)/eogp serve $(DEMO)/store --model $(DEMO)/model

test: $(VENV)/installed
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile

test-slow: $(VENV)/installed
	$(TEST_ENV) $(BIN)/pytest -m slow --timeout 3600

lint: $(VENV)/installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: $(VENV)/installed
	$(BIN)/mypy

docs: $(VENV)/installed
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docker-check: $(VENV)/installed
	BIN=$(BIN) docker/check.sh

format: $(VENV)/installed
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:
	rm -rf $(DEMO) $(DEMO_LLM) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
