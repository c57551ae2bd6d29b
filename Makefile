PYTHON ?= python3
RUN = .venv/bin/python -m
FORM = neon_i8mm
PLATFORMS = manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_11_0_arm64 win_amd64
SANITIZED = tests/unit/kernels/test_kernel_arguments.py tests/unit/kernels/test_decoder_arguments.py tests/unit/models/test_recurrent.py tests/unit/models/test_linear.py tests/unit/models/test_blocks.py \
	tests/unit/models/test_gguf_model.py tests/unit/attention/test_attention.py \
	tests/unit/sampling/test_sampling_draw.py tests/unit/sampling/test_sampling_warp.py tests/unit/speculate/test_drafted_chains.py \
	tests/unit/speculate/test_compare.py tests/unit/speculate/test_chain_lookup.py tests/unit/models/test_gguf_types.py tests/unit/kernels/test_matrix_unit.py tests/unit/kernels/test_prefetch.py \
	tests/unit/kernels/test_kernel_threads.py tests/exact/test_distribution.py tests/conformance/test_forward.py tests/conformance/test_rounds.py

.PHONY: help setup check quick test size sanitize sanitize_threads emulated wheels bench docs

help:  ## this list
	@awk -F ':.*## ' '/^[a-z_]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' Makefile

setup:  ## virtual environment with everything that development needs
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -e '.[dev]' -e './lab[dev]'

check:  ## style, types, import contract
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	.venv/bin/lint-imports --no-cache

quick:  ## the parts one by one and the rules by enumeration, without what trains or starts programs: a minute
	$(RUN) pytest tests/unit tests/exact lab/tests -m "not slow"

test:  ## the whole suite
	$(RUN) pytest

size:  ## lines of Python by folder; fails above the budgets in pyproject.toml
	$(PYTHON) tests/size.py

sanitize:  ## tests that call the kernels, with the kernels built for AddressSanitizer and UndefinedBehaviorSanitizer
	FORERUN_SANITIZE=1 PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:log_path=/dev/stderr \
	LD_PRELOAD=$$(g++ -print-file-name=libasan.so) $(RUN) pytest -p no:cacheprovider -n 0 --timeout 0 -s $(SANITIZED)

sanitize_threads:  ## the kernels' threads under ThreadSanitizer: 10,000 starts and stops, forks, callers at once
	mkdir -p build
	g++ -std=c++17 -O1 -g -fsanitize=thread -pthread tests/helpers/threads.cpp src/forerun/kernels/threads.cpp -o build/threads
	TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 build/threads 10000

emulated:  ## tests that call the kernels, with those for ARM, which qemu runs on the tests' own memory; it cannot call Python; FORM=neon_dotprod for others
	FORERUN_EMULATED=$(FORM) PYTHONPATH=tests/helpers $(RUN) pytest -p emulated -p no:cacheprovider -n 0 --timeout 0 $(SANITIZED) \
	-k "not without_our_kernels and not a_switch_is_0_or_1 and not structs_that_differ and not a_model_without_ends"

wheels:  ## dist/: a wheel for each platform, with the kernels that ziglang compiles for it; what is in build/kernels stays
	for platform in $(PLATFORMS); do \
		PYTHONPATH=src $(firstword $(RUN)) .ci/prebuild.py $$platform build/kernels/$$platform && \
		FORERUN_WHEEL_PLATFORM=$$platform $(RUN) build --wheel --outdir dist . || exit 1; \
	done
	PYTHONPATH=src $(firstword $(RUN)) .ci/wheels.py $(foreach p,$(PLATFORMS),dist/forerun-*-$(p).whl)

bench:  ## both drafters of the bundled pair against plain decoding and transformers
	.venv/bin/forerun bench --peers transformers

docs:  ## the documentation's site, in docs/_build; every warning is an error
	$(RUN) sphinx -W --keep-going -b html docs docs/_build
