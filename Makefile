# make demo: train the demo model.  make test: run the tests.  make chaos: the long tests of what may go wrong.
# make bench-check: what is slower than it was.
# All set up first; again, they set up nothing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo test chaos bench-check setup check format clean

demo: setup
	$(BIN)/asyncrl launch --config configs/demo.yaml --run demo

# In two processes: vLLM and DeepSpeed each take torch's process group for themselves.
test: setup
	$(BIN)/python -m pytest --ignore=tests/generator
	$(BIN)/python -m pytest tests/generator

# Kills, stops and damages at length: about forty minutes.
chaos: setup
	CHAOS=1 $(BIN)/python -m pytest tests/chaos -p no:randomly
	$(BIN)/python -m tests.fuzz --messages 1000000

# What the rows of the bench need, and a quick bench against earlier results: some minutes.
AGAINST ?= benchmarks/results/cpu-2-cores-quick.json

bench-check: setup
	$(BIN)/pip install -q -c requirements/cpu.txt -e .[bench]
	$(BIN)/asyncrl bench --quick --against $(AGAINST)

setup: .venv/ready

.venv/ready: pyproject.toml requirements/cpu.txt scripts/setup
	scripts/setup $(PYTHON)
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs sweeps demo
