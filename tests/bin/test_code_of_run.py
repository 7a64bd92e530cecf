"""Commands with --code=run: they run the code that CodeSnapshot saved, and only then."""

import os
import subprocess
import sys

import pytest

from alfish.exporting.packing import pack

TASK = """
import gymnasium

class Task(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.high, REWARD, True, False, {}
"""
CONF = """
include 'ppo.gin'
make_environment.env_id = 'own_task:Task'
Trainer.num_iterations = 1
Trainer.unroll_length = 8
EpochBatches.minibatch_size = 8
Trainer.listeners = [@CheckpointSaver(), @CodeSnapshot()]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run whose environment has given rewards of 1, and gives rewards of 2 now."""
    place = tmp_path_factory.mktemp("place")
    (place / "own_task.py").write_text(TASK.replace("REWARD", "1.0"))
    (place / "task.gin").write_text(CONF)
    assert alfish(place, "train", "--gin_file=task.gin", "--root_dir=run").returncode == 0
    (place / "own_task.py").write_text(TASK.replace("REWARD", "2.00"))
    return place


def alfish(place, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alfish", *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


def evaluate(place, root_dir, code):
    return alfish(place, "evaluate", f"--root_dir={root_dir}", f"--code={code}", "--num_episodes=2")


@pytest.mark.slow
def test_the_saved_code_is_run_where_it_is_asked_for_also_of_a_packed_run(place):
    pack(place / "run", place / "run.zip")
    for root_dir, code, mean in (("run", "installed", 2), ("run", "run", 1), ("run.zip", "run", 1)):
        found = evaluate(place, root_dir, code)
        assert f"mean {mean} " in found.stdout, found.stderr


def test_a_run_without_code_is_named(tmp_path, refused):
    sentence = refused("evaluate", f"--root_dir={tmp_path}", "--code=run")
    assert "has no code.zip; a run writes it with Trainer.extra_listeners = [@CodeSnapshot()]" in sentence
