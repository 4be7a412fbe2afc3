# make quickstart | make test | make check | make bench: each makes .venv when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
# One thread per process: the tests' tensors are tiny, and `-n` runs several processes.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q

# Many real runs with planted faults, and simulations of large models: ten minutes of their own.
EXTENDED := $(addprefix tests/unit/,tools/align/test_faults.py tools/doctor/test_run.py core/test_memory.py \
	tools/test_traffic.py)

.PHONY: quickstart test test-extended test-npu-schema check bench install format docs clean

quickstart: .venv/.installed
	$(BIN)/covey quickstart

test: .venv/.installed
	$(TEST) -n 2 $(addprefix --ignore=,$(EXTENDED))

test-extended: .venv/.installed
	$(TEST) -n 2 $(EXTENDED)

# Every call of torch_npu against the real package, in an environment of its own.
test-npu-schema: .venv-npu/.installed
	OMP_NUM_THREADS=1 .venv-npu/bin/pytest -q tests/npu_schema

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(TEST) tests/structure

bench: .venv/.installed
	$(BIN)/python benchmarks/compare_trl.py

install: .venv/.installed

# constraints.txt names torch without a build; pip takes the CPU build where one is offered.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

.venv-npu/.installed: pyproject.toml constraints.txt
	test -x .venv-npu/bin/python || $(PYTHON) -m venv .venv-npu
	.venv-npu/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[npu]' torch-npu==2.13.0 pytest
	touch $@

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed
	$(BIN)/covey config reference --markdown > docs/config.md
	$(BIN)/python -m covey.metrics > docs/metrics.md

clean:
	rm -rf .venv .venv-npu build dist src/*.egg-info
