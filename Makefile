# Each target sets up what it needs in .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Otherwise each of the hundreds of processes that tests start would compile the program again.
unexport PYTHONDONTWRITEBYTECODE
# The tests mostly wait for real processes, so four workers are worth it on two cores.
WORKERS ?= 4

.PHONY: demo test unit lowest debian bare image soak oracles families check format bench nodejs clean

demo: $(VENV)/.ready
	@$(BIN)/trainctl demo $(DEMO_ARGS)

test: $(VENV)/.ready-dev nodejs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# All but tests/integration, which start whole clusters.
unit: $(VENV)/.ready-dev nodejs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/integration $(PYTEST_ARGS)

# The pure parts. What is left out of them needs torch, MLX, huggingface_hub, or the tested version of msgspec, which
# generates the schema.
PURE_EXTRAS := nvidia,parquet,zstd,prometheus,tensorboard,discovery
PURE_TOOLS := pytest pytest-asyncio pytest-randomly pytest-timeout pytest-xdist hypothesis jsonschema
PURE_TESTS := tests/protocol tests/node_agent/conductor tests/node_agent/planning tests/node_agent/autopilot \
  tests/tui/state tests/tui/commands tests/tui/charts tests/tui/terminal \
  $(addprefix --ignore=,tests/protocol/machine/test_devices.py tests/protocol/config/test_hub_models.py \
  tests/protocol/messages/test_schema.py tests/protocol/advice/test_settings.py)

# The pure parts with the lowest versions that the projects declare, in build/lowest. Not with torch and MLX.
LOWEST := build/lowest
lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet -c constraints.txt $(PURE_TOOLS)
	$(LOWEST)/bin/pip install --quiet -c $(LOWEST)/constraints.txt ./protocol '.[$(PURE_EXTRAS)]'
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) $(PURE_TESTS) $(PYTEST_ARGS)

# `make test` of the last commit in a new Debian system that has only Python and make, as root. What is left out for want
# of other programs is named in its last lines.
bare: $(VENV)/.ready
	mkdir -p build/debian
	git archive --output=build/debian/checkout.tar HEAD
	$(BIN)/python -m tools.debian_root bookworm sh -ec 'mkdir /clone; tar -xf build/debian/checkout.tar -C /clone; \
	  make -C /clone test WORKERS=$(WORKERS) PYTEST_ARGS="$(PYTEST_ARGS)"'

# New Debian systems that have only Python, made by mmdebstrap, as root: both wheels and the demo on Python 3.11, the
# pure parts on Python 3.13.
debian: $(VENV)/.ready-dev
	TRAINCTL_DEBIAN=all $(BIN)/python -m pytest -s tests/integration/test_bare_debian.py $(PYTEST_ARGS)
	$(BIN)/python -m tools.debian_root trixie sh -ec 'python3 -m venv /venv; export PYTHONPYCACHEPREFIX=/var/cache/python; \
	  /venv/bin/pip install --quiet -c constraints.txt $(PURE_TOOLS) ./protocol ".[$(PURE_EXTRAS)]"; \
	  /venv/bin/python -m pytest -n $(WORKERS) -p no:cacheprovider $(PURE_TESTS) $(PYTEST_ARGS)'

# An image of examples/deploy/Dockerfile by buildah, as root: IMAGE_TARGET=torch, IMAGE_ARGS for buildah's options.
IMAGE_TARGET ?= watch
image: $(VENV)/.ready
	$(BIN)/python -m tools.image $(IMAGE_TARGET) $(IMAGE_ARGS)

# What takes too long for every change: ten times as many transitions of the conductor's model; more faults on all
# engines and mixes of backends, counted by victim and phase; 600 steps with a fault every 10 s on average, on torch
# and on a mix; a token cache of 3 GB; fine-tuning of 300 steps, disturbed, and preferences of 100; agents killed
# between a command's journal and its effect; mutated frames by the million at each socket; spikes, divergence and
# plateaus planted in hundreds of curves; shares under noise in hundreds of runs, and of hundreds of clusters; the time
# left of 200 simulated runs; a checkpoint's writer killed 100 times, and after each of its operations; a run resumed
# with each combination of objective, adapter, data type, optimizer and backend; a rank that trains alone ended 30 times
# by SIGTERM; 30 preemptions of one, two and all of three nodes each; diagnoses of 20 simulated runs with each cause;
# memory of ten models; bytes per parameter of full training; five calibrations of the demo's model; real runs with each
# cause of a diagnosis that can be planted; the example run file of each objective; the whole self-test; compiled
# layers with adapters, ragged rows and what saves memory; ranks that hold another model; images, built, and run as
# three pods; all cases marked `long`, of which `make test` has some: peaks of memory, mixes of ranks and engines, losses
# of preferences, and branches at 50 of 100 steps.
soak: $(VENV)/.ready-dev
	TRAINCTL_TRANSITIONS=2000000 $(BIN)/python -m pytest tests/node_agent $(PYTEST_ARGS)
	TRAINCTL_FAULTS=all $(BIN)/python -m pytest -s tests/integration/test_faults.py $(PYTEST_ARGS)
	TRAINCTL_SOAK=600 $(BIN)/python -m pytest -s tests/integration/test_soak.py $(PYTEST_ARGS)
	TRAINCTL_LONG=all $(BIN)/python -m pytest -m long $(PYTEST_ARGS)
	TRAINCTL_BYTES_PER_PARAMETER=all $(BIN)/python -m pytest -s tests/trainer/precision $(PYTEST_ARGS)
	TRAINCTL_COMPILE=all $(BIN)/python -m pytest -s tests/trainer/backends/test_compile.py $(PYTEST_ARGS)
	TRAINCTL_TIMING=all TRAINCTL_SOAK_CALIBRATIONS=5 $(BIN)/python -m pytest -s tests/trainer/calibration $(PYTEST_ARGS)
	TRAINCTL_EXACTLY_ONCE=200 $(BIN)/python -m pytest tests/node_agent/runs/test_exactly_once.py $(PYTEST_ARGS)
	TRAINCTL_CHECKPOINT_KILLS=100 TRAINCTL_RESUMES=all \
	  $(BIN)/python -m pytest tests/trainer/checkpoints --timeout=900 $(PYTEST_ARGS)
	TRAINCTL_CACHE_GB=3 $(BIN)/python -m pytest tests/trainer/test_large_cache.py $(PYTEST_ARGS)
	TRAINCTL_TERMS=30 $(BIN)/python -m pytest -s tests/trainer/test_term_signal.py $(PYTEST_ARGS)
	TRAINCTL_PREEMPTIONS=30 $(BIN)/python -m pytest -s tests/integration/test_preemption.py $(PYTEST_ARGS)
	TRAINCTL_KILLS=200 $(BIN)/python -m pytest -s tests/integration/test_agent_kills.py $(PYTEST_ARGS)
	TRAINCTL_CURVES=all $(BIN)/python -m pytest -s tests/integration/test_finetuning.py \
	  tests/integration/test_reference.py $(PYTEST_ARGS)
	TRAINCTL_PROBES=all $(BIN)/python -m pytest -s tests/integration/test_probe.py $(PYTEST_ARGS)
	TRAINCTL_FRAMES=1000000 TRAINCTL_EVENTS=500000 $(BIN)/python -m pytest -s tests/integration/test_floods.py \
	  tests/protocol/wire/test_mutations.py tests/node_agent/clients/test_garbage.py $(PYTEST_ARGS)
	TRAINCTL_HEALTH=200 $(BIN)/python -m pytest tests/protocol/analysis $(PYTEST_ARGS)
	TRAINCTL_PLANTED=all $(BIN)/python -m pytest -s tests/integration/test_diagnosis.py $(PYTEST_ARGS)
	TRAINCTL_EXAMPLES=all $(BIN)/python -m pytest tests/integration/test_objective_examples.py --timeout=900 $(PYTEST_ARGS)
	TRAINCTL_SELFTEST=all $(BIN)/python -m pytest -s tests/integration/test_selftest.py \
	  tests/trainer/selftest --timeout=900 $(PYTEST_ARGS)
	TRAINCTL_IMAGES=all $(BIN)/python -m pytest -s tests/deploy -m image --timeout=3600 $(PYTEST_ARGS)
	TRAINCTL_DIAGNOSES=20 $(BIN)/python -m pytest tests/protocol/analysis/diagnosis $(PYTEST_ARGS)
	TRAINCTL_ETA=200 $(BIN)/python -m pytest -s tests/protocol/batch/test_eta.py $(PYTEST_ARGS)
	TRAINCTL_POLICY_STEPS=200 $(BIN)/python -m pytest -s tests/integration/test_curve_policies.py $(PYTEST_ARGS)
	TRAINCTL_SEEDS=500 $(BIN)/python -m pytest -s tests/node_agent/autopilot/test_rebalance.py \
	  tests/node_agent/conductor/test_all_policies.py \
	  tests/node_agent/alerts/test_slow_ranks.py tests/node_agent/alerts/test_own_losses.py \
	  tests/protocol/analysis/test_slowdown.py \
	  tests/protocol/batch/test_split.py tests/trainer/backends/test_memory_model.py $(PYTEST_ARGS)

# Comparisons with other libraries' trainers that `make test` leaves out.
oracles: $(VENV)/.ready-dev
	TRAINCTL_ORACLES=all $(BIN)/python -m pytest -m oracle $(PYTEST_ARGS)

# Each family of models on torch and MLX, of which `make test` has some: alone, in runs of a torch and an MLX rank, and
# in runs that go from one to the other.
families: $(VENV)/.ready-dev
	TRAINCTL_FAMILIES=all $(BIN)/python -m pytest tests/trainer/backends/test_families.py \
	  tests/trainer/backends/test_random_weights.py tests/trainer/collective/test_family_runs.py \
	  tests/trainer/checkpoints/test_resume.py tests/trainer/attention/test_torch_varlen.py \
	  tests/integration/test_family_clusters.py $(PYTEST_ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.protocol_docs.docs --check docs/protocol.md
	$(BIN)/python -m tools.protocol_docs.agents_page --check docs/protocol-agents.md
	$(BIN)/python -m tools.protocol_docs.schema --check docs/protocol.schema.json
	$(BIN)/python -m tools.keys_page --check docs/keys.md
	$(BIN)/python -m tools.diagnosis_page --check docs/diagnosis.md
	$(BIN)/python -m tools.pictures --check

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# All of them, also after one that misses its bar or fails. `advise.py` and `links.py` need root.
bench: $(VENV)/.ready-dev
	@codes=; failed=0; \
	measure() { \
	  echo "benchmarks/$$*"; $(BIN)/python benchmarks/"$$@"; code=$$?; \
	  codes="$$codes$$code  $$*\n"; [ $$code -eq 0 ] || failed=1; \
	}; \
	measure report_cost.py; \
	measure run_report.py; \
	measure hosted_overhead.py; \
	measure key_press.py; \
	measure equal.py; \
	measure unequal.py; \
	measure rebalance.py; \
	measure finetune_speed.py --backends torch; \
	measure finetune_speed.py --backends mlx --batch 1 --steps 1; \
	measure cuda_speed.py; \
	measure batching_speed.py; \
	measure score_speed.py; \
	measure advise.py; \
	measure reference_speed.py; \
	measure data_wait.py; \
	measure checkpoint_cost.py; \
	measure profile_cost.py; \
	measure links.py; \
	measure recovery.py; \
	measure terminal_cost.py; \
	measure own_metrics.py; \
	measure attached_metrics.py; \
	measure conductor.py; \
	measure simulate.py --real; \
	printf "exit codes:\n$$codes"; exit $$failed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What the Node.js example needs; its packages bring their binaries along, so no script of theirs is run. Without npm
# the tests of that example are left out.
nodejs:
	@command -v npm >/dev/null || { echo "make: npm not found: the Node.js example is not tested" >&2; exit 0; }; \
	  cmp -s examples/nodejs/package-lock.json examples/nodejs/node_modules/.trainctl-lock.json || \
	  { npm ci --prefix examples/nodejs --ignore-scripts --no-audit --no-fund --silent && \
	    cp examples/nodejs/package-lock.json examples/nodejs/node_modules/.trainctl-lock.json; } || \
	  echo "make: npm could not fetch what the Node.js example needs: it is not tested" >&2

# One line a stage on standard error; what pip says is in $(VENV)/setup.log.
define install
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON to a Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) tools/setup_venv.py $(VENV) $(1)
	@touch $@
endef

PROJECTS := pyproject.toml hatch_build.py protocol/pyproject.toml protocol/trainctl/protocol/__init__.py constraints.txt

$(VENV)/.ready: $(PROJECTS)
	$(call install,all)

$(VENV)/.ready-dev: $(PROJECTS)
	$(call install,dev)
	@touch $(VENV)/.ready
