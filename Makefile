# SPDX-License-Identifier: Apache-2.0
# Every verb sets up what it needs (tools/bootstrap.sh) and builds what it runs.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

JOBS ?= $(shell nproc 2>/dev/null || echo 2)
RUN_DIR ?= runs/latest
TRAIN_FLAGS ?= --steps 1200
# The text of `make run`: what this repository says about itself.
TEXT ?= $(wildcard docs README.md include src lm cli tests)

# nvcc on the path or where the toolkit puts it; a GPU where the driver made its device file.
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
GPU := $(firstword $(wildcard /dev/nvidia[0-9]*))
# Formatted and checked sources.
SOURCES = $(wildcard $(shell git ls-files '*.cpp' '*.hpp' '*.c' '*.h' '*.cu' '*.cuh'))

.PHONY: help
help:
	@echo 'make run     train a small MoE language model on this repository'"'"'s text (one to two minutes)'
	@echo 'make test    build and run tests of every kind that this machine can run'
	@echo 'make test-deep'
	@echo '             build and run what only adds depth: all mutants, long fuzzing, real frameworks'
	@echo 'make build   the CPU library and everything around it, in build/'
	@echo 'make cuda    the CUDA kernels and their tests, in build-cuda/ (needs nvcc 13)'
	@echo 'make bench   time the CPU layer against its bound'
	@echo 'make lint    formatting, layers, links, sources, commits, results, tables'
	@echo 'make wheel   the Python package as a wheel, in dist/'
	@echo 'make fmt     format all sources'
	@echo 'make docs    check the documents: links, paths, snippets'

.PHONY: bootstrap
bootstrap:
	@tools/bootstrap.sh

# Configures once; from then on Ninja sees for itself when CMake has to run again.
build/build.ninja: | bootstrap
	cmake --preset cpu
build-cuda/build.ninja: | bootstrap
	cmake --preset cuda

.PHONY: build
build: build/build.ninja
	cmake --build build --parallel $(JOBS)

.PHONY: cli
cli: build/build.ninja
	cmake --build build --parallel $(JOBS) --target bin/tessera

.PHONY: run
run: cli
	build/bin/tessera train --text $(TEXT) --out $(RUN_DIR) $(TRAIN_FLAGS)

# CUDA tests need both the compiler and a GPU; where they cannot run they are counted as skipped.
ifeq ($(NVCC),)
  CUDA_TESTS := --skipped 'tests/cuda=no nvcc here; install the CUDA toolkit 13, on a machine with a Hopper GPU'
else ifeq ($(GPU),)
  CUDA_TESTS := --skipped 'tests/cuda=no GPU here; run on a machine with a Hopper GPU'
else
  CUDA_TESTS := build-cuda:cuda build-cuda:cuda_host
  CUDA_BUILD := cuda
endif

# Python's packages come while the compiler works.
.PHONY: test
test: bootstrap
	@tools/beside.sh 'tools/bootstrap.sh python' '$(MAKE) build $(CUDA_BUILD)'
	@tools/run_tests.py build $(CUDA_TESTS) --jobs $(JOBS) --ctest=--label-exclude --ctest='^deep$$'

.PHONY: build_deep
build_deep: build/build.ninja
	cmake --build build --parallel $(JOBS) --target deep_tests

# Label `deep`; what a suite needs beyond .venv it sets up itself.
.PHONY: test-deep
test-deep: bootstrap
	@tools/beside.sh 'tools/bootstrap.sh python' '$(MAKE) build build_deep'
	@tools/run_tests.py build:deep --jobs $(JOBS)

.PHONY: cuda
cuda: build-cuda/build.ninja
	cmake --build build-cuda --parallel $(JOBS) --target tessera_cuda_all

.PHONY: bench
bench: cli
	build/bin/tessera bench --config cpu-small,cpu-mid

.PHONY: lint
lint:
	@tools/bootstrap.sh lint
	@.venv/bin/clang-format --dry-run --Werror $(SOURCES)
	@.venv/bin/ruff check --quiet --no-cache
	@tools/check_layers.py
	@tools/check_links.py
	@tools/check_source.py
	@tools/check_commits.py
	@tools/check_results.py
	@tools/performance_tables.py --check

# A wheel for any Python from 3.10 on, named after the oldest systems that its symbols allow.
.PHONY: wheel
wheel:
	@tools/bootstrap.sh wheel
	rm -rf build-python/dist
	.venv/bin/python -m pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir build-python/dist
	PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/auditwheel repair --wheel-dir dist build-python/dist/*.whl
	@if readelf --sections build-python/lib/libtessera.so | grep -q nv_fatbin; \
	  then echo 'wheel: for the CPU and Hopper GPUs'; \
	  else echo 'wheel: for the CPU alone; nvcc 13 was not found'; fi

# Links and paths of the documents, and their snippets, compiled and run.
.PHONY: docs
docs: build
	@tools/check_links.py
	@tools/run_tests.py build --jobs $(JOBS) --ctest=--tests-regex --ctest='^docs'

.PHONY: fmt
fmt:
	@tools/bootstrap.sh lint
	@.venv/bin/clang-format -i $(SOURCES)
