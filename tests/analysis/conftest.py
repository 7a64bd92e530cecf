"""Directories as `alfish train` leaves them, without training."""

import csv

import pytest

from alfish.runs.writers import Counters, CSVWriter

OPERATIVE = """import alfish.algorithms.ppo

# Parameters for {algorithm}:
# ==============================================================================
{algorithm}.clip_range = @clip/Linear()
{algorithm}.gamma = {gamma}

# Parameters for make_environment:
# ==============================================================================
make_environment.env_id = '{env_id}'

# Parameters for Trainer:
# ==============================================================================
Trainer.algorithm = @{algorithm}
Trainer.environment = @make_environment
Trainer.listeners = \\
    [@Evaluate(),
     @Summaries()]
Trainer.seed = {seed}
"""


@pytest.fixture
def make_run(tmp_path):
    """Writes a run, whose evaluations at 1000, 2000, ... have the given mean returns; returns its directory."""

    def make(name, returns=(1.0, 2.0, 3.0), seed=0, gamma=0.98, algorithm="PPO", env_id="CartPole-v1", offline=False):
        directory = tmp_path / name
        (directory / "eval").mkdir(parents=True)
        text = OPERATIVE.format(algorithm=algorithm, gamma=gamma, seed=seed, env_id=env_id)
        (directory / "operative_config.gin").write_text(text)
        (directory / "config.gin").write_text(text)
        writer = CSVWriter(directory / "metrics.csv")
        for k, value in enumerate(returns, start=1):
            clock, seconds = 1000 * k, 0.5 * k + 0.1 * seed
            counters = clock + 10 * seed, k, 100 * k, seconds  # the iteration ends after the evaluation was due
            if offline:
                counters = 0, k, clock, seconds
            train = {"train/loss": 10.0 / k + seed, "metrics/average_return": value - 1}
            writer.scalars(train, Counters(counters[0] or clock, *counters))
            writer.scalars({"evaluation/mean_return": value, "evaluation/mean_length": 7.0}, Counters(clock, *counters))
            path = directory / "eval" / f"evaluation-{clock:012d}.csv"
            path.write_text(f"episode,seed,return,length\n0,0,{value - 1},6\n1,1,{value + 1},8\n")
        writer.close()
        return directory

    return make


@pytest.fixture
def make_monitor(tmp_path):
    """Writes a monitor of stable-baselines3 with episodes `(return, length, seconds)`; returns its path."""

    def make(name, episodes, t_start=100.0, env_id="CartPole-v1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            file.write(f'#{{"t_start": {t_start}, "env_id": "{env_id}"}}\n')
            csv.writer(file).writerows([("r", "l", "t"), *episodes])
        return path

    return make
