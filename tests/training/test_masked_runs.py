"""Runs with action masks: an environment refuses forbidden actions, so each run that ends has taken none."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from resuming import parameters

import alfish
from alfish.__main__ import main
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.retrace import RetraceSAC
from alfish.environments import make_environment
from alfish.environments.toy import MaskedIdentity
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, QNetwork, Torso
from alfish.offline import OfflineBuffer
from alfish.specs import ActionMask
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller, SyncUnroller

SMALL = functools.partial(MLP, layers=(16,))
TORSO = functools.partial(Torso, mlp=SMALL)
MEMORY = functools.partial(TORSO, memory=functools.partial(GRU, size=8))
REPLAY = functools.partial(
    ReplayBatches, capacity=2000, batch_size=16, window_length=4, warmup_env_steps=100, updates_per_env_step=0.1
)
NETWORK = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
CRITIC = functools.partial(CriticEnsemble, layers=(16,))
RECIPES = {
    "PPO": functools.partial(PPO, network=NETWORK),
    "PPO with memory": functools.partial(PPO, network=functools.partial(NETWORK, actor_torso=MEMORY)),
    "A2C": functools.partial(A2C, network=NETWORK),
    "APPO": functools.partial(APPO, network=NETWORK),
    "DQN": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO), epsilon=0.3),
    "DQN with memory": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=MEMORY), epsilon=0.3),
    "SAC": functools.partial(RetraceSAC, actor_mlp=SMALL, critic=CRITIC),
    "RecurrentSAC": functools.partial(
        RecurrentSAC, memory=functools.partial(GRU, size=8), actor_mlp=SMALL, critic=CRITIC
    ),
}
ON_POLICY = {"PPO", "PPO with memory", "A2C", "APPO"}


def make(root_dir, name, num_env_steps=None, kind="discrete", size=20, length=25, num_envs=4, **settings):
    """A run on MaskedIdentity with `size` actions, of which a tenth is allowed."""
    game = functools.partial(MaskedIdentity, size, size * 9 // 10, kind, length)
    batches = functools.partial(EpochBatches, num_epochs=1) if name in ON_POLICY else REPLAY
    return Trainer(
        root_dir,
        **{
            "algorithm": RECIPES[name],
            "environment": functools.partial(make_environment, game, num_envs=num_envs, action_mask="info:action_mask"),
            "batches": batches,
            "unroll_length": 8,
            "listeners": [],
            **({} if num_env_steps is None else {"num_env_steps": num_env_steps}),
            "device": "cpu",
            **settings,
        },
    )


def run(trainer, num_episodes=8):
    trainer.train()
    evaluator = trainer.evaluator(num_episodes, 4, None)
    evaluation = evaluator.evaluate(num_episodes)
    evaluator.evaluate(num_episodes, sample=True)
    evaluator.close()
    trainer.close()
    return evaluation


CASES = [(name, "discrete") for name in RECIPES]
CASES += [("PPO", "multi_discrete"), ("PPO", "multi_binary"), ("APPO", "multi_discrete")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_run_takes_a_forbidden_action_in_warm_up_training_or_evaluation(tmp_path, name, kind):
    evaluation = run(make(tmp_path, name, 200, kind), 4)
    assert len(evaluation.returns) == 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_million_steps_take_no_forbidden_action(tmp_path, name, kind):
    batches = functools.partial(EpochBatches, num_epochs=1)
    if name not in ON_POLICY:
        batches = functools.partial(REPLAY, capacity=64_000, warmup_env_steps=50_000, updates_per_env_step=0.001)
    settings = {"batches": batches, "num_envs": 64, "unroll_length": 8}
    evaluation = run(make(tmp_path, name, 1_000_000, kind, size=10, length=100, **settings), 100)
    assert len(evaluation.returns) == 100


@pytest.mark.parametrize(
    ("name", "kind"),
    [("PPO", "multi_discrete"), ("PPO with memory", "discrete"), ("DQN", "discrete"), ("SAC", "discrete")],
)
def test_masked_policies_act_through_numpy_as_through_torch(tmp_path, name, kind):
    found = []
    for numpy_policy in (0, None):
        unroller = functools.partial(SyncUnroller, numpy_policy=numpy_policy)
        game = functools.partial(MaskedIdentity, 20, 18, kind, 25)
        wrappers = ["gymnasium.wrappers:FlattenObservation"]  # acting through numpy has no one-hot codes
        environment = functools.partial(
            make_environment, game, num_envs=4, action_mask="info:action_mask", wrappers=wrappers
        )
        trainer = make(tmp_path / str(numpy_policy), name, 200, unroller=unroller, environment=environment)
        trainer.train()
        assert not trainer.unroller.state_dict()["gave_up"], "it acts through numpy to the end"
        found.append(parameters(trainer))
        trainer.close()
    assert torch.allclose(*found, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "way", [pytest.param("interpreted", marks=pytest.mark.slow), pytest.param("compiled", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC"])
def test_updates_with_masks_in_graphs_equal_plain_updates(tmp_path, name, way, request):
    if way == "interpreted":
        request.getfixturevalue("interpreted")
    found = []
    for compile in (False, True):
        learner = functools.partial(Learner, compile=compile, max_grad_norm=0.5)
        trainer = make(tmp_path / str(compile), name, 400, learner=learner)
        trainer.train()
        found.append(parameters(trainer))
        trainer.close()
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC"])
def test_a_resumed_run_with_masks_is_bit_identical(tmp_path, name):
    """Seven unrolls of 7 rows end at row 49, the LAST of the tenth episode of 4 actions."""

    def started(where):
        unroller = functools.partial(SyncUnroller, numpy_policy=None)
        listeners = [CheckpointSaver(0)]
        budget = {"num_iterations": 9, "unroll_length": 7}
        return make(tmp_path / where, name, length=4, unroller=unroller, listeners=listeners, **budget)

    whole = started("whole")
    whole.train()
    cut = started("cut")  # which seeds the generators again
    cut.start()
    next(report for report in cut.iterate() if report.iterations == 7)
    cut.save()
    cut.close()
    assert not torch.equal(parameters(whole), parameters(cut))
    torch.manual_seed(99)
    resumed = started("cut")
    assert resumed.train().iterations == 9
    assert torch.equal(parameters(whole), parameters(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["APPO", "DQN"])
def test_workers_take_no_forbidden_action_and_lockstep_repeats_its_bits(tmp_path, name):
    found = []
    for where in ("first", "again"):
        unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep")
        trainer = make(tmp_path / where, name, 500, unroller=unroller, unroll_length=0 if name == "DQN" else 8)
        trainer.train()
        found.append(parameters(trainer))
        trainer.close()
    assert torch.equal(*found)


def test_exported_policies_obey_the_mask_input(tmp_path):
    trainer = make(tmp_path, "PPO", 200, listeners=[CheckpointSaver(0)])
    trainer.train()
    policy = alfish.load(tmp_path)
    mask = np.zeros((40, 20), np.int8)
    mask[np.arange(40), np.arange(40) % 20] = 1
    observation = {"observation": np.zeros(40, np.int64), "action_mask": mask}
    for sample in (False, True):
        assert policy.act(observation, batched=True, sample=sample, first=True).tolist() == [*range(20)] * 2
    with pytest.raises(UsageError, match="the policy's action depends on observation.action_mask"):
        policy.act({"observation": np.zeros(40, np.int64)}, batched=True, first=True)


def test_an_algorithm_that_ignores_masks_is_stopped_at_its_first_forbidden_action(tmp_path):
    class Careless(A2C):
        def rollout_step(self, time_step, state):
            return (
                super().rollout_step(time_step, state)._replace(output=time_step.observation["action_mask"].argmin(-1))
            )

    trainer = make(tmp_path, "A2C", 200, algorithm=Careless)
    with pytest.raises(UsageError, match="the action 0 after 0 steps of an episode is forbidden|the action . after 0"):
        trainer.train()


def test_the_example_of_the_page_trains_and_records(tmp_path, capsys):
    page = (Path(alfish.__file__).parent.parent / "docs" / "masks.md").read_text()
    (example,) = re.findall(r"^```gin\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.gin").write_text(example)
    root_dir, data = tmp_path / "run", tmp_path / "data"
    train = ["train", f"--gin_file={tmp_path / 'example.gin'}", f"--root_dir={root_dir}"]
    few = ["Trainer.num_env_steps=2500", "Evaluate.num_episodes=1", "EpochBatches.num_epochs=2"]
    few += ["Learner.learning_rate=3e-3"]
    assert main([*train, *(f"--gin_param={one}" for one in few)]) == 0
    assert main(["evaluate", f"--root_dir={root_dir}", "--num_episodes=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] > 5
    assert main(["record", f"--root_dir={root_dir}", "--num_episodes=3", f"--output={data}", "--sample"]) == 0
    buffer = OfflineBuffer([f"alfish:{data}"])
    assert isinstance(buffer.spaces.observation["action_mask"], ActionMask)
    rows = buffer.read(torch.zeros(1, dtype=torch.int64), torch.arange(100)[:, None])
    mask, action = rows.time_step.observation["action_mask"], rows.action
    assert mask.sum(-1).eq(20).all() and mask.gather(-1, action.unsqueeze(-1)).all()
