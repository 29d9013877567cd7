# Each target sets up what it needs in .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Otherwise each of the hundreds of processes that tests start would compile the program again.
unexport PYTHONDONTWRITEBYTECODE
WORKERS ?=
NODEJS := examples/nodejs/node_modules/.trainctl-lock.json

.PHONY: demo watch-demo test test-all newest-textual guests soak hardware check format bench lowest debian bare clean

demo: $(VENV)/.ready
	@$(BIN)/trainctl demo $(DEMO_ARGS)

# The full screen alone, over eight simulated nodes: without PyTorch and MLX.
watch-demo: $(VENV)/.ready-tui
	@$(BIN)/trainctl demo --simulated $(DEMO_ARGS)

# The quick tier (tests/tiers.py): it needs nothing but Python and make.
test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(or $(WORKERS),auto) $(PYTEST_ARGS)

# All that judges a change. These tests mostly wait for real processes, so four workers are worth it on two cores.
test-all: $(VENV)/.ready-dev $(NODEJS)
	$(BIN)/python -m pytest --tier all -n $(or $(WORKERS),4) $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory newest-textual

# The screens' tests with the newest Textual on the index, where that is newer than the tested one.
NEWEST := build/newest-textual
newest-textual: $(VENV)/.ready-dev
	@rm -rf $(NEWEST)
	@if ! $(BIN)/python -m pip --no-input --retries 0 install --quiet --upgrade --target $(NEWEST) textual 2> /dev/null; then \
	  echo "make: no package index: the screens are not tested with the newest Textual" >&2; \
	elif [ -d $(NEWEST)/textual-$(shell sed -n 's/^textual==//p' constraints.txt).dist-info ]; then \
	  echo "make: the tested Textual is the newest" >&2; \
	else PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n $(or $(WORKERS),auto) tests/tui/screens tests/tui/dialogs \
	  -k 'not test_help'; fi  # whose picture has a line more

# Adapters of training loops with the two newest minor versions of each framework on the index; `make test` has the tested ones.
guests: $(VENV)/.ready-dev
	$(BIN)/python -m tools.guest_versions

# What takes hours: kills, floods, families of models, comparisons with other libraries, images, resumes and walks, one
# after another, with what they measure. PYTEST_ARGS takes paths of some.
soak: $(VENV)/.ready-dev $(NODEJS)
	$(BIN)/python -m tools.real_model build/real-model
	$(BIN)/python -m pytest --tier soak -s $(PYTEST_ARGS)

# Words that many readers of English don't know; no file uses them.
AVOIDED := mend(s|ed|ing)?|heed(s|ed|ing)?|(told|tells?) of|for want of|gone on with|be it|sees? to

# This machine's devices, readings and service manager, and a report of them to share.
hardware: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/hardware --tier all --hardware-report build/hardware.json $(PYTEST_ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy -p trainctl.guest --python-version 3.10
	$(BIN)/lint-imports
	$(BIN)/python -m tools.pages --check
	$(BIN)/python -m tools.house_rules
	! grep -rnwiE '$(AVOIDED)' --include=*.py --include=*.md --include=*.toml --include=*.mjs --exclude-dir=node_modules \
	  --exclude-dir=golden *.md *.toml benchmarks docs examples node_agent protocol tests tools trainer tui

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Also after one that misses its bar or fails. `advise` and `links` need root.
bench: $(VENV)/.ready-dev
	@$(BIN)/python -m benchmarks all

# The pure parts. What is left out of them needs torch, MLX, huggingface_hub, or the tested version of msgspec, which
# generates the schema.
PURE_EXTRAS := tui nvidia parquet zstd prometheus tensorboard discovery
PURE_TOOLS := pytest pytest-asyncio pytest-randomly pytest-timeout pytest-xdist hypothesis jsonschema
PURE_TESTS := tests/protocol tests/node_agent/conductor tests/node_agent/planning tests/node_agent/autopilot \
  tests/tui/state tests/tui/commands tests/tui/charts tests/tui/terminal \
  $(addprefix --ignore=,tests/protocol/machine/test_devices.py tests/protocol/config/test_hub_models.py \
  tests/protocol/messages/test_schema.py tests/protocol/advice/test_settings.py)

# The pure parts with the lowest versions that the projects declare, in build/lowest. Not with torch and MLX.
LOWEST := build/lowest
lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet -c constraints.txt uv $(PURE_TOOLS)
	$(PYTHON) tools/requirements.py $(PURE_EXTRAS) > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct -r $(LOWEST)/requirements.txt
	$(LOWEST)/bin/pip install --quiet --no-deps .
	$(LOWEST)/bin/python -m pytest -n $(or $(WORKERS),logical) $(PURE_TESTS) $(PYTEST_ARGS)

# New Debian systems that have only Python, made by mmdebstrap, as root: both wheels and the demo on Python 3.11, the
# pure parts on Python 3.13.
debian: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --tier soak -s tests/integration/test_bare_debian.py $(PYTEST_ARGS)
	$(BIN)/python -m tools.debian_root trixie sh -ec 'python3 -m venv /venv; export PYTHONPYCACHEPREFIX=/var/cache/python; \
	  python3 tools/requirements.py $(PURE_EXTRAS) > /requirements.txt; \
	  /venv/bin/pip install --quiet -c constraints.txt $(PURE_TOOLS) -r /requirements.txt .; \
	  /venv/bin/python -m pytest -n $(or $(WORKERS),logical) -p no:cacheprovider $(PURE_TESTS) $(PYTEST_ARGS)'

# `make test` of the last commit in a new Debian system that has only Python and make, as root. Its last lines name what
# is left out because other programs are missing.
bare: $(VENV)/.ready
	mkdir -p build/debian
	git archive --output=build/debian/checkout.tar HEAD
	$(BIN)/python -m tools.debian_root bookworm sh -ec 'mkdir /clone; tar -xf build/debian/checkout.tar -C /clone; \
	  make -C /clone test WORKERS=$(WORKERS) PYTEST_ARGS="$(PYTEST_ARGS)"'

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What the Node.js example needs; its packages bring their binaries along, so no script of theirs is run. Without npm
# the tests of that example are left out.
$(NODEJS): examples/nodejs/package-lock.json
	@if ! command -v npm >/dev/null; then echo "make: npm not found: the Node.js example is not tested" >&2; \
	elif npm ci --prefix examples/nodejs --ignore-scripts --no-audit --no-fund --silent; then cp $< $@; \
	else echo "make: npm could not fetch what the Node.js example needs: it is not tested" >&2; fi

# PyTorch's build: cpu, cu128 and so on; default is the package index's own, which includes CUDA on Linux. A machine
# without an NVIDIA driver takes the one for CPUs, if PyTorch's index can be reached.
ifeq ($(shell uname -s)$(wildcard /proc/driver/nvidia/version /dev/dxg),Linux)
TORCH ?= cpu
endif
TORCH ?= default
SIZE_cpu := 0.5 GB to download and 2 GB on disk, without CUDA. For CUDA, run make TORCH=default
SIZE_tui := 25 MB to download and 130 MB on disk, without PyTorch and MLX
SIZE_default := on Linux 3 GB to download and 8 GB on disk, with CUDA. Without CUDA, make TORCH=cpu is 0.5 and 2 GB
TORCH_PACKAGE := install -c constraints.txt --index-url https://download.pytorch.org/whl/$(TORCH) torch

# By uv where it is installed, else by pip. What they say is in $(VENV)/setup.log; standard output is the demo's. Running
# it again continues where it was interrupted.
PACKAGES = install -c constraints.txt -e '.[$(1)]'
define install
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON to a Python 3.11 or newer" >&2; exit 2; }
	@mkdir -p $(VENV)
	@echo "setup: installing trainctl[$(1)] into $(VENV); follow it in $(VENV)/setup.log:" \
	  "$(SIZE_$(if $(filter tui,$(1)),tui,$(TORCH)))" >&2
	@{ if command -v uv; then [ -x $(BIN)/pip ] || uv venv --allow-existing --seed --python $(PYTHON) $(VENV); \
	  else [ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); fi; \
	  [ $(1) = tui ] || [ $(TORCH) = default ] || $(BIN)/python -c 'import torch' 2> /dev/null \
	    || $(BIN)/python -m pip --no-input --retries 1 --timeout 10 $(TORCH_PACKAGE) \
	    || echo "setup: no PyTorch for $(TORCH) at download.pytorch.org; taking the package index's, of 0.5 to 3 GB" >&3; \
	  if command -v uv; then uv pip $(PACKAGES) --python $(BIN)/python; else $(BIN)/python -m pip --no-input $(PACKAGES); fi; \
	} 3>&2 > $(VENV)/setup.log 2>&1 || { tail -n 15 $(VENV)/setup.log >&2; echo "setup: failed; fix the problem and run the" \
	  "same command again, or run make clean first" >&2; exit 1; }
	@touch $@
endef

PROJECTS := pyproject.toml protocol/trainctl/protocol/__init__.py constraints.txt

$(VENV)/.ready-tui: $(PROJECTS)
	$(call install,tui)

$(VENV)/.ready: $(PROJECTS)
	$(call install,all)
	@touch $(VENV)/.ready-tui

$(VENV)/.ready-dev: $(PROJECTS)
	$(call install,dev)
	@touch $(VENV)/.ready $(VENV)/.ready-tui
