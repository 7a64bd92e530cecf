"""Rules of bootstrapping at a time limit: what each writes into the LAST row, and that nothing else differs."""

import numpy as np
import pytest
import torch

from alfish import nest
from alfish.data import StepType
from alfish.environments import make_environment
from benchmarks import time_limits

pytestmark = pytest.mark.slow


def steps_of(rule, num_steps=120):
    """The observation before each step, the row that it returned, where episodes ended, and the FIRST rows there."""
    environment = time_limits.environment(rule, 3, seed=7)
    generator, found = torch.Generator().manual_seed(0), []
    seen = environment.reset().observation
    for _ in range(num_steps):
        last = environment.step(torch.rand(3, 1, generator=generator) * 2 - 1)
        ended, first = environment.take_resets()
        found.append((seen, last, ended, first))
        seen = torch.where(ended[:, None], first.observation, last.observation)
    return found


@pytest.mark.parametrize("rule", time_limits.RULES)
def test_a_rule_changes_only_the_last_row_of_truncated_episodes(rule):
    num_ended = 0
    for (seen, last, ended, first), (_, true, *_) in zip(steps_of(rule), steps_of("final")):
        num_ended += int(ended.sum())
        assert (last.step_type[ended] == StepType.LAST).all() and (true.discount == 1).all()
        changed = {
            "final": true,
            "previous": true._replace(observation=torch.where(ended[:, None], seen, true.observation)),
            "reset": true._replace(observation=torch.where(ended[:, None], first.observation, true.observation)),
            "none": true._replace(discount=1 - ended.float()),
        }[rule]
        assert all(map(torch.equal, nest.leaves(last), nest.leaves(changed)))
        if ended.any() and rule in ("previous", "reset"):
            assert not torch.equal(last.observation, true.observation)
    assert num_ended == 2 * 3


def test_evaluations_have_the_usual_length():
    assert make_environment("alfish/Pendulum-v1", evaluation=True).env_spec.max_episode_steps == 200
    assert time_limits.environment("final", 1).env_spec.max_episode_steps == time_limits.LIMIT == 50


def row(rule, seed, env_steps, mean_return):
    return {
        "algorithm": "sac",
        "rule": rule,
        "seed": str(seed),
        "env_steps": str(env_steps),
        "mean_return": mean_return,
    }


def test_the_table_has_means_over_seeds_and_their_intervals():
    rows = [row("none", seed, step, str(-100 * seed - step)) for step in (20, 3) for seed in (1, 2)]
    steps, returns = time_limits.curves(rows, "sac", "none")
    assert steps == [3, 20] and np.array_equal(returns, [[-103, -120], [-203, -220]])
    *_, line = time_limits.table(rows).splitlines()
    words = "none: truncation ends the return"
    assert line == f"| SAC | {words} | 2 | -170.0 [-220.0, -120.0] | -161.5 [-211.5, -111.5] | -120, -220 |"


def test_a_run_with_existing_rows_is_not_repeated(tmp_path, monkeypatch):
    path = tmp_path / "time_limits.csv"
    path.write_text("algorithm,rule,seed,env_steps,mean_return,cpu_seconds\nppo,reset,3,10,-1,2\n")
    trained = []

    def train(**settings):
        trained.append(settings["seed"])
        evaluation = settings["root_dir"] / "eval" / "evaluation-000000000010.csv"
        evaluation.parent.mkdir(parents=True)
        evaluation.write_text("episode,seed,return,length\n0,0,-2.0,200\n1,1,-4.0,200\n")

    monkeypatch.setattr(time_limits, "CSV", path)
    monkeypatch.setattr(time_limits.alfish, "train", train)
    for seed in ("3", "4", "4"):
        time_limits.measure("ppo", "reset", seed, str(tmp_path / "runs"))
    assert trained == [4] and path.read_text().splitlines()[2].startswith("ppo,reset,4,10,-3.0,")
