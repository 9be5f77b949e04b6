# `make demo` and `make test` each set up all they need in .venv; nothing else has to be installed but Python >= 3.10 and a
# C++ compiler. An installed torch >= 2.11 is used. The GPU targets take the ambient Python as it is.

PYTHON ?= python3
# What pip is asked for where no torch >= 2.11 is installed: releases that the tests have been run with.
TORCH ?= torch>=2.11,<2.14
VENV := .venv
RUN := $(VENV)/bin/python

SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
LIBRARY := torch_mqa_ops/_C_cpu.abi3.so

.PHONY: demo test test-gpu bench lint format build build-gpu wheel clean FORCE

demo: build $(VENV)/.demo
	@# Spinning OpenMP threads would slow a machine that does anything else down tenfold.
	PYTHONPATH=. OMP_WAIT_POLICY=passive $(RUN) examples/decode_loop.py

test: lint build $(VENV)/.test
	$(RUN) -m pytest -q

# The whole suite, GPU tests required, with the ambient Python and torch: no network, no lint.
test-gpu: build-gpu
	MQA_REQUIRE_CUDA=1 $(PYTHON) -m pytest -q

bench: build-gpu
	PYTHONPATH=. $(PYTHON) benchmarks/bench_paged_logits.py
	PYTHONPATH=. $(PYTHON) benchmarks/bench_selection.py

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(shell find csrc -type f)

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(shell find csrc -type f)

build: $(VENV)/.base
	$(MAKE) --no-print-directory $(LIBRARY) PYTHON=$(RUN)

build-gpu:
	$(MAKE) --no-print-directory $(LIBRARY) MQA_CUDA=1

# What an earlier build left in build/lib would be packed too.
wheel: $(VENV)/.test
	rm -rf build/lib*
	$(RUN) -m pip wheel --no-build-isolation --no-deps -w dist .

# One build makes both libraries; this one is always made. What was built with other switches is never up to date, nor,
# where CUDA is demanded, what was built without it. Libraries without a record were carried here: they pass as plain.
SWITCHES := MQA_CUDA=$(filter 0,$(MQA_CUDA)) architectures=$(or $(MQA_CUDA_ARCHS),$(TORCH_CUDA_ARCH_LIST))
RECORD := build/switches
BUILT := $(shell cat $(RECORD) 2>/dev/null || echo 'MQA_CUDA= architectures=$(TORCH_CUDA_ARCH_LIST)')
ifneq ($(SWITCHES),$(BUILT))
$(LIBRARY): FORCE
else ifeq ($(MQA_CUDA)$(wildcard torch_mqa_ops/_C_cuda.*),1)
$(LIBRARY): FORCE
endif

$(LIBRARY): $(SOURCES)
	$(PYTHON) setup.py --quiet build_ext --inplace
	@echo '$(SWITCHES)' > $(RECORD)
	@touch $@

$(VENV)/.base:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	@# To an environment made from a virtual environment's Python, "system" is what lies under that: show its packages too.
	$(PYTHON) -I -c 'import sys; print(*sys.path, sep="\n")' \
	  > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	$(RUN) -c 'import sys, re, torch; sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11))' \
	  2>/dev/null || $(RUN) -m pip install --quiet '$(TORCH)'
	$(RUN) -m pip install --quiet 'setuptools>=77' ninja numpy
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(RUN) -m pip install --quiet matplotlib
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(RUN) -m pip install --quiet pytest expecttest matplotlib wheel
	@touch $@

# pyproject.toml pins the versions. What another environment already has of them would not be put into this one's bin.
$(VENV)/.lint: $(VENV)/.base pyproject.toml
	$(RUN) -c 'import re; print("\n".join(re.findall(r"\"((?:ruff|clang-format)==[^\"]+)\"", open("pyproject.toml").read())))' \
	  | xargs $(RUN) -m pip install --quiet --force-reinstall
	@touch $@

clean:
	rm -rf build dist torch_mqa_ops/*.so *.egg-info
