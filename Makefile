PYTHON ?= python3
RUN = .venv/bin/python -m

.PHONY: setup check quick test bench

setup:  ## virtual environment with everything that development needs
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -e '.[dev]'

check:  ## style, types, import contract
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	.venv/bin/lint-imports --no-cache

quick:  ## the parts one by one and the rules by enumeration: a minute
	$(RUN) pytest tests/unit tests/exact

test:  ## the whole suite
	$(RUN) pytest

bench:  ## both drafters of the bundled pair against plain decoding and transformers
	.venv/bin/forerun bench --peers transformers
