# Headroom's commands. Everything sets itself up first; `make help` lists them.
PYTHON ?= python3
MODEL ?= demo/model
NAME ?= demo
SERVE_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready
# Tracked packed; restored bit for bit (demo/packing.py), here and by whatever asks for the demo model without make.
WEIGHTS := demo/model/model.safetensors
# One thread per test process: two processes share two cores, and tiny tensors gain nothing from more.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
# Ray starts its processes at nice 15 and gives Serve's proxy five seconds: both too little on a machine that is busy.
SERVE_ENV := RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60
PYTEST := $(TEST_ENV) $(RUN)/python -m pytest
# Those that need neither a GPU nor recorded traces.
BENCHMARKS := ledger_cost scheduler_cost expert_replay cpu_accuracy cpu_serving streaming_path arena_device

.PHONY: help setup serve test lint test-unit test-ray test-faults test-gpu soak bench

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml .ci/requirements.lock .ci/setup
	PYTHON=$(PYTHON) .ci/setup

$(WEIGHTS): $(WEIGHTS).planes
	$(PYTHON) -m demo.packing

setup: $(READY) $(WEIGHTS)  ## make .venv from the lock file, restore the demo model

serve: $(READY) $(WEIGHTS)  ## serve the demo model on 127.0.0.1:8000 (MODEL=folder NAME=name SERVE_ARGS="engine=... replicas=...")
	$(SERVE_ENV) $(RUN)/serve run serve_app:app model=$(MODEL) served_name=$(NAME) $(SERVE_ARGS)

# Ray's tests mostly wait, and go first where both could run; the others take what is left of the processors.
test: $(READY) $(WEIGHTS) lint test-unit  ## everything that needs no GPU
	$(MAKE) --jobs 2 --output-sync=recurse --no-print-directory test-ray test-faults

lint: $(READY)  ## ruff, mypy, import contracts
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

test-unit: $(READY) $(WEIGHTS)  ## tests without Ray and GPU, two at a time
	$(PYTEST) -n 2 --dist loadfile --durations 15 -m "not ray and not gpu and not soak"

test-ray: $(READY) $(WEIGHTS)  ## tests against real Ray Serve, one shared cluster
	$(PYTEST) --durations 15 --timeout 500 -m "ray and not gpu and not soak" tests/serve_app/on_ray

test-faults: $(READY) $(WEIGHTS)  ## plant known faults one at a time; the suite must fail under each
	$(TEST_ENV) nice $(RUN)/python -m tests.faults

test-gpu: $(WEIGHTS)  ## what needs a CUDA device, with the machine's own torch; says how closely families and backends agree
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PYTHON) -m pytest -q -n 8 --durations 15 -m "gpu and not soak" \
		tests/kernels tests/memory tests/worker

soak: $(READY) $(WEIGHTS)  ## long property runs and fault drills
	$(PYTEST) -n 2 --timeout 1800 --durations 5 -m "soak and not gpu and not ray"
	$(PYTEST) --timeout 1800 -s -m "soak and ray and not gpu"

bench: $(READY) $(WEIGHTS)  ## the benchmarks that need no GPU, into benchmarks/results
	@for name in $(BENCHMARKS); do $(RUN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; done
