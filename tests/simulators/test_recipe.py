"""Recipes of rsl_rl as gin files. The two configurations have the fields and numbers of published ones."""

import dataclasses
import json
import math
import re
import sys
from types import SimpleNamespace

import gymnasium
import pytest
from fake_libraries import TASK, install_isaac_lab, install_mjlab

from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.simulators import recipe

# Isaac Lab 2.3, G1FlatPPORunnerCfg with the symmetry of G1FlatSymmetryPPORunnerCfg, as its agent.yaml has it.
G1 = """\
seed: 42
device: cuda:0
num_steps_per_env: 24
max_iterations: 1500
empirical_normalization: false
obs_groups: {}
clip_actions: null
save_interval: 50
experiment_name: g1_flat
run_name: ''
logger: tensorboard
neptune_project: isaaclab
wandb_project: isaaclab
resume: false
load_run: .*
load_checkpoint: model_.*.pt
class_name: OnPolicyRunner
policy:
  class_name: ActorCritic
  init_noise_std: 1.0
  noise_std_type: scalar
  state_dependent_std: false
  actor_obs_normalization: false
  critic_obs_normalization: false
  actor_hidden_dims: !!python/tuple
  - 256
  - 128
  - 128
  critic_hidden_dims: [256, 128, 128]
  activation: elu
algorithm:
  class_name: PPO
  num_learning_epochs: 5
  num_mini_batches: 4
  learning_rate: 0.001
  schedule: adaptive
  gamma: 0.99
  lam: 0.95
  entropy_coef: 0.008
  desired_kl: 0.01
  max_grad_norm: 1.0
  value_loss_coef: 1.0
  use_clipped_value_loss: true
  clip_param: 0.2
  normalize_advantage_per_mini_batch: false
  rnd_cfg: null
  symmetry_cfg:
    use_data_augmentation: true
    use_mirror_loss: true
    data_augmentation_func: isaaclab_tasks.symmetry:compute
    mirror_loss_coeff: 0.1
"""
# The form of rsl_rl 5, with groups that actor and critic read apart, and other numbers.
ROBOT = {
    "seed": 7,
    "num_steps_per_env": 32,
    "max_iterations": 300,
    "clip_actions": 2.0,
    "save_interval": 10,
    "obs_groups": {"actor": ["policy"], "critic": ["policy", "critic"]},
    "check_for_nan": True,
    "actor": {
        "class_name": "MLPModel",
        "hidden_dims": [512, 256],
        "activation": "relu",
        "obs_normalization": True,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "log"},
    },
    "critic": {"class_name": "MLPModel", "hidden_dims": [128], "activation": "mish", "obs_normalization": True},
    "algorithm": {
        "class_name": "rsl_rl.algorithms:PPO",
        "optimizer": "adamw",
        "num_learning_epochs": 3,
        "num_mini_batches": 8,
        "learning_rate": 5e-4,
        "schedule": "fixed",
        "gamma": 0.97,
        "lam": 0.9,
        "entropy_coef": 0.002,
        "max_grad_norm": 0.5,
        "value_loss_coef": 0.25,
        "use_clipped_value_loss": False,
        "clip_param": 0.1,
        "normalize_advantage_per_mini_batch": True,
        "share_cnn_encoders": False,
        "new_in_rsl_rl_9": 3,
    },
}


def settings(text):
    """The bindings of a gin file, as text, and the lines of its last part."""
    bindings, _, comments = text.partition("\n# Without a counterpart:\n")
    return dict(re.findall(r"^([\w/.]+) = (.*?)(?:  # .*)?$", bindings, re.MULTILINE)), comments


@pytest.fixture
def g1(tmp_path):
    pytest.importorskip("yaml", reason="pip install pyyaml")
    path = tmp_path / "agent.yaml"
    path.write_text(G1)
    return path


def test_each_number_of_a_recipe_of_isaac_lab(g1):
    found, comments = settings(recipe.gin_file(recipe.read(str(g1)), 4096, "Isaac-Velocity-Flat-G1-v0"))
    assert found == {
        "Trainer.algorithm": "@PPO",
        "Trainer.environment": "@make_environment",
        "Trainer.batches": "@EpochBatches",
        "Trainer.learner": "@Learner",
        "make_environment.env_id": "@IsaacLab",
        "make_environment.num_envs": "4096",
        "IsaacLab.task": "'Isaac-Velocity-Flat-G1-v0'",
        "Trainer.unroll_length": "24",
        "Trainer.num_iterations": "1500",
        "Trainer.seed": "42",
        "Trainer.device": "'cuda:0'",
        "CheckpointSaver.period": str(50 * 24 * 4096),
        "Trainer.listeners": "[@CheckpointSaver(), @Summaries()]",
        "Trainer.extra_metrics": "[@SimulatorLog()]",
        "EpochBatches.num_epochs": "5",
        "EpochBatches.minibatch_size": "24576",
        "PPO.gamma": "0.99",
        "PPO.lambda_": "0.95",
        "PPO.clip_range": "0.2",
        "PPO.value_clip_range": "0.2",
        "PPO.value_coef": "2.0",
        "PPO.entropy_coef": "0.008",
        "Learner.learning_rate": "@KLAdaptive()",
        "KLAdaptive.initial": "0.001",
        "KLAdaptive.target": "0.01",
        "KLAdaptive.factor": "1.5",
        "KLAdaptive.lowest": "1e-05",
        "KLAdaptive.highest": "0.01",
        "Learner.max_grad_norm": "1.0",
        "Learner.optimizer": "@optimizers.Adam",
        "optimizers.Adam.eps": "1e-08",
        "ActorCritic.actor_torso": "@actor/Torso",
        "ActorCritic.critic_torso": "@critic/Torso",
        "actor/MLP.layers": "(256, 128, 128)",
        "actor/MLP.activation": "'elu'",
        "critic/MLP.layers": "(256, 128, 128)",
        "critic/MLP.activation": "'elu'",
        "PolicyHead.initial_log_std": "0.0",
        "Trainer.transforms": "[]",
    }
    named = re.findall(r"^# ([\w.\[\]' ]+?) = ", comments, re.MULTILINE)
    assert sorted(named) == [
        "actor std_type", "algorithm.symmetry_cfg", "experiment_name", "load_checkpoint", "load_run", "logger",
        "neptune_project", "wandb_project",
    ]  # fmt: skip
    assert "SymmetricPPO" in comments and "initial weights" in comments


def test_each_number_of_a_recipe_of_rsl_rl_5():
    found, comments = settings(recipe.gin_file(ROBOT, 1024, environment="Mjlab"))
    expected = {
        "make_environment.env_id": "@Mjlab",
        "make_environment.num_envs": "1024",
        "make_environment.action_bounds": "2.0",
        "Mjlab.groups": "['policy', 'critic']",
        "Trainer.unroll_length": "32",
        "Trainer.num_iterations": "300",
        "Trainer.seed": "7",
        "CheckpointSaver.period": str(10 * 32 * 1024),
        "EpochBatches.num_epochs": "3",
        "EpochBatches.minibatch_size": "4096",
        "PPO.gamma": "0.97",
        "PPO.lambda_": "0.9",
        "PPO.clip_range": "0.1",
        "PPO.value_clip_range": "None",
        "PPO.value_coef": "0.5",
        "PPO.entropy_coef": "0.002",
        "Learner.learning_rate": "0.0005",
        "Learner.max_grad_norm": "0.5",
        "optimizers.Adam.weight_decay": "0.01",
        "actor/MLP.layers": "(512, 256)",
        "actor/MLP.activation": "'relu'",
        "actor/Encoder.leaves": "{'critic': None}",
        "critic/MLP.layers": "(128,)",
        "critic/MLP.activation": "'elu'",
        "PolicyHead.initial_log_std": repr(math.log(0.25)),
        "Trainer.transforms": "[@ObservationNormalizer]",
        "ObservationNormalizer.clip": "None",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not {"KLAdaptive.initial", "critic/Encoder.leaves", "Mjlab.task", "Trainer.device"} & found.keys()
    named = re.findall(r"^# ([\w.\[\]' ]+?) = ", comments, re.MULTILINE)
    assert sorted(named) == [
        "algorithm.new_in_rsl_rl_9", "algorithm.normalize_advantage_per_mini_batch", "check_for_nan",
        "critic.activation",
    ]  # fmt: skip
    assert "clip the gradients of actor and critic apart" in re.sub(r"\s+", " ", comments).replace("clips", "clip")


def test_each_torso_has_its_own_memory():
    policy = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_dim": 32, "rnn_num_layers": 2}
    runner = {"num_steps_per_env": 8, "policy": policy, "algorithm": {"num_mini_batches": 4, "num_learning_epochs": 1}}
    found, comments = settings(recipe.gin_file(runner, 16))
    assert found["actor/Torso.memory"] == found["critic/Torso.memory"] == "@StackedMemory"
    assert found["actor/StackedMemory.layers"] == "[@GRU, @GRU]" and found["actor/GRU.size"] == "32"
    assert "rnn" not in comments
    policy["rnn_num_layers"] = 1
    assert settings(recipe.gin_file(runner, 16))[0]["critic/Torso.memory"] == "@GRU"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": {"class_name": "Distillation"}}, "the algorithm is Distillation; only PPO"),
        ({"algorithm": None}, "has no `algorithm`"),
        ({"num_steps_per_env": None}, "has no num_steps_per_env"),
        (
            {"actor": {**ROBOT["actor"], "distribution_cfg": {"init_std": 0.0}}},
            "init_std is 0.0",
        ),
        ({"num_steps_per_env": 33}, "8 minibatches do not divide 33 steps of 3 environments; set --num_envs"),
    ],
)
def test_a_recipe_of_another_algorithm_is_refused(change, words):
    with pytest.raises(UsageError, match=words):
        recipe.gin_file({**ROBOT, **change}, 3)


def test_a_file_that_is_not_a_configuration_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read .*logs/rsl_rl/EXPERIMENT/RUN/params"):
        recipe.read(str(tmp_path / "agent.yaml"))
    for text, words in (("[1]", "contains a list"), ("{", "has no configuration")):
        (tmp_path / "agent.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            recipe.read(str(tmp_path / "agent.json"))


def test_without_yaml_the_command_is_named(g1, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="pip install pyyaml"):
        recipe.read(str(g1))


def test_the_command_writes_a_file_that_trains(tmp_path, monkeypatch, capsys):
    install_isaac_lab(monkeypatch)
    runner = {**ROBOT, "num_steps_per_env": 4, "algorithm": {**ROBOT["algorithm"], "schedule": "adaptive"}}
    (tmp_path / "agent.json").write_text(json.dumps(runner))
    assert main(["from-rsl-rl", str(tmp_path / "agent.json"), f"--task={TASK}", "--num_envs=4"]) == 0
    conf = tmp_path / "robot.gin"
    conf.write_text(capsys.readouterr().out)
    few = ("Trainer.num_iterations=2", "Trainer.device='cpu'", "Learner.compile=False")
    command = ["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}"]
    assert main([*command, *(f"--gin_param={setting}" for setting in few)]) == 0


def test_the_configuration_of_a_task_of_mjlab(monkeypatch, capsys):
    fields = [
        (name, object, dataclasses.field(default_factory=lambda value=value: value)) for name, value in ROBOT.items()
    ]
    runner = dataclasses.make_dataclass("Runner", fields)
    install_mjlab(monkeypatch)
    monkeypatch.setattr(sys.modules["mjlab.tasks.registry"], "load_rl_cfg", lambda task: runner(), raising=False)
    assert main(["from-rsl-rl", TASK, "--environment=Mjlab", "--num_envs=1024"]) == 0
    assert capsys.readouterr().out.rstrip() == recipe.gin_file(ROBOT, 1024, TASK, "Mjlab").rstrip()
    assert main(["from-rsl-rl", "Othr", "--environment=Mjlab"]) == 2
    assert "did you mean 'Other'" in capsys.readouterr().err


@pytest.mark.parametrize("version", [2, 3])
def test_the_configuration_of_a_task_of_isaac_lab(monkeypatch, version):
    launched = install_isaac_lab(monkeypatch, version=version)
    with pytest.raises(UsageError, match="Isaac Lab has no configuration of rsl_rl for 'Fake-Task-v0'"):
        recipe.of_task(TASK, "IsaacLab")
    monkeypatch.setitem(gymnasium.registry[TASK].kwargs, "rsl_rl_cfg_entry_point", "module:Runner")
    found = SimpleNamespace(to_dict=lambda: ROBOT)
    monkeypatch.setattr(
        sys.modules["isaaclab_tasks.utils"], "load_cfg_from_registry",
        lambda task, key: found if (task, key) == (TASK, "rsl_rl_cfg_entry_point") else None, raising=False,
    )  # fmt: skip
    assert recipe.of_task(TASK, "IsaacLab") is ROBOT
    assert len(launched) == (1 if version == 2 else 0)
    with pytest.raises(UsageError, match="is not a .yaml or .json file, and RslRl has no tasks"):
        recipe.of_task(TASK, "RslRl")


@pytest.mark.parametrize("arguments", [(), ("a.json", "b.json")])
def test_the_command_takes_one_file(arguments, capsys):
    assert main(["from-rsl-rl", *arguments]) == 2
    assert "takes one file" in capsys.readouterr().err
