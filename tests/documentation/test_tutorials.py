"""The tutorials of docs/ show the files of examples/ as they are, and their commands run."""

import csv
import re

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from test_examples import PROJECT

import alfish
from alfish import specs
from alfish.__main__ import main
from alfish.data import Experience, StepType, TimeStep
from examples import awac, rebrac, swing_up, test_end_prediction, test_small_ddpg

pytestmark = pytest.mark.slow

PAGES = PROJECT / "docs" / "tutorials"
SHOWN = {
    "environment": ["reach.py", "reach.gin"],
    "algorithm": ["reinforce.py", "awac.py", "awac_pendulum.gin"],
    "off_policy": [
        *("small_ddpg.py", "small_ddpg_pendulum.gin", "reconstruction.py", "test_small_ddpg.py"),
        *("end_prediction.py", "end_prediction_cartpole.gin", "test_end_prediction.py"),
        *("rebrac.py", "rebrac_pendulum.gin"),
    ],
    "network": ["residual.py", "residual_cartpole.gin"],
    "data": ["swing_up.py"],
}
FEW = ("Trainer.num_env_steps=1024", "Evaluate.num_episodes=2", "EpochBatches.num_epochs=1")


def train(tmp_path, gin_file, *bindings):
    command = ["train", f"--gin_file={gin_file}", f"--root_dir={tmp_path / 'run'}"]
    return main([*command, *(f"--gin_param={binding}" for binding in bindings)])


@pytest.mark.parametrize("page", SHOWN)
def test_a_tutorial_shows_its_files_as_they_are(page):
    blocks = re.findall(r"^```(?:python|gin)\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    for name in SHOWN[page]:
        assert (PROJECT / "examples" / name).read_text() in blocks, name


def test_the_citation_has_the_present_version():
    assert yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"] == alfish.__version__


def test_a_custom_environment_is_checked_trained_and_evaluated(tmp_path, monkeypatch, capsys, untried_training):
    monkeypatch.chdir(PROJECT)
    assert main(["check-env", "--gin_file=examples/reach.gin"]) == 0
    assert re.search(r"^algorithms .*\bPPO\b", capsys.readouterr().out, re.MULTILINE)
    assert train(tmp_path, "examples/reach.gin", *FEW) == 0
    assert main(["evaluate", f"--root_dir={tmp_path / 'run'}", "--num_episodes=2"]) == 0


def test_a_custom_network_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert train(tmp_path, "examples/residual_cartpole.gin", *FEW, "Trainer.unroll_length=64") == 0
    assert "ResidualMLP.num_blocks = 1" in (tmp_path / "run" / "operative_config.gin").read_text()


def test_data_of_a_controller_are_imported_and_cloned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    swing_up.record("pendulum.npz", 8)
    assert main(["import", "--source=npz:pendulum.npz", "--env_id=Pendulum-v1", "--output=data/pendulum"]) == 0
    assert "8 episodes read, 8 kept" in capsys.readouterr().out
    few = ("OfflineBuffer.sources=['alfish:data/pendulum']", "Trainer.num_updates=20", "Evaluate.num_episodes=2")
    assert train(tmp_path, "bc_pendulum.gin", *few) == 0


def test_a_variant_of_a_shipped_algorithm_learns_from_data_and_then_acts(tmp_path, monkeypatch):
    swing_up.record(tmp_path / "pendulum.npz", 4)
    monkeypatch.chdir(PROJECT)
    data = f"OfflineBuffer.sources=['npz:{tmp_path / 'pendulum.npz'}']"
    few = ("ReplayBatches.offline_updates=5", "ReplayBatches.warmup_env_steps=256", "Trainer.num_env_steps=300")
    named = ("Learner.compile=False", "Evaluate.num_episodes=1")
    named += ("MLP.layers=(8,)", "CriticEnsemble.layers=(8,)")
    assert train(tmp_path, "examples/awac_pendulum.gin", data, *few, *named) == 0
    with open(tmp_path / "run" / "metrics.csv") as file:
        last = list(csv.DictReader(file))[-1]
    assert int(last["env_steps"]) == 300 and int(last["updates"]) == 5 + 300 - 256


def test_a_custom_off_policy_algorithm_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    few = ("ReplayBatches.warmup_env_steps=50", "ReplayBatches.batch_size=32", "Learner.compile=False")
    few += ("Evaluate.num_episodes=1",)
    assert train(tmp_path, "examples/small_ddpg_pendulum.gin", *few, "Trainer.num_env_steps=60") == 0
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert int(list(csv.DictReader(file))[-1]["updates"]) == 10


def test_the_test_of_an_off_policy_algorithm_passes():
    test_small_ddpg.test_only_an_episode_that_terminated_has_no_value_after_its_end()
    test_small_ddpg.test_each_group_has_a_loss_for_each_transition()


def test_the_test_of_an_auxiliary_loss_passes():
    test_end_prediction.test_an_undecided_prediction_costs_log_two_and_a_right_one_little()


@pytest.mark.parametrize(
    "conf, scalar",
    [("reconstruction", "train/reconstruction_error"), ("end_prediction", "train/endprediction/probability")],
)
def test_a_loss_is_added_to_a_shipped_algorithm(tmp_path, monkeypatch, conf, scalar):
    monkeypatch.chdir(PROJECT)
    few = ("Trainer.num_env_steps=512", "Trainer.unroll_length=16", "EpochBatches.minibatch_size=32")
    few += ("Learner.compile=False", "Evaluate.num_episodes=1", "Trainer.summary_period=64")
    few += ("EpochBatches.num_epochs=1", "MLP.layers=(8,)")
    assert train(tmp_path, f"examples/{conf}_cartpole.gin", *few) == 0
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert float(list(csv.DictReader(file))[-1][scalar]) > 0


def test_the_state_value_of_awac_is_of_the_policys_own_actions():
    observation, action = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
    algorithm = awac.AWAC(observation, action, specs.reward_spec(), num_samples=2)
    assert set(algorithm.parameter_groups()) == {"critic", "actor"}
    step = TimeStep(*[None] * 3, torch.rand(5, 3), None, None)
    values = []
    torch.manual_seed(0)
    for _ in range(2):
        q = algorithm.action_values(algorithm.target_critic.network, step, algorithm.policy(step).sample().clamp(-1, 1))
        values.append(q.amin(0))
    torch.manual_seed(0)
    torch.testing.assert_close(algorithm.state_value(step, None), (values[0] + values[1]) / 2)


def test_rebrac_trains_from_recorded_data(tmp_path, monkeypatch):
    swing_up.record(tmp_path / "pendulum.npz", 2)
    monkeypatch.chdir(PROJECT)
    data = f"OfflineBuffer.sources=['npz:{tmp_path / 'pendulum.npz'}']"
    few = ("Trainer.num_updates=4", "Evaluate.num_episodes=1", "MLP.layers=(8,)", "CriticEnsemble.layers=(8,)")
    assert train(tmp_path, "examples/rebrac_pendulum.gin", data, *few) == 0


def test_the_penalties_of_rebrac_are_those_of_the_paper():
    observation, action = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
    step_type = torch.tensor([[StepType.MID, StepType.MID], [StepType.MID, StepType.LAST]])
    step = TimeStep(step_type, torch.ones(2, 2), torch.ones(2, 2), torch.rand(2, 2, 3), None, None)
    experience = Experience(step, torch.rand(2, 2, 2) * 2 - 1, None, None)
    values = {}
    for critic_bc in (0.0, 0.5):
        torch.manual_seed(0)
        algorithm = rebrac.ReBRAC(observation, action, specs.reward_spec(), actor_bc=0.3, critic_bc=critic_bc)
        values[critic_bc] = algorithm.train_step(experience, None).info.next_value
    torch.manual_seed(0)
    rebrac.ReBRAC(observation, action, specs.reward_spec())
    following = algorithm.target_action(step.observation[1:])
    penalty = 0.5 * (following - experience.action[1:]).square().sum(-1)
    expected = torch.stack([penalty[0, 0], torch.zeros(())])[None]  # none after the LAST time step
    torch.testing.assert_close(values[0.0] - values[0.5], expected)
    q, mine, recorded = torch.tensor([[2.0, -4.0]]), torch.zeros(1, 2, 2), torch.ones(1, 2, 2)
    torch.testing.assert_close(algorithm.actor_loss(q, mine, recorded), torch.tensor([[0.6 - 2 / 3, 0.6 + 4 / 3]]))


def test_recorded_episodes_have_their_final_observation(tmp_path):
    swing_up.record(tmp_path / "pendulum.npz", 2)
    data = swing_up.np.load(tmp_path / "pendulum.npz")
    assert data["lengths"].tolist() == [200, 200] and len(data["observations"]) == 402 and len(data["actions"]) == 400
    env = swing_up.gymnasium.make("Pendulum-v1")
    for k in range(2):
        env.reset(seed=k)
        last = [env.step(action)[0] for action in data["actions"][200 * k : 200 * k + 200]][-1]
        swing_up.np.testing.assert_array_equal(data["observations"][201 * k + 200], last)


def test_the_controller_swings_the_pendulum_up():
    controlled = swing_up.controller
    assert abs(controlled(swing_up.np.array([1.0, 0.0, 0.0]))[0]) < 1e-6, "no torque where it stands upright"
    assert controlled(swing_up.np.array([-1.0, 0.0, 1.0]))[0] == 2, "it pushes where the pendulum moves"
