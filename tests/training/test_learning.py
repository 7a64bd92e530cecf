"""Shipped confs reach what they promise, by the shipped command.

One seed of three short confs is `slow`; the rest is `long`, and `make results` trains all seeds.
"""

import json

import pytest

from alfish.__main__ import main
from benchmarks.data_sets import WIDE

slow, long = pytest.mark.slow, pytest.mark.long
# Where torch's compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def trained_return(tmp_path, capsys, gin_file: str, seed: int, num_episodes: int = 20, changes=()) -> float:
    """The mean return of the last checkpoint, deterministic, on episodes 0.. of a training with `seed`."""
    root_dir = f"--root_dir={tmp_path / 'run'}"
    parameters = [f"--gin_param={one}" for one in (f"Trainer.seed={seed}", *changes)]
    assert main(["train", f"--gin_file={gin_file}", root_dir, *parameters]) == 0
    capsys.readouterr()
    assert main(["evaluate", root_dir, f"--num_episodes={num_episodes}", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["mean"]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=long if seed else slow) for seed in (0, 1, 2)])
def test_ppo_solves_cartpole(tmp_path, capsys, seed):
    changes = [] if seed else ["Trainer.num_env_steps=35_000"]  # 0.7 of the steps, in CI
    assert trained_return(tmp_path, capsys, "ppo_cartpole.gin", seed, changes=changes) >= 475


@long
def test_a2c_solves_cartpole(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "a2c_cartpole.gin", 0) >= 475


@long
def test_appo_solves_cartpole(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "appo_cartpole.gin", 0) >= 475


@long
def test_ppo_swings_the_pendulum_up(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "ppo_pendulum.gin", 0, num_episodes=100) >= -200


@long
def test_dqn_solves_cartpole(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "dqn_cartpole.gin", 0) >= 475


@long
def test_sac_swings_the_pendulum_up(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "sac_pendulum.gin", 0, num_episodes=100) >= -155


@long
def test_sac_learns_cartpole(tmp_path, capsys):
    # Seed 1 reaches 500, and others 443; see docs/results.md.
    assert trained_return(tmp_path, capsys, "sac_cartpole.gin", 1) >= 400


@long
def test_ppo_opens_the_door_in_a_grid_of_symbols(tmp_path, capsys):
    pytest.importorskip("minigrid", reason="ppo_minigrid_doorkey.gin needs minigrid, which is not installed")
    assert trained_return(tmp_path, capsys, "ppo_minigrid_doorkey.gin", 0) >= 0.95


@long
def test_sac_with_hindsight_moves_the_gripper_to_its_goal(tmp_path, capsys):
    words = "sac_fetch_reach.gin needs gymnasium_robotics, which is not installed"
    pytest.importorskip("gymnasium_robotics", reason=words)
    assert trained_return(tmp_path, capsys, "sac_fetch_reach.gin", 0) >= -2.0


WITHOUT_MEMORY = {
    "ppo_recall.gin": ["Torso.memory=None"],
    "appo_recall.gin": ["Torso.memory=None"],
    "dqn_recall.gin": ["Torso.memory=None", "ReplayBatches.burn_in=0"],
    "sac_recall.gin": ["Trainer.algorithm=@SAC", "ReplayBatches.burn_in=0"],
}


@pytest.mark.parametrize(("gin_file", "seed"), [
    pytest.param(gin_file, seed, marks=long if seed or gin_file in ("appo_recall.gin", "sac_recall.gin") else slow)
    for gin_file in WITHOUT_MEMORY
    for seed in (0, 1, 2)
])  # fmt: skip
def test_policies_with_memory_recall_what_they_saw(tmp_path, capsys, gin_file, seed):
    shorter = {"dqn_recall.gin": 6000, "ppo_recall.gin": 24_000}  # 0.4 and 0.6 of the steps, in CI
    changes = [f"Trainer.num_env_steps={shorter[gin_file]}"] if seed == 0 and gin_file in shorter else []
    assert trained_return(tmp_path, capsys, gin_file, seed, 100, changes) >= 0.95


@long
@pytest.mark.parametrize("gin_file", WITHOUT_MEMORY)
def test_policies_without_memory_cannot_recall_what_they_saw(tmp_path, capsys, gin_file):
    """One in four is what guessing gives."""
    assert trained_return(tmp_path, capsys, gin_file, 0, 100, WITHOUT_MEMORY[gin_file]) <= 0.6


@long
def test_the_example_algorithm_learns_cartpole(tmp_path, capsys):
    assert trained_return(tmp_path, capsys, "examples/reinforce_cartpole.gin", 0) >= 400


@long
def test_hindsight_finds_goals_that_chance_does_not(tmp_path, capsys):
    """15 bits: -6.5 is the best there is, -15 what a policy reaches that never saw a goal."""
    assert trained_return(tmp_path, capsys, "dqn_bitflip.gin", 0, num_episodes=100) >= -7.5


def offline_return(tmp_path, capsys, gin_file: str, data) -> float:
    settings = [f"OfflineBuffer.sources = ['alfish:{data}']"]
    return trained_return(tmp_path / "offline", capsys, gin_file, 0, num_episodes=100, changes=settings)


@long
def test_cloning_does_what_the_recorded_policy_did(tmp_path, capsys):
    expert = trained_return(tmp_path, capsys, "sac_pendulum.gin", 100, 100, WIDE)
    recorded = [f"--root_dir={tmp_path / 'run'}", f"--output={tmp_path / 'data'}"]
    assert main(["record", *recorded, "--num_episodes=100", "--seed=10000"]) == 0
    assert offline_return(tmp_path, capsys, "bc_pendulum.gin", tmp_path / "data") >= 1.05 * expert


@long
def test_offline_learning_beats_most_recorded_episodes(tmp_path, capsys):
    """As `benchmarks.data_sets` makes the replay of a slow learner, whose episodes return -1200 in the mean."""
    slow = ["Trainer.num_env_steps = 16_000", "ReplayBatches.capacity = 16_000"]
    slow += ["ReplayBatches.updates_per_env_step = 0.15", *WIDE]
    trained_return(tmp_path, capsys, "sac_pendulum.gin", 100, 1, slow)
    assert main(["export", f"--root_dir={tmp_path / 'run'}", f"--output={tmp_path / 'data'}"]) == 0
    assert offline_return(tmp_path, capsys, "iql_pendulum.gin", tmp_path / "data") >= -276
