# make demo: the main job on the embedded models. make test: the test suite, make quick: most of it, make proof: what is
# too long for every change. They install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What Python compiles is kept: each worker, and each command that a test runs, would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick proof test-oldest lint format docs bench gpu browser compile-gpu

demo: $(VENV)/installed
	@rm -rf build/demo && mkdir -p build/demo
	$(BIN)/draftkit convert zoo:eagle build/demo/eagle
	$(BIN)/draftkit eval --target zoo:target --draft build/demo/eagle --limit 40 --concurrency 4 --max-new-tokens 96

# Where Triton interprets its kernels: a process has one way to run them. tests/test_house.py keeps the list whole.
INTERPRETED := tests/runtime/test_expand_rows.py tests/runtime/test_fusion.py tests/runtime/test_rounds.py \
	tests/runtime/test_sampling_kernels.py tests/runtime/test_slot_attention.py tests/train/test_row_loss.py
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal

# Everything but the long proofs: at most 8 minutes on two quiet cores. Each worker has a run of neighbors, so that what
# the tests of a file share is made once.
test: $(VENV)/installed-dev browser
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED)

# For the loop of work: at most 3 minutes.
quick: $(VENV)/installed-dev
	DRAFTKIT_EXAMPLES=quick $(PYTEST) -m "not slow and not long"

# What is too long for every change; once before a release, and after a change of structure.
proof: $(VENV)/installed-dev
	$(PYTEST) -m long
	TRITON_INTERPRET=1 $(PYTEST) -m long $(INTERPRETED)

# The oldest releases that pyproject.toml promises, in an environment of their own: what differs between releases of
# transformers, torch and typer. OLDEST_TESTS="not long" takes what is slow too.
OLDEST := .venv-oldest
OLDEST_TESTS := not slow and not long
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest --numprocesses=auto --dist=worksteal -m "$(OLDEST_TESTS)" -p no:cacheprovider \
		tests/test_oldest.py tests/cli/test_help.py tests/evaluate/test_evaluate.py tests/runtime tests/targets tests/train

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable . \
		compressed-tensors datasets gguf hypothesis jsonschema numpy pillow pytest pytest-xdist
	@touch $@

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

# On a machine with a GPU: the tests that need one, and rounds beside the roofline.
gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m scripts.bench.gpu

# Every Triton kernel for four kinds of GPUs, with two versions of Triton, into benchmarks/data/kernels.md. It needs no GPU.
compile-gpu: $(VENV)/installed-dev
	$(BIN)/python -m scripts.gpu.compile

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@
