# make demo    set everything up and run the chain of agents on two CPU engines
# make test    set everything up and pass the tests
# make soak    ten thousand prompt streams: nothing grows (minutes)
# make check   lint, format and types
# make clean   remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
READY := $(VENV)/.ready
SOURCES := flashmoa server_patches examples tests

.PHONY: setup demo test soak check format clean
setup: $(READY)

$(READY): requirements/*.txt pyproject.toml server_patches/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not sys.platform.startswith("linux"))' || \
	  { echo "SGLang runs on Linux only"; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "A C compiler is needed (cc); install gcc"; exit 1; }
	@echo "[1/4] torch (CPU, the longest step)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) -r requirements/torch.txt
	@echo "[2/4] what SGLang needs on a CPU"
	@$(PIP) -r requirements/engine-cpu.txt
	@echo "[3/4] FlashMoA, its plugin and the tools"
	@$(PIP) -e '.[autogen]' -e server_patches -r requirements/dev.txt -c requirements/engine-cpu.txt
	@echo "[4/4] SGLang"
	@$(PIP) --no-deps -r requirements/sglang.txt
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/chain.py

test: $(READY)
	@$(BIN)/python -m pytest

soak: $(READY)
	@FLASHMOA_SOAK_STREAMS=10000 $(BIN)/python -m pytest tests/engine/test_soak.py -s

check: $(READY)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/pyright

format: $(READY)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
