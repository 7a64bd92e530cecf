# make train                                        PPO on CartPole, about 15 seconds
# make train CONF=confs/ppo_pendulum.gin ROOT=runs/x  another conf
# make test                                         the tests; `make check` adds lint and types
# make test-all                                     the slow and long ones too
# make docs                                         the documentation site, in site/
# make mutants                                      breaks the code in more than 1,200 ways; each must make a test fail
# make fingerprints                                 whether seed 0 of every conf still trains to the same bits
PYTHON ?= python3
CONF ?= confs/ppo_cartpole.gin
ROOT ?= runs/$(basename $(notdir $(CONF)))
# One thread a process: two processes with two OpenMP threads each slow one another a hundredfold.
export OMP_NUM_THREADS ?= 1
# Of the tests: two processes, each with the tests of whole files as long as there are enough.
PARALLEL ?= -n 2 --dist worksteal --durations=30

.PHONY: train test test-all docs mutants fingerprints check results soak bench clean

train: .venv/installed
	.venv/bin/alfish train --gin_file=$(CONF) --root_dir=$(ROOT)
	.venv/bin/alfish evaluate --root_dir=$(ROOT)

test: .venv/installed-dev
	.venv/bin/python -m pytest $(PARALLEL)

test-all: .venv/installed-dev
	.venv/bin/python -m pytest $(PARALLEL) -m ''

mutants: .venv/installed-dev
	.venv/bin/python tests/mutants.py

fingerprints: .venv/installed-mo
	.venv/bin/python -m benchmarks.fingerprints --check

check: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

results: .venv/installed-mo
	.venv/bin/python -m benchmarks.learning

soak: .venv/installed-dev
	ALFISH_SOAK_SECONDS=600 .venv/bin/python -m pytest -m "long or ray" -s -k "while" tests/unrollers/test_soak.py \
		tests/unrollers/test_ray_workers.py

bench: .venv/installed-dev
	.venv/bin/python -m benchmarks.throughput

clean:
	rm -rf .venv build dist

# Without ensurepip, `venv` leaves a directory that has a Python and no pip.
.venv/bin/python:
	$(PYTHON) -m venv --clear .venv || { rm -rf .venv; exit 1; }

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[mujoco,box2d,plot,video]'
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed $@

# Without what they ask for: pygame, whose files are those of pygame-ce, which gymnasium's extras ask for, and a
# gymnasium below 1.4. gymnax needs seaborn, and otherwise what brax needs. The others are the environments of confs.
.venv/installed-mo: .venv/installed-dev
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[brax]' seaborn minigrid \
		gymnasium-robotics mpe2
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gymnax mo-gymnasium
	touch $@

.venv/installed-docs: .venv/installed
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
