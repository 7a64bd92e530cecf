"""`make_environment.leave_out`: parts of a Dict observation that are not there for alfish."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import alfish
from alfish import nest
from alfish.environments import make_environment
from alfish.errors import UsageError


class Missions(gymnasium.Env):
    """A Dict with texts, one of them nested; the step is the observation."""

    observation_space = spaces.Dict(
        image=spaces.Box(-9, 9, (2,), np.float32),
        mission=spaces.Text(20),
        goal=spaces.Dict(text=spaces.Text(5), place=spaces.Box(-9, 9, (1,), np.float32)),
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {}

    def step(self, action):
        self._step += 1
        return self._observation(), 1.0, False, self._step == 4, {}

    def _observation(self):
        place = np.array([-self._step], np.float32)
        image = np.full(2, self._step, np.float32)
        return {"image": image, "mission": "go", "goal": {"text": "x", "place": place}}


TEXTS = ["mission", "goal.text"]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_parts_are_left_out_by_their_paths(vectorization):
    environment = make_environment(Missions, 2, vectorization, leave_out=TEXTS)
    try:
        assert nest.paths(environment.observation_spec) == ["goal.place", "image"]
        environment.reset()
        observation = environment.step(np.zeros(2, np.int64)).observation
        assert observation["image"].tolist() == [[1, 1], [1, 1]] and observation["goal"]["place"].tolist() == [[-1]] * 2
    finally:
        environment.close()
    whole = make_environment(Missions, leave_out=["mission", "goal"], evaluation=True)
    assert nest.paths(whole.observation_spec) == ["image"]


@pytest.mark.parametrize(
    ("env_id", "leave_out", "words"),
    [
        (
            Missions,
            [],
            r"observation.goal.text is a Text space, .* make_environment.leave_out = \['goal.text'\], or wrap",
        ),
        (
            Missions,
            ["goal"],
            r"observation.mission is a Text .*\['mission'\], or wrap .*\(gymnasium.wrappers.Transform",
        ),
        (Missions, ["text"], "leave_out has 'text', but the observation has image, mission, goal, goal.text, goal."),
        (Missions, ["image", "mission", "goal"], "leave_out is .*, so no part of the observation is left"),
        (
            "CartPole-v1",
            ["mission"],
            "leave_out has 'mission', but the observation is Box.*, which has no named parts",
        ),
    ],
)
def test_required_leaves_are_reported_in_one_sentence(env_id, leave_out, words):
    with pytest.raises(UsageError, match=words):
        make_environment(env_id, leave_out=leave_out)


def test_a_vector_class_has_no_parts_to_leave_out():
    with pytest.raises(UsageError, match="make_environment.leave_out applies to single environments, but a vector"):
        make_environment("CartPole-v1", 2, "vector_entry_point", leave_out=["mission"])


def test_a_policy_without_the_texts_is_trained_evaluated_and_loaded(tmp_path):
    settings = {"make_environment.leave_out": TEXTS, "make_environment.num_envs": 1, "EpochBatches.num_epochs": 1}
    settings |= {"Evaluate.num_episodes": 1, "unroll_length": 64, "num_env_steps": 100}
    alfish.train("PPO", Missions, root_dir=tmp_path / "run", **settings)
    policy = alfish.load(tmp_path / "run")
    seen = {"image": np.zeros(2, np.float32), "goal": {"place": np.zeros(1, np.float32)}}
    assert policy.act(seen) in (0, 1)
