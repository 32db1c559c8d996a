# `make quickstart` is enough to begin with. Each target first makes the environment that it needs, once.
#
#   PYTHON=python3.12     another interpreter (3.11 or later) to make the environment with
#   SOAK=gspo SEED=3 N=2  which campaigns of `make soak` (pytest's -k), their seeds (1,2,3 are several), how often each
#   PYTHON312=python3.12  the interpreter of `make fast-312` and `make trainer-312`
#   HPCRL_VENV=/big/venv  another place for it
#   CLUSTER=/big/cluster  where `make cluster` puts what its nodes share
#   RELEASE=26.05         which Slurm it has, if not the machine's: a version, or a Debian (trixie, forky)
#   CLUSTER_RELEASE=24.11 which Slurm the tests on the cluster run under, if not the machine's
#   PLANTED="name name"   which faults of tests/planted `make planted` tries

PYTHON ?= python3
PYTHON312 ?= python3.12
HPCRL_VENV ?= .venv
BIN := $(HPCRL_VENV)/bin
LOG := $(HPCRL_VENV)/install.log
COMMA := ,
RECIPE ?= examples/quickstart.toml
BENCHES ?= $(wildcard bench/*.py)
CLUSTER ?= /tmp/hpcrl-cluster

.DEFAULT_GOAL := help
.PHONY: help help-dev env quickstart test test-all test-rest soak fast env-312 fast-312 trainer-312 trackers lint planted docs sbatch lock sbom bench cluster packages

help:
	@echo "make quickstart   make the environment, then run $(RECIPE)"
	@echo "make env          the environment alone, in $(HPCRL_VENV)"
	@echo "make test         test every capability once (no root, no Slurm); it takes long"
	@echo "make cluster      a real Slurm and MPI cluster on this machine, to practise on (as root); it is in $(CLUSTER)"
	@echo "make help-dev     the targets for those who change hpcrl"

help-dev:
	@echo "make lint         ruff, the tests of text and structure, the pages as a site, and the sizes of the packages"
	@echo "make fast         only the tests of make test that start no processes"
	@echo "make test-all     make test, then the other tests: real Slurm and MPIs (root, and make packages)"
	@echo "make soak         the long campaigns and the cross products"
	@echo "make planted      show that tests notice the ten faults of tests/planted"
	@echo "make fast-312     the fast tests on Python 3.12, with the newer Megatron-core (.venv-312, 6 GB)"
	@echo "make trainer-312  the tests of trainer ranks, conversions and models there"
	@echo "make trackers     hpcrl report --to with the real wandb, trackio and mlflow, each on this machine"
	@echo "make docs         write docs/options.md again"
	@echo "make sbatch       write the scripts of sbatch/ again"
	@echo "make lock         write the hashes in requirements/*.lock again, after a pin has changed"
	@echo "make sbom         write sbom.json: what is installed, as CycloneDX"
	@echo "make bench        measure against Ray and Redis (installs them into the environment)"
	@echo "make packages     install the Debian packages that the cluster and make test-all need (as root)"

# One quiet step of the installation: `$(call pip,what it is,command and arguments)`; its output is in the log, and shown if
# it fails.
define pip
	@echo "installing $(1)"
	@$(BIN)/python -m pip --disable-pip-version-check $(2) >> $(LOG) 2>&1 || { tail -n 20 $(LOG); exit 1; }
endef

# Three workers for CI's two cores, since many tests wait.  A worker that crashes ends the run.  Tests that share an expensive fixture run in one of them (tests/support/layers.py).
WORKERS := -n 3 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
FAST := -m "core and not process and not vllm" $(WORKERS)

# An environment keeps the interpreter that it was made with: installed over another one's, its modules would not load.
INTERPRETER := -c 'import sys; print(sys.base_prefix, sys.version.split()[0])'
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell $(BIN)/python $(INTERPRETER)),$(shell $(PYTHON) $(INTERPRETER)))
$(error PYTHON=$(PYTHON): $(HPCRL_VENV) is of another Python ($(shell $(BIN)/python $(INTERPRETER))); remove it, or give HPCRL_VENV=)
endif
endif
endif

ENV := $(HPCRL_VENV)/.installed
# Every file is compared with its hash in requirements/. torch comes last, when what it needs is installed, but for the
# libraries of its CUDA build: that is what the registry has where no index of CPU wheels was named.  A CPU build whose hash
# is not known (another Python, another processor) is installed, and said.
$(ENV): requirements/cpu.lock requirements/torch-cpu.lock requirements/torch-cuda.lock pyproject.toml
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hpcrl needs Python 3.11 or later: make PYTHON=..."; exit 1; }
	@echo "making the environment in $(HPCRL_VENV), 2 GB (6 with torch's CUDA build), some minutes; log: $(LOG)"
	@$(if $(wildcard $(BIN)/python),true,$(PYTHON) -m venv $(HPCRL_VENV))
	@: > $(LOG)
	$(call pip,what vLLM$(COMMA) hpcrl and the tests need,install --require-hashes --no-deps -r requirements/cpu.lock)
	@rm -rf $(HPCRL_VENV)/torch
	$(call pip,torch,download --no-deps -d $(HPCRL_VENV)/torch $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/cpu.txt))
	@wheel=$$(basename $(HPCRL_VENV)/torch/torch-*.whl); sum=$$(sha256sum $(HPCRL_VENV)/torch/$$wheel | cut -d " " -f 1); \
	if cat requirements/torch-*.lock | grep -q "sha256:$$sum"; then echo "$$wheel: its hash is right"; \
	elif echo "$$wheel" | grep -q "+cpu"; then echo "$$wheel: requirements/torch-cpu.lock has no hash of it to compare"; \
	else echo "$$wheel has the hash $$sum, which is none of requirements/torch-cuda.lock: it is not installed"; exit 1; fi
	@$(BIN)/python -m pip install $(HPCRL_VENV)/torch/*.whl >> $(LOG) 2>&1 || { tail -n 20 $(LOG); exit 1; }
	@rm -r $(HPCRL_VENV)/torch
	$(call pip,hpcrl,install --no-deps --no-build-isolation --editable .)
	@touch $@

BENCH := $(HPCRL_VENV)/.installed-bench
$(BENCH): $(ENV) requirements/bench.txt
	$(call pip,what is compared with,install -r requirements/bench.txt)
	@touch $@

env: $(ENV)

quickstart: $(ENV)
	$(BIN)/hpcrl run $(RECIPE)

test: $(ENV)
	$(BIN)/python -m pytest -m core $(WORKERS)

test-all: $(ENV)
	@$(BIN)/python -m tools.cluster packages
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

# Two workers begin with the tests on a cluster, which wait more than they compute; the third does the rest.
test-rest: $(ENV)
	@$(BIN)/python -m tools.cluster packages
	$(BIN)/python -m pytest -m full $(WORKERS)

# Each campaign reads SEED and N as it needs them; what it measures it prints.
soak: $(ENV)
	SEED="$(SEED)" N="$(N)" $(BIN)/python -m pytest -m soak -rP $(if $(SOAK),-k "$(SOAK)")

fast: $(ENV)
	$(BIN)/python -m pytest $(FAST)

# Megatron-core follows Python: what pip takes on 3.12 is three minor releases ahead of what it takes on 3.11.
env-312:
	@$(MAKE) --no-print-directory env PYTHON=$(PYTHON312) HPCRL_VENV=.venv-312

fast-312: env-312
	.venv-312/bin/python -m pytest $(FAST)

trainer-312: env-312
	.venv-312/bin/python -m pytest -m "(core or full) and process" tests/trainer tests/models

# Their packages bring some hundred others, so they have an environment of their own, which sees this one's.
TRACKERS := $(HPCRL_VENV)/trackers
$(TRACKERS): $(ENV)
	$(BIN)/python -m venv --without-pip $@
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $@/lib/python3.*/site-packages)/above.pth
	$(BIN)/python -m pip --python $@/bin/python install --quiet --disable-pip-version-check --editable .[wandb,trackio,mlflow]

trackers: $(TRACKERS)
	$(TRACKERS)/bin/python -m pytest -rs tests/report/trackers

packages: $(ENV)
	@$(BIN)/python -m tools.cluster packages --install

cluster: packages
	@$(BIN)/python -m tools.cluster start $(CLUSTER) $(if $(RELEASE),--release $(RELEASE))

lint: $(ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.house --check
	$(BIN)/python -m pytest -m "lint and not soak" $(WORKERS)

planted: $(ENV)
	$(BIN)/python -m tools.planted $(PLANTED)

sbatch: $(ENV)
	$(BIN)/python -m tests.launch.slurm.test_batch_script

docs: $(ENV)
	$(BIN)/hpcrl options --write docs/options.md

# In an environment of their own, so that they change no version in the other.
TOOLS := $(HPCRL_VENV)/supply-chain
$(TOOLS): $(ENV)
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 cyclonedx-bom==7.5.0

# Hashes of every file that an installation may take: of what cpu.txt, cpu-nodeps.txt and test.txt pin, of torch's CUDA
# build, of what a GPU cluster's environment (`hpcrl[gpu,mpi,parquet]`, Python 3.12) resolves to, and of what Transformer Engine
# adds to that.
UV = $(TOOLS)/bin/uv pip compile --quiet --generate-hashes --no-annotate --no-config --custom-compile-command "make lock"
lock: $(TOOLS)
	$(UV) --universal --python-version 3.11 --no-deps requirements/cpu.txt requirements/cpu-nodeps.txt requirements/test.txt \
	  --no-emit-package torch -o requirements/cpu.lock
	grep '^torch==' requirements/cpu.txt | $(UV) --universal --python-version 3.11 --no-deps - -o requirements/torch-cuda.lock
	$(UV) --python-version 3.12 --python-platform x86_64-manylinux_2_28 pyproject.toml --extra gpu --extra mpi --extra parquet \
	  --constraint requirements/tried.txt -o requirements/gpu.lock
	echo 'transformer-engine[pytorch,core_cu13]' | $(UV) --python-version 3.12 --python-platform x86_64-manylinux_2_28 - \
	  --constraint requirements/gpu.lock -o requirements/gpu-te.lock \
	  $$(sed -n 's/^\([a-z0-9._-]*\)==.*/--no-emit-package \1/p' requirements/gpu.lock)

# What is installed, as CycloneDX: for those who have to say what runs on their machines.
sbom: $(TOOLS)
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file sbom.json $(BIN)/python

bench: $(BENCH)
	@set -e; for file in $(BENCHES); do echo "== $$file"; $(BIN)/python $$file; done
