# make demo: the main job on the embedded models. make test: the test suite. Both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format docs bench browser compile-gpu

demo: $(VENV)/installed
	@rm -rf build/demo && mkdir -p build/demo
	$(BIN)/draftkit convert zoo:eagle build/demo/eagle
	$(BIN)/draftkit eval --target zoo:target --draft build/demo/eagle --concurrency 4 --max-new-tokens 96

# The second step runs the Triton kernels, in Triton's interpreter: a process has one way to run them.
test: $(VENV)/installed-dev browser
	$(BIN)/python -m pytest --numprocesses=auto
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses=auto

# The report's tests look for a browser, and skip where there is none.
browser:
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || echo "no browser: tests/report/test_report_browser.py will skip"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site in docs/_build; a link that leads nowhere is an error.
docs: $(VENV)/installed-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder dirhtml docs docs/_build

bench: $(VENV)/installed-dev
	$(BIN)/python -m scripts.bench.runtime

# Every Triton kernel for four kinds of GPUs, with two versions of Triton, into benchmarks/kernels.md. It needs no GPU.
compile-gpu: $(VENV)/installed-dev
	$(BIN)/python -m scripts.gpu.compile

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@
