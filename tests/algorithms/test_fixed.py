"""A policy that never learns: a saved policy of another run and another algorithm, among policies that train."""

import json

import gin
import numpy as np
import pytest
import torch

import alfish
from alfish.__main__ import main
from alfish.algorithms.imitation.expert import Expert
from alfish.algorithms.imitation.fixed import Fixed

FEW = (
    *("make_games.game='toy_games:Tag'", "make_games.num_games=2", "Trainer.num_iterations=3"),
    *("Trainer.unroll_length=8", "EpochBatches.minibatch_size=4", "Evaluate.num_episodes=2", "MLP.layers=(8,)"),
    *("Learner.compile=False", "Trainer.environment=@make_games"),
    "Trainer.policies={'chaser': 'adversary_*', 'runner': 'agent_*'}",
)
BEGIN = "include 'ppo.gin'\nimport alfish.environments.games\n"


class AlwaysTwo(Expert):
    """Chooses the action 2, and counts its rows in its state."""

    name = "the constant"

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, time_step, state):
        return torch.full_like(state, 2), state + 1


gin.external_configurable(AlwaysTwo, module="test_fixed")


def train(path, name, text, *more):
    conf = path / f"{name}.gin"
    conf.write_text(BEGIN + text)
    few = [f"--gin_param={setting}" for setting in (*FEW, *more)]
    return main(["train", f"--gin_file={conf}", f"--root_dir={path / name}", *few])


def test_a_saved_policy_plays_and_never_changes(tmp_path, capsys):
    own = "Trainer.transforms=[@ObservationNormalizer]"
    assert train(tmp_path, "first", "", own, "runner/MLP.layers=(12,)") == 0
    root_dir = tmp_path / "first"
    fixed = f"""
import alfish.algorithms.imitation.fixed
import alfish.configuration.experts
runner/PolicySettings.algorithm = @Fixed
runner/PolicySettings.transforms = []
runner/PolicySettings.trains = False
Fixed.expert = @saved_policy
saved_policy.root_dir = '{root_dir}'
saved_policy.policy = 'runner'
"""
    assert train(tmp_path, "second", fixed) == 0
    saved, found = alfish.load(root_dir, policy="runner"), alfish.load(tmp_path / "second", policy="runner")
    assert isinstance(found.algorithm, Fixed) and list(found.algorithm.parameters()) == []
    for seed in range(20):
        observation = np.random.default_rng(seed).random(4, np.float32) * 9
        assert found.act(observation) == saved.act(observation)
    header, *rows = (tmp_path / "second" / "metrics.csv").read_text().splitlines()
    assert "train/chaser/loss" in header and "train/runner/loss" not in header
    capsys.readouterr()
    flags = ["--json", "--num_episodes=2", "--allow_import=toy_games"]
    assert main(["evaluate", f"--root_dir={tmp_path / 'second'}", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["by_objective"].keys() == {"chaser", "runner"}


CONSTANT = """
import alfish.algorithms.imitation.fixed
runner/PolicySettings.algorithm = @Fixed
Fixed.expert = @AlwaysTwo
"""


def test_a_script_is_a_player_with_a_memory(tmp_path):
    assert train(tmp_path, "run", CONSTANT + "runner/PolicySettings.trains = False\n") == 0
    found = alfish.load(tmp_path / "run", policy="runner", allow_import=["test_fixed"])
    assert [found.act(np.zeros(4, np.float32)) for _ in range(3)] == [2, 2, 2]


def test_a_fixed_policy_is_not_trained(tmp_path, capsys):
    assert train(tmp_path, "run", CONSTANT) == 2
    assert (
        "Fixed of the policy runner has nothing to train; bind runner/PolicySettings.trains = False"
        in capsys.readouterr().err
    )


@pytest.fixture(autouse=True)
def _cleared():
    yield
    gin.clear_config()
