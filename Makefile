# make demo: train the demo model.  make test: run the tests.  make test-all: run the slow tests.
# make docs: the documentation as a site.  make chaos: the long tests of what may go wrong.
# make bench-check: what is slower than it was.  make size: how large the project is.
# All set up first; again, they set up nothing.
# make setup DEVICE=cpu (or gpu): packages for CPUs whatever there is; without it, for GPUs where there is one.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEVICE ?= auto
# make setup ENGINE=transformers: without vLLM; later calls leave it out, too, until ENGINE=vllm.
ENGINE ?= auto
BIN := .venv/bin

.PHONY: demo test test-all docs gpu-check chaos bench-check size setup check format clean

demo: setup
	$(BIN)/asyncrl launch --config configs/demo.yaml --run demo

# Every test that is not slow.
test: setup
	$(BIN)/python -m tests

# The slow tests, and the property tests with many random inputs, whose seed is printed.
test-all: setup
	@scripts/browser
	$(BIN)/python -m tests all

# The site of README and docs/, in build/site; fails for a broken link, or a file from another host.
docs: setup
	$(BIN)/python -m scripts.site

# What only a GPU can show: the learner's numbers, weights, engines, a complete run, figures; without one it says so.
gpu-check: setup
	$(BIN)/python -m tests.gpu_check

# Kills, stops and damages at length: about forty minutes.
chaos: setup
	CHAOS=1 $(BIN)/python -m pytest tests/chaos -p no:randomly --durations=25
	$(BIN)/python -m tests.fuzz --messages 1000000

# What the rows of the bench need, and a quick bench against earlier results: some minutes.
AGAINST ?= benchmarks/results/cpu-2-cores-quick.json

bench-check: setup
	$(BIN)/pip install -q -c requirements/$$(cut -d ' ' -f 1 .venv/ready).txt -e .[bench]
	$(BIN)/asyncrl bench --quick --against $(AGAINST)

size: setup
	$(BIN)/python -m scripts.size

setup:
	@scripts/setup $(PYTHON) $(DEVICE) $(ENGINE)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build runs sweeps demo
