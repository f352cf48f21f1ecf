# Each target makes .venv first if it is missing or older than what it is made from. `make demo` and `make test`
# are all that a fresh machine with Python 3.11 needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# More pytest options: make test PYTEST_ARGS="tests/unit -k lora"
PYTEST_ARGS ?=
# More options of the demo: make demo DEMO_ARGS="--method prompt"
DEMO_ARGS ?=
# More options of the study: make study STUDY_ARGS="--seeds 8 --device cuda"
STUDY_ARGS ?=
# Several processes on few cores: one torch thread each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo demo-short pictures page-pictures notebook test test-all test-hours test-busy test-stopped mutants chaos chaos-short study lint format types docs \
  build image compose-env clean

help:
	@echo "make demo    a real model on a local swarm: tune an adapter, generate, publish it, load it back (minutes)"
	@echo "make test    every part once (ten minutes); make test-all: everything but the matrices of hours (an hour)"
	@echo "make test-hours    those matrices; make test-busy: make test beside two processes that burn the cores"
	@echo "make chaos   ten minutes of faults on a swarm, with a printed seed; make chaos-short: half a minute"
	@echo "make study   DeepSpeed-MoE's claims about small models, trained and measured here (hours)"
	@echo "make image compose-env    what compose.yaml needs: the image, keys, secrets and .env (needs Docker, no Python)"
	@echo "make lint | types | docs | notebook | pictures | page-pictures | build | format | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "$(PYTHON) was not found. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version), but Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3.11-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (some minutes the first time)"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/swarm demo $(DEMO_ARGS)

# The same way in two minutes: few steps, little text.
demo-short: $(STAMP)
	$(BIN)/swarm demo --short --dir build/demo-short

# Of the README: runs the demonstration and draws its terminal and its losses.
pictures: $(STAMP)
	$(BIN)/python docs/pictures/make_pictures.py

# The tutorial as a notebook: a copy of its page, which tests compare.
notebook: $(STAMP)
	$(BIN)/jupytext --quiet --to ipynb --set-kernel python3 --update --output docs/tutorials/fine-tune.ipynb docs/tutorials/fine-tune.md

# Of the page: needs Chromium and its driver.
page-pictures: $(STAMP)
	$(BIN)/python docs/pictures/make_page_pictures.py

# By files: tests of one share servers.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

# The real small model is made once (100 MB to fetch, a minute to convert) and kept.
test-all: export SWARM_TEST_SMOLLM2 ?= 1
test-all: $(STAMP)
	$(PYTEST) -m "not hours and not network" $(PYTEST_ARGS)

test-hours: $(STAMP)
	$(PYTEST) -m "hours and not network" $(PYTEST_ARGS)

# A test that fails on a busy machine is a defect.
test-busy: $(STAMP)
	$(BIN)/python tests/busy.py --burn 2 -- $(PYTEST) $(PYTEST_ARGS)

# Changes of one line, each of which a test has to notice.
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

# Every process of the tests stands still for a second now and then. Repeat one: make test-stopped STOP_SEED=7
STOP_SEED ?= 0
test-stopped: $(STAMP)
	$(BIN)/python tests/busy.py --stop --seed $(STOP_SEED) -- $(PYTEST) $(PYTEST_ARGS)

# Servers fail on a schedule while models generate and train. Repeat one: make chaos CHAOS_SEED=7
ifdef CHAOS_SEED
chaos: export CHAOS_SEED := $(CHAOS_SEED)
endif
chaos: export CHAOS_SECONDS ?= 120
chaos: $(STAMP)
	$(BIN)/python -m pytest -n 0 -s -m hours tests/integration/test_chaos.py tests/integration/test_chaos_attacks.py $(PYTEST_ARGS)

# The same faults each time, so that a failure belongs to the change.
chaos-short: export CHAOS_SEED ?= 3796664094
chaos-short: $(STAMP)
	$(BIN)/python -m pytest -n 0 -s -m hours tests/integration/test_chaos.py -k in_process

# The paper's claims about small models: hours on two cores. Killed, it goes on; what has finished is kept.
study: $(STAMP)
	$(BIN)/python -m recipes.study --dir runs/prmoe_study $(STUDY_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

# The wheel is imported in an environment of its own, where the checkout cannot be seen; the packages it depends on
# are borrowed from .venv, whose own copy of this package (an editable install) is not visible that way.
build: $(STAMP)
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	$(PYTHON) -m venv --without-pip build/wheel-venv
	$(BIN)/python -m pip --python build/wheel-venv/bin/python install --quiet --no-deps --no-index dist/*.whl
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(build/wheel-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	cd build && wheel-venv/bin/python -c 'import swarm_plugins, sys; sys.exit("wheel-venv" not in swarm_plugins.__file__)'
	cd build && wheel-venv/bin/swarm --help >/dev/null
	@ls -l dist/*.whl

# The user in the containers owns the secrets. Of a rootless engine, it is root: make image compose-env CONTAINER_USER=0
CONTAINER_USER ?= $(shell id -u | sed 's/^0$$/1000/')
image:
	SWARM_FIRST_PEER=unknown SWARM_USER_ID=$(CONTAINER_USER) docker compose build first

# What exists stays. With `swarm` on this machine, no image is needed: make compose-env CONTAINER_SWARM=swarm
CONTAINER_SWARM ?= docker run --rm --user $(CONTAINER_USER) --volume "$(CURDIR)/secrets:/srv/secrets" --workdir /srv \
  swarm_plugins
own_secrets = @test "$$(id -u)" != 0 || chown -R $(CONTAINER_USER) secrets
compose-env:
	@install -d -m 700 secrets
	@umask 077; for name in swarm.secret api.key; do \
	  test -s secrets/$$name || openssl rand -hex 32 > secrets/$$name || exit 1; done
	$(own_secrets)
	@peer=$$($(CONTAINER_SWARM) identity secrets/first.key) && { grep -sEv '^SWARM_(FIRST_PEER|USER_ID)=' .env; \
	  printf 'SWARM_FIRST_PEER=%s\nSWARM_USER_ID=%s\n' "$$peer" $(CONTAINER_USER); } > .env.new && mv .env.new .env
	$(own_secrets)
	@echo ".env and secrets/ are ready: docker compose up --wait"

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
