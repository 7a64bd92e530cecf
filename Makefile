# make train                                        PPO on CartPole, about ten seconds
# make train CONF=confs/ppo_pendulum.gin ROOT=runs/x  another conf
# make test                                         the tests; `make check` adds lint and types
PYTHON ?= python3
CONF ?= confs/ppo_cartpole.gin
ROOT ?= runs/$(basename $(notdir $(CONF)))
# One thread a process: two processes with two OpenMP threads each slow one another a hundredfold.
export OMP_NUM_THREADS ?= 1

.PHONY: train test check results soak bench clean

train: .venv/installed
	.venv/bin/alfish train --gin_file=$(CONF) --root_dir=$(ROOT)
	.venv/bin/alfish evaluate --root_dir=$(ROOT)

test: .venv/installed-dev
	.venv/bin/python -m pytest

check: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

results: .venv/installed-dev
	.venv/bin/python -m benchmarks.learning

soak: .venv/installed-dev
	ALFISH_SOAK_SECONDS=600 .venv/bin/python -m pytest -m slow -s tests/unrollers/test_soak.py

bench: .venv/installed-dev
	.venv/bin/python -m benchmarks.throughput

clean:
	rm -rf .venv build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[mujoco,box2d,video]'
	touch $@

.venv/installed-dev: .venv/installed
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
