# make setup   set everything up, and fetch the demo's model
# make demo    set everything up and run the chain of agents on two CPU engines
# make test    set everything up and pass the tests
# make test-ci     these and the slow ones; what continuous integration runs
# make nightly     everything: all tests, three times ten thousand calls, fifty random programs of
#                  each framework, and the next three (about three hours, and more environments)
# make test-releases   the engine tests on the other SGLang releases (an environment
#                      for each; test-0.5.22 and the like for one of them)
# make check-newest   what the newest SGLang on the package index lacks of what the plugin
#                      uses: seconds, no engine; part of make nightly
# make demo-dynamo   run a linked team on two engines behind a front end of NVIDIA Dynamo
# make test-dynamo   links through such a front end, whose workers die and join
# make test-vllm   links on real vLLM servers on the CPU (another environment)
# make test-conformance   AutoGen's own tests with our model client in the stock one's
#                      place; needs the package index
# make gpu-prepare   fill .gpu/ with what a machine with one GPU and no network needs for the
#                    checks there (docs/gpu.md)
# make check   lint, format, types, and the files of deploy/
# make wheels  build the wheels of the three packages in dist/
# make docs    build the documentation site in .site; a broken link is an error
# make clean   remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
READY := $(VENV)/.ready
# What the demo serves. Tests have smaller models.
MODEL := .cache/models/SmolLM2-135M-Instruct
SOURCES := flashmoa server_patches benchmarks examples tests docs
PROJECTS := pyproject.toml server_patches/pyproject.toml benchmarks/pyproject.toml
REQUIREMENTS := $(filter-out requirements/vllm.txt requirements/dynamo.txt,$(wildcard requirements/*.txt))
# Each has a file of what it pins otherwise.
RELEASES := $(basename $(notdir $(wildcard requirements/releases/*.txt)))
RELEASE_TESTS := $(addprefix test-,$(RELEASES))
RELEASE_SOURCES := $(patsubst %,.cache/sglang/%/.ready,$(RELEASES))
# The release that is set up by default, at whose source the tests with the others look, too.
DEFAULT_SOURCE := .cache/sglang/$(shell sed -n 's/^sglang==//p' requirements/sglang.txt)/.ready

# Some frameworks do not go with the newest client of OpenAI.
FRAMEWORKS := .venvs/frameworks/.ready .venvs/frameworks-openai2/.ready

.PHONY: setup demo demo-dynamo test test-ci test-all nightly check-newest test-conformance test-dynamo test-vllm test-releases $(RELEASE_TESTS) gpu-prepare check format docs wheels clean
setup: $(READY) $(MODEL)

define CHECK_MACHINE
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.11"; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(not sys.platform.startswith("linux"))' || \
  { echo "SGLang runs on Linux only"; exit 1; }
@command -v $${CC:-cc} >/dev/null || { echo "A C compiler is needed (cc); install gcc"; exit 1; }
endef

$(READY): $(REQUIREMENTS) $(PROJECTS)
	$(CHECK_MACHINE)
	@echo "[1/4] torch (CPU, the longest step)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) -r requirements/torch.txt
	@echo "[2/4] what SGLang needs on a CPU"
	@$(PIP) -r requirements/engine-cpu.txt
	@echo "[3/4] FlashMoA, its plugin and the tools"
	@$(PIP) -e '.[autogen,agent-framework,examples,moa,openai,opentelemetry,router]' -e server_patches -e 'benchmarks[engines,math]' -r requirements/dev.txt -c requirements/engine-cpu.txt
	@echo "[4/4] SGLang"
	@$(PIP) --no-deps -r requirements/sglang.txt -r requirements/routers.txt
	@touch $@

$(MODEL): | $(READY)
	@$(BIN)/python examples/smollm2.py

demo: $(READY)
	@$(BIN)/python examples/chain.py

demo-dynamo: .venvs/dynamo/.ready
	@$(<D)/bin/python examples/dynamo_team.py

# Tests on engines wait more than they compute: three processes keep two cores busy.
define RUN_TESTS
@$(BIN)/python -m pytest -m '$(1)' --durations=25 -n 3 --dist loadfile --no-loadscope-reorder tests/integration; engines=$$?; \
$(BIN)/python -m pytest -m '$(1)' -n 2 tests/unit && exit $$engines
endef

test: $(READY)
	$(call RUN_TESTS,not slow and not nightly)

test-ci: $(READY)
	$(call RUN_TESTS,not nightly)

test-all: $(READY) $(FRAMEWORKS) $(RELEASE_SOURCES)
	$(call RUN_TESTS,slow or not slow)

nightly: test-all test-releases test-dynamo test-vllm test-conformance
	@FLASHMOA_SOAK_CALLS=10000 $(BIN)/python -m pytest tests/integration/test_soak.py -s
	@FLASHMOA_PROGRAMS=50 $(BIN)/python -m pytest tests/integration/openai -k "random_programs or newest_frameworks" -s

test-releases: $(RELEASE_TESTS)

check-newest: $(READY)
	@$(BIN)/python -m pytest -m nightly tests/unit/plugin/sglang/test_internals.py -k newest

test-conformance: $(READY)
	@$(BIN)/python tests/conformance/run.py

test-dynamo: .venvs/dynamo/.ready
	@$(<D)/bin/python -m pytest tests/dynamo -s

test-vllm: $(READY) .venvs/vllm/.ready
	@$(BIN)/python -m pytest tests/vllm -s

$(RELEASE_TESTS): test-%: .venvs/%/.ready $(RELEASE_SOURCES) $(DEFAULT_SOURCE)
	@echo "SGLang $*"
	@$(<D)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/integration/plugin tests/unit/plugin

# The source of another SGLang release, to look for what the plugin uses there.
.cache/sglang/%/.ready: $(READY)
	@rm -rf $(@D)
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: --dest $(@D) sglang==$*
	@$(BIN)/python -m zipfile -e $(@D)/*.whl $(@D)
	@rm $(@D)/*.whl
	@touch $@

$(FRAMEWORKS): .venvs/%/.ready: requirements/%.txt pyproject.toml
	@echo "Agent frameworks ($*): an environment of its own"
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -r $< -e '.[openai]'
	@touch $@

.venvs/%/.ready: RELEASE_PIP = $(@D)/bin/python -m pip install --disable-pip-version-check --quiet
# A copy of the default environment, with which it shares most files (hard links).
.venvs/%/.ready: requirements/releases/%.txt $(READY)
	@echo "SGLang $*: an environment of its own"
	@rm -rf $(@D) && mkdir -p .venvs && cp -al $(VENV) $(@D) && rm $(@D)/.ready
	@$(RELEASE_PIP) --no-deps -r $< sglang==$*
	@touch $@

# Dynamo, and all that the default environment has.
.venvs/dynamo/.ready: requirements/dynamo.txt $(READY)
	@echo "Dynamo: an environment of its own"
	@$(PYTHON) -m venv --clear $(@D)
	@$(RELEASE_PIP) --upgrade pip
	@$(RELEASE_PIP) --no-deps -r $<
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/default.pth
	@touch $@

# Of what vLLM names, text models do not need torchvision and the like, and a build of these for CUDA
# cannot be imported beside a CPU build of torch.
.venvs/vllm/.ready: requirements/vllm.txt
	$(CHECK_MACHINE)
	@echo "vLLM: an environment of its own"
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv --clear $(@D)
	@$(RELEASE_PIP) --upgrade pip
	@$(RELEASE_PIP) -r $<
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

gpu-prepare: $(READY)
	@$(BIN)/python benchmarks/gpu/prepare.py

check: $(READY)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/pyright & sources=$$!; $(BIN)/pyright -p tests && wait $$sources
	@$(BIN)/hadolint deploy/Dockerfile
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes/resources.yaml

format: $(READY)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

docs: $(READY)
	@$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs .site
	@echo "The site: .site/index.html"

wheels: $(READY)
	@rm -rf dist
	@$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist . ./server_patches ./benchmarks

clean:
	rm -rf dist $(VENV) .venvs .cache .site .gpu .pytest_cache .ruff_cache .hypothesis
