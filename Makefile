# One command per job. `make setup` makes .venv; every other target makes it first if it is missing or out of date.
PYTHON ?= python3
# Tests compare with torch on the CPU. An exact version lets pip take a CPU build where its index has one.
TORCH ?= torch==2.13.0
# Processes that tests run in, side by side; a file's tests stay together. 0: pytest's own. Each has models in memory.
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO := skyrl/tinker/wire/proto

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-rl test test-all test-slow test-vllm test-next matrix cookbook agents mutations accelerator check bench proto clean

help:
	@echo "setup      install into $(VENV)"
	@echo "demo       train two adapters through the Tinker SDK against a local server"
	@echo "demo-rl    teach a small model to add: examples first, then GRPO; minutes on two cores"
	@echo "test       the tests that show each fact once, in three processes (JOBS=0: in one); about 15 minutes on two cores"
	@echo "test-all   all tests that are not marked slow, with random inputs; about 40 minutes"
	@echo "test-slow  the tests marked slow: kills of a server, long random histories, each way of training; an hour and more"
	@echo "test-vllm  the cases of sampling engines against vLLM on the CPU, in build/vllm (3.5 GB, once), or in VLLM_PYTHON"
	@echo "test-next  contract, parity and SDK tests on Python 3.12 with the newest packages, in .sdk; status 77: it cannot here"
	@echo "matrix     every SDK from 0.7.0 to 0.38.0, or those of SDK=\"0.7.0 0.38.0\", against one server, in .sdk"
	@echo "cookbook   recipes of tinker-cookbook against a server, offline"
	@echo "agents     clients and agents of OpenAI's and Anthropic's APIs, all or those of ONLY=\"openai-3.57.0\", against a server, in .sdk"
	@echo "mutations  reintroduce known defects, all or those of ONLY=\"padded-mean uncut-mask\"; each must fail a test"
	@echo "accelerator  all that benchmarks/accelerator.py measures on a GPU or TPU, or ONLY=\"train decode\", small, here"
	@echo "check      format, lint, types, layers"
	@echo "bench      all benchmarks, JSON lines on standard output"
	@echo "proto      compile the protobuf schema"
	@echo "clean      remove caches and $(VENV)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || if command -v uv >/dev/null; then uv venv --quiet --seed $(VENV); else $(PYTHON) -m venv $(VENV); fi
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/skyrl demo

demo-rl: $(STAMP)
	rm -rf build/demo-rl
	$(BIN)/skyrl demo-rl --output build/demo-rl

# A process that crashes ends the run: xdist may wait forever for the one that takes its place.
SUITE := $(BIN)/python -m tests.run -n $(JOBS) --dist loadfile --max-worker-restart=0 --durations=20

test: $(STAMP)
	$(SUITE) -m "not slow and not full"

test-all: $(STAMP)
	$(SUITE) -m "not slow" --hypothesis-profile=random

test-next: $(STAMP)
	$(BIN)/python -m tests.compat.newest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-vllm: $(STAMP)
	$(BIN)/python -m tests.backends.engines.vllm_server $(if $(VLLM_PYTHON),--python $(VLLM_PYTHON))

matrix: $(STAMP)
	$(BIN)/python -m tests.compat.run --torch "$(TORCH)" $(if $(SDK),--sdk $(SDK) --out build/matrix-part.json) $(if $(BACKEND),--backend $(BACKEND))

cookbook: $(STAMP)
	$(BIN)/python -m tests.cookbook.run --torch "$(TORCH)"

agents: $(STAMP)
	$(BIN)/python -m tests.agents.run --torch "$(TORCH)" $(ONLY)

mutations: $(STAMP)
	$(BIN)/python tests/mutations/run.py --check
	$(BIN)/python tests/mutations/run.py $(ONLY)

accelerator: $(STAMP)
	mkdir -p build
	rm -f build/accelerator.jsonl
	$(BIN)/python benchmarks/accelerator.py --tiny --output build/accelerator.jsonl $(if $(ONLY),--only $(ONLY))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_layers.py tests/test_docstrings.py

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_overhead.py
	$(BIN)/python benchmarks/bench_training.py
	$(BIN)/python benchmarks/bench_torch.py
	$(BIN)/python benchmarks/bench_torch.py --beside-jax
	$(BIN)/python benchmarks/bench_dispatch.py
	$(BIN)/python benchmarks/bench_fairness.py
	$(BIN)/python benchmarks/bench_decode.py
	$(BIN)/python benchmarks/bench_mesh.py
	$(BIN)/python benchmarks/bench_sampling.py
	$(BIN)/python benchmarks/bench_openai.py
	$(BIN)/python benchmarks/bench_rl.py
	$(BIN)/python benchmarks/bench_trainer.py
	$(BIN)/python benchmarks/bench_codec.py
	$(BIN)/python benchmarks/bench_engines.py
	$(BIN)/python benchmarks/bench_memory.py
	$(BIN)/python benchmarks/bench_buckets.py
	$(BIN)/python benchmarks/bench_models.py
	$(BIN)/python benchmarks/bench_routing.py
	$(BIN)/python benchmarks/bench_start.py
	$(BIN)/python benchmarks/bench_stop.py
	$(BIN)/python benchmarks/bench_load.py
	$(BIN)/python benchmarks/bench_large_updates.py
	$(BIN)/python benchmarks/bench_hostile.py
	$(BIN)/python benchmarks/bench_metrics.py
	$(BIN)/python benchmarks/bench_status.py
	$(BIN)/python benchmarks/bench_traces.py

# The generator is pinned: code of protobuf 4.25 runs on every runtime since.
proto: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target build/protoc grpcio-tools==1.62.3 grpcio==1.62.3 "setuptools<81"
	PYTHONPATH=build/protoc $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO)/skyrl_tinker.proto

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
