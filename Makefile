# Every target sets up .venv first, once; `make fit` and `make test` are all a newcomer needs.
PYTHON ?= python3
EXTRA ?= cpu
BIN := .venv/bin
READY := .venv/.ready-$(EXTRA)

.PHONY: setup fit test lint types bench clean

setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRA),dev]'
	$(BIN)/python docker/drop_broken_media.py
	touch $(READY)

fit: setup
	$(BIN)/molt fit --config configs/moe_grpo.yaml

test: lint types
	$(BIN)/python -m pytest tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyrefly check

bench: setup
	for name in producer overlap soak weight_sync versus; do $(BIN)/python -m tests.bench.$$name || exit 1; done

clean:
	rm -rf .venv runs
