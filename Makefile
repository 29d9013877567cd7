# Each target sets up what it needs in .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Otherwise each of the hundreds of processes that tests start would compile the program again.
unexport PYTHONDONTWRITEBYTECODE
WORKERS ?=

.PHONY: demo test test-all soak check format bench debian bare lowest image nodejs clean

demo: $(VENV)/.ready
	@$(BIN)/trainctl demo $(DEMO_ARGS)

# The quick tier (tests/tiers.py): it needs nothing but Python and make.
test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(or $(WORKERS),logical) $(PYTEST_ARGS)

# All that judges a change. These tests mostly wait for real processes, so four workers are worth it on two cores.
test-all: $(VENV)/.ready-dev nodejs
	$(BIN)/python -m pytest --tier all -n $(or $(WORKERS),4) $(PYTEST_ARGS)

# What takes hours: kills, floods, families of models, comparisons with other libraries, images, resumes and walks, one
# after another, with what they measure. PYTEST_ARGS takes paths of some.
soak: $(VENV)/.ready-dev nodejs
	$(BIN)/python -m tools.real_model build/real-model
	$(BIN)/python -m pytest --tier soak -s $(PYTEST_ARGS)

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
	$(LOWEST)/bin/python -m pytest -n $(or $(WORKERS),logical) $(PURE_TESTS) $(PYTEST_ARGS)

# `make test` of the last commit in a new Debian system that has only Python and make, as root. Its last lines name what
# is left out because other programs are missing.
bare: $(VENV)/.ready
	mkdir -p build/debian
	git archive --output=build/debian/checkout.tar HEAD
	$(BIN)/python -m tools.debian_root bookworm sh -ec 'mkdir /clone; tar -xf build/debian/checkout.tar -C /clone; \
	  make -C /clone test WORKERS=$(WORKERS) PYTEST_ARGS="$(PYTEST_ARGS)"'

# New Debian systems that have only Python, made by mmdebstrap, as root: both wheels and the demo on Python 3.11, the
# pure parts on Python 3.13.
debian: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --tier soak -s tests/integration/test_bare_debian.py $(PYTEST_ARGS)
	$(BIN)/python -m tools.debian_root trixie sh -ec 'python3 -m venv /venv; export PYTHONPYCACHEPREFIX=/var/cache/python; \
	  /venv/bin/pip install --quiet -c constraints.txt $(PURE_TOOLS) ./protocol ".[$(PURE_EXTRAS)]"; \
	  /venv/bin/python -m pytest -n $(or $(WORKERS),logical) -p no:cacheprovider $(PURE_TESTS) $(PYTEST_ARGS)'

# An image of examples/deploy/Dockerfile by buildah, as root: IMAGE_TARGET=torch, IMAGE_ARGS for buildah's options.
IMAGE_TARGET ?= watch
image: $(VENV)/.ready
	$(BIN)/python -m tools.image $(IMAGE_TARGET) $(IMAGE_ARGS)

# Words that many readers of English don't know; no file uses them.
AVOIDED := mend(s|ed|ing)?|heed(s|ed|ing)?|(told|tells?) of|for want of|gone on with|be it|sees? to

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
	! grep -rnwiE '$(AVOIDED)' --include=*.py --include=*.md --include=*.toml --include=*.mjs --exclude-dir=node_modules \
	  --exclude-dir=golden *.md *.toml benchmarks docs examples node_agent protocol tests tools trainer tui

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
