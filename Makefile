# Each target is enough on a fresh machine: it sets up first, and a second run installs nothing.
.PHONY: train test test-slow test-vllm faults fuzz lint bench setup

train:
	@scripts/setup.sh
	.venv/bin/psrl train retool_tiny

test:
	@scripts/setup.sh tests
	.venv/bin/python -m pytest

test-slow:
	@scripts/setup.sh tests
	.venv/bin/python -m pytest -m slow

# The vllm engine, on vLLM's own environment (3.4 GB, made once).
test-vllm:
	@scripts/setup.sh tests
	@scripts/setup.sh vllm
	.venv/bin/python -m pytest -m slow -k vllm tests/engines tests/runtime tests/cluster

# Twenty faults of each kind in real runs, some hours; PSRL_INJECTIONS and PSRL_FAULT_SEED change how many and when.
faults:
	@scripts/setup.sh tests
	.venv/bin/python -m pytest -m slow -s tests/faults

fuzz:
	@scripts/setup.sh tests
	.venv/bin/python -m pytest --hypothesis-profile new tests/chat tests/gateway tests/staleness tests/tools tests/environments

lint:
	@scripts/setup.sh
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy psrl/types psrl/protocols.py psrl/errors.py psrl/registry.py psrl/telemetry psrl/config psrl/chat psrl/staleness psrl/algorithms psrl/swe

bench:
	@scripts/setup.sh
	@for file in benchmarks/*.py; do echo "== $$file"; .venv/bin/python $$file || exit 1; done

setup:
	@scripts/setup.sh tests
