"""Runs with vector rewards: one entry is a scalar, weights choose the policy, and changing them needs no new rows."""

import functools
import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from resuming import parameters
from torch import nn

from alfish import specs
from alfish.__main__ import main
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.bc import BC
from alfish.algorithms.dqn import DQN
from alfish.algorithms.iql import IQL
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.retrace import RetraceDQN, RetraceSAC
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import TimeStep
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, OfflineBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import AverageReturn, AverageReward
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, QNetwork, Torso
from alfish.networks.actor_critic import PolicyValue
from alfish.offline import OfflineBuffer
from alfish.parameters.schedules import Linear
from alfish.training.listener import Listener, Report
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.reward_weights import LagrangianWeights, ScheduledWeights
from alfish.training.trainer import Trainer
from alfish.transforms import RewardNormalizer, Transform
from alfish.unrollers import AsyncUnroller, SyncUnroller


class TradeOff(gymnasium.Env):
    """Two objectives, -(x - 1)^2 and -(x + 1)^2, of an action x in [-1, 1]; the best x for weights w is w_0 - w_1.

    An episode is `length` actions.

    Args:
      num_choices: the action is a choice among as many x, at even distances; 0: x itself.
      num_rewards: entries of the reward, 1 or 2; 0: the first as a number.
    """

    def __init__(self, num_choices=0, num_rewards=2, length=1):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(num_choices) if num_choices else spaces.Box(-1, 1, (1,), np.float32)
        self._choices, self._num_rewards, self._length, self._t = num_choices, num_rewards, length, 0
        if num_rewards:
            self.reward_space = spaces.Box(-4, 0, (num_rewards,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._observation(), {}

    def step(self, action):
        x = 2 * int(action) / (self._choices - 1) - 1 if self._choices else float(action[0])
        rewards = np.float32([-((x - 1) ** 2), -((x + 1) ** 2)])
        self._t += 1
        reward = rewards[: self._num_rewards] if self._num_rewards else float(rewards[0])
        return self._observation(), reward, False, self._t >= self._length, {}

    def _observation(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


SMALL = functools.partial(MLP, layers=(16,))
TORSO = functools.partial(Torso, mlp=SMALL)
MEMORY = functools.partial(TORSO, memory=functools.partial(GRU, size=8))
CRITIC = functools.partial(CriticEnsemble, layers=(16,))
Q_NETWORK = functools.partial(QNetwork, torso=TORSO, dueling=True)
ACTOR_CRITIC = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
REPLAY = functools.partial(
    ReplayBatches, capacity=2000, batch_size=16, window_length=3, warmup_env_steps=50, updates_per_env_step=0.2
)
RECIPES = {
    "PPO": functools.partial(PPO, network=ACTOR_CRITIC, value_clip_range=0.2),
    "A2C": functools.partial(A2C, network=ACTOR_CRITIC),
    "APPO": functools.partial(APPO, network=ACTOR_CRITIC),
    "DQN": functools.partial(DQN, q_network=Q_NETWORK),
    "DQN with memory": functools.partial(RetraceDQN, q_network=functools.partial(QNetwork, torso=MEMORY)),
    "SAC": functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC),
    "SAC of choices": functools.partial(RetraceSAC, actor_mlp=SMALL, critic=CRITIC),
    "RecurrentSAC": functools.partial(
        RecurrentSAC, memory=functools.partial(GRU, size=8), actor_mlp=SMALL, critic=CRITIC
    ),
    "TD3": functools.partial(TD3, critic=CRITIC),
}
ON_POLICY = {"PPO", "A2C", "APPO"}
SHOWN = {"PPO", "DQN", "SAC"}  # in fast tests; the others in longer ones
GRAPHS = {"SAC"}  # the same, where updates are graphs
CHOOSES = {"DQN", "DQN with memory", "SAC of choices"}


def make(root_dir, name, num_rewards=2, length=4, compile=False, algorithm=None, env_settings=(), **settings):
    env_kwargs = {"num_choices": 5 if name in CHOOSES else 0, "num_rewards": num_rewards, "length": length}
    environment = functools.partial(make_environment, TradeOff, num_envs=4, env_kwargs=env_kwargs, **dict(env_settings))
    return Trainer(
        root_dir,
        **{
            "algorithm": algorithm or RECIPES[name],
            "environment": environment,
            "batches": functools.partial(EpochBatches, num_epochs=1) if name in ON_POLICY else REPLAY,
            "learner": functools.partial(Learner, compile=compile, max_grad_norm=0.5),
            "unroll_length": 8,
            "listeners": [],
            **({} if "num_iterations" in settings else {"num_env_steps": 200}),
            "device": "cpu",
            **settings,
        },
    )


def trained(*arguments, **settings):
    trainer = make(*arguments, **settings)
    trainer.train()
    trainer.close()
    return trainer


WAYS = [(name, compile) for name in RECIPES for compile in (False, True)]


@pytest.mark.parametrize(
    ("name", "compile"),
    [pytest.param(*way, marks=pytest.mark.slow if way[1] and way[0] not in GRAPHS else ()) for way in WAYS],
)
def test_one_entry_vector_rewards_equal_scalar_rewards_bit_for_bit(tmp_path, name, compile, interpreted):
    settings = {"compile": compile, "num_env_steps": 120}
    scalar, vector = (trained(tmp_path / str(n), name, n, **settings) for n in (0, 1))
    assert vector.algorithm.reward_weights.tolist() == [1] and scalar.algorithm.reward_weights is None
    assert torch.equal(parameters(scalar), parameters(vector))


class Apart(nn.Module):
    """The networks of a scalar reward, one for each of two entries, which share no parameter.

    The second is made without drawing from the generator, so that the first and all later draws are those of a run with
    a scalar reward.
    """

    def __init__(self, make):
        super().__init__()
        self.first = make()
        with torch.random.fork_rng(devices=[]):
            self.second = make()

    def initial_state(self, batch_size):
        return self.first.initial_state(batch_size)


def beside(first, second):
    """Stacks two values, whose gradients are contiguous: some libraries round products of other strides differently."""
    for value in (first, second):
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient.contiguous())
    return torch.stack([first, second], -1)


class TwoQNetworks(Apart):
    def __init__(self, observation_spec, num_actions, num_values):
        assert num_values == 2
        super().__init__(functools.partial(Q_NETWORK, observation_spec, num_actions))

    def forward(self, time_step, state):
        first, state = self.first(time_step, state)
        return beside(first, self.second(time_step, None)[0]), state


class TwoCritics(Apart):
    """The policy is that of the first network."""

    def __init__(self, observation_spec, action_spec, reward_spec):
        assert reward_spec.shape == (2,)
        super().__init__(functools.partial(ACTOR_CRITIC, observation_spec, action_spec, specs.reward_spec()))

    def policy(self, time_step, state):
        return self.first.policy(time_step, state)

    def value(self, time_step, state):
        return beside(*(each.value(time_step, state) for each in (self.first, self.second)))

    def forward(self, time_step, state):
        (policy, value, _), state = self.first(time_step, state)
        return PolicyValue(policy, beside(value, self.second.value(time_step, None))), state


@pytest.mark.parametrize("name", ["DQN", "PPO"])
def test_weights_of_1_and_0_train_like_the_first_entry_bit_for_bit(tmp_path, name):
    """Where the values of both entries share no parameter, and no clipped norm of gradients."""
    both = {"DQN": {"q_network": TwoQNetworks}, "PPO": {"network": TwoCritics}}[name]
    weighted = functools.partial(RECIPES[name], reward_weights=[1.0, 0.0], **both)
    settings = {"learner": functools.partial(Learner, compile=False, learning_rate=1e-2), "num_env_steps": 300}
    scalar = trained(tmp_path / "scalar", name, num_rewards=0, **settings)
    vector = trained(tmp_path / "vector", name, num_rewards=2, algorithm=weighted, **settings)
    of_first = dict(vector.algorithm.named_parameters())
    for path, expected in scalar.algorithm.named_parameters():
        assert torch.equal(of_first[path.replace("network.", "network.first.", 1)], expected), path
    assert sum(leaf.numel() for leaf in of_first.values()) > parameters(scalar).numel()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_updates_with_two_entries_equal_plain_updates(tmp_path, name):
    plain, made = (trained(tmp_path / str(compile), name, compile=compile) for compile in (False, True))
    assert torch.allclose(parameters(plain), parameters(made), atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHOWN else pytest.mark.long) for name in RECIPES]
)
def test_interpreted_updates_with_two_entries_equal_plain_updates(tmp_path, name, interpreted):
    settings = {"num_env_steps": 120}
    plain, made = (trained(tmp_path / str(compile), name, compile=compile, **settings) for compile in (False, True))
    assert torch.allclose(parameters(plain), parameters(made), atol=1e-5)


LEARNS = {
    "PPO": {"num_env_steps": 12_000, "unroll_length": 64, "learning_rate": 3e-3},
    "DQN": {"num_env_steps": 2000, "learning_rate": 1e-2},
    "SAC": {"num_env_steps": 3000, "learning_rate": 1e-2},
    "TD3": {"num_env_steps": 2000, "learning_rate": 1e-2},
}


FIRST, SECOND = (0.75, 0.25), (0.25, 0.75)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("DQN", FIRST),
        pytest.param("DQN", SECOND, marks=pytest.mark.slow),
        *(pytest.param(name, FIRST, marks=pytest.mark.slow) for name in LEARNS if name != "DQN"),
        *(pytest.param(name, SECOND, marks=pytest.mark.long) for name in LEARNS if name != "DQN"),
    ],
)
def test_the_best_action_depends_on_the_reward_weights(tmp_path, name, weights):
    settings = dict(LEARNS[name])
    learner = functools.partial(Learner, learning_rate=settings.pop("learning_rate"), compile=False)
    algorithm = functools.partial(RECIPES[name], reward_weights=list(weights), gamma=0.0)
    batches = EpochBatches if name in ON_POLICY else REPLAY
    trainer = trained(tmp_path, name, length=1, algorithm=algorithm, learner=learner, batches=batches, **settings)
    x = chosen(trainer, 32).mean()
    assert abs(x - (weights[0] - weights[1])) < 0.15
    if name == "DQN":  # its values are those of each reward, so it uses new weights at once
        for new, x in (((1.0, 0.0), 1), ((0.0, 1.0), -1)):
            trainer.algorithm.reward_weights.copy_(torch.tensor(new))
            assert (chosen(trainer, 32) == x).all()


def chosen(trainer, number):
    """What the policy chooses, x in [-1, 1], for random observations."""
    observation = torch.rand(number, 2) * 2 - 1
    algorithm = trainer.algorithm
    kinds = torch.ones(number, dtype=torch.int32)
    rows = TimeStep(kinds, torch.zeros(number, 2), torch.ones(number), observation, None, kinds)
    with torch.no_grad():
        action = algorithm.predict_step(rows, algorithm.initial_state(number)).output
    return action.squeeze(-1) if action.is_floating_point() else action.float() / 2 - 1


@pytest.mark.slow
def test_sac_follows_new_weights_on_its_old_rows(tmp_path):
    learner = functools.partial(Learner, learning_rate=1e-2, compile=False)
    algorithm = functools.partial(RECIPES["SAC"], reward_weights=[1.0, 0.0], gamma=0.0)
    settings = {"num_iterations": 120, "interaction_env_steps": 1920, "unroll_length": 8}  # acting ends after 60
    trainer = make(tmp_path, "SAC", length=1, algorithm=algorithm, learner=learner, **settings)
    trainer.start()
    for report in trainer.iterate():
        if report.iterations == 60:
            before = chosen(trainer, 32).mean()
            trainer.algorithm.reward_weights.copy_(torch.tensor([0.0, 1.0]))
    assert report.env_steps == 1920
    assert before > 0.5 and chosen(trainer, 32).mean() < -0.5
    trainer.close()


class Frozen(DQN):
    """Always the same action, so that returns are known."""

    def random_action(self, time_step):
        return torch.zeros(4, dtype=torch.int64)

    def rollout_step(self, time_step, state):
        return super().rollout_step(time_step, state)._replace(output=torch.zeros(4, dtype=torch.int64))

    def predict_step(self, time_step, state):
        return super().predict_step(time_step, state)._replace(output=torch.zeros(8, dtype=torch.int64))


NAMED = {"rewards": ["right", "left"]}


def results(trainer):
    return trainer.metrics.results()


class Recorder(Listener):
    """Keeps scalars and weights of each iteration."""

    def __init__(self):
        self.scalars, self.weights = {}, []

    def after_iteration(self, run, report):
        self.scalars |= report.scalars
        self.weights.append(run.algorithm.reward_weights.tolist())


def test_returns_are_reported_by_name_and_weighted(tmp_path):
    algorithm = functools.partial(Frozen, reward_weights=[0.5, 2.0])
    settings = {"listeners": [Evaluate(0, 3)], "env_settings": NAMED, "num_env_steps": 64}
    trainer = make(tmp_path, "DQN", length=4, algorithm=algorithm, **settings)
    trainer.train()
    found = results(trainer)
    assert found["average_return/right"] == -16 and found["average_return/left"] == 0
    assert found["average_return"] == -8 and found["average_reward/right"] == -4
    (path,) = (tmp_path / "eval").iterdir()
    assert path.read_text().splitlines()[:2] == [
        "episode,seed,return,length,return/right,return/left",
        "0,0,-8.0,4,-16.0,0.0",
    ]  # noqa: E501


def test_the_weighted_return_has_the_weights_of_its_time(tmp_path):
    algorithm = functools.partial(Frozen, reward_weights=[1.0, 0.0])
    trainer = make(tmp_path, "DQN", length=4, algorithm=algorithm, num_iterations=2, unroll_length=10)
    trainer.start()
    for report in trainer.iterate():
        if report.iterations == 1:  # two episodes of 5 rows each
            trainer.algorithm.reward_weights.copy_(torch.tensor([0.5, 0.0]))
    found = results(trainer)
    assert found["average_return"] == -12 and found["average_return/0"] == -16
    trainer.close()


def test_scheduled_weights_follow_progress_and_are_saved(tmp_path):
    listeners = [CheckpointSaver(0), recorder := Recorder(), ScheduledWeights([Linear(1.0, 0.0), 0.5])]
    trained(tmp_path, "A2C", listeners=listeners, num_iterations=4)
    assert recorder.weights == [[0.75, 0.5], [0.5, 0.5], [0.25, 0.5], [0.0, 0.5]]
    again = make(tmp_path, "A2C", listeners=[CheckpointSaver(0)], num_iterations=4)
    again.load_policy()
    assert again.algorithm.reward_weights.tolist() == [0.0, 0.5]


def test_lagrangian_weights_rise_below_the_threshold_and_fall_above(tmp_path):
    algorithm = functools.partial(Frozen, reward_weights=[1.0, 1.0])
    listeners = [recorder := Recorder(), LagrangianWeights({"right": -2.0, "left": -1.0}, rate=0.5)]
    settings = {"listeners": listeners, "env_settings": NAMED, "num_iterations": 2, "summary_period": 1}
    batches = functools.partial(REPLAY, warmup_env_steps=32)
    trainer = trained(tmp_path, "DQN", length=4, algorithm=algorithm, batches=batches, **settings)
    expected = np.exp(2 * 0.5 * np.array([-2.0 + 4, -1.0 - 0]))
    np.testing.assert_allclose(trainer.algorithm.reward_weights.numpy(), expected, rtol=1e-5)
    assert recorder.scalars["reward_weights/right"] == pytest.approx(expected[0], rel=1e-5)


def test_a_pause_changes_no_lagrangian_weight(tmp_path):
    settings = {"listeners": [LagrangianWeights({"right": -2.0}), CheckpointSaver()], "env_settings": NAMED}
    trainer = trained(tmp_path, "PPO", **settings, num_iterations=4, summary_period=10**6, stop_at=40)
    assert trainer.clock.paused and trainer.algorithm.reward_weights.tolist() == [1.0, 1.0]
    trainer = trained(tmp_path, "PPO", **settings, num_iterations=4, summary_period=10**6)
    assert trainer.clock.finished and trainer.algorithm.reward_weights.tolist() != [1.0, 1.0]


def test_lagrangian_weights_stay_positive_and_rise_again():
    weights, listener = torch.ones(1), LagrangianWeights({"a": 1.0}, rate=1.0, min_weight=0.01)
    for mean, expected in [(9.0, math.exp(-8)), (9.0, 0.01), (-9.0, 0.01 * math.exp(10))]:
        scalars = {"metrics/average_reward/a": mean, "metrics/average_reward/a/n": 5.0}
        listener.change(weights, ["a"], Report(*[0] * 6, finished=False, scalars=scalars))
        assert weights.item() == pytest.approx(max(expected, 0.01), rel=1e-4)
    listener.check(["a"], weights)
    with pytest.raises(UsageError, match="min_weight is 2.0; it must be at most max_weight, which is 1.0"):
        LagrangianWeights({"a": 1.0}, min_weight=2.0, max_weight=1.0)


@pytest.mark.parametrize(("name", "kind"), [("PPO", "scheduled"), ("DQN", "lagrangian")])
def test_a_resumed_run_with_changing_weights_is_bit_identical(tmp_path, name, kind):
    """Seven unrolls of 7 rows end at row 49, the LAST of the tenth episode of 4 actions."""

    def started(where, **more):
        changing = ScheduledWeights([Linear(1.0), 0.5]) if kind == "scheduled" else LagrangianWeights({"0": -1.0})
        settings = {"unroller": functools.partial(SyncUnroller, numpy_policy=None), "summary_period": 20}
        listeners = [CheckpointSaver(0), changing]
        return make(tmp_path / where, name, listeners=listeners, num_iterations=9, unroll_length=7, **settings, **more)

    whole = started("whole")
    whole.train()
    assert started("cut", stop_at=150).train().iterations == 7
    torch.manual_seed(99)
    resumed = started("cut")
    assert resumed.train().iterations == 9
    assert torch.equal(whole.algorithm.reward_weights, resumed.algorithm.reward_weights)
    assert torch.equal(parameters(whole), parameters(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["APPO", "DQN"])
def test_workers_use_new_weights_and_lockstep_is_reproducible(tmp_path, name):
    found = []
    for where in ("first", "again"):
        unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep")
        listeners = [ScheduledWeights([Linear(1.0), Linear(0.0, 1.0)])]
        settings = {"unroller": unroller, "unroll_length": 0 if name == "DQN" else 8, "listeners": listeners}
        trainer = trained(tmp_path / where, name, **settings)
        found.append(parameters(trainer))
    assert torch.equal(*found)


class Total(Transform):
    """Adds up the entries of the reward."""

    def __init__(self, observation_spec, reward_spec):
        super().__init__(observation_spec, reward_spec)
        self.reward_spec = specs.reward_spec()

    def transform(self, time_step, state):
        return time_step._replace(reward=time_step.reward.sum(-1))


@pytest.mark.parametrize("unroller", [
    SyncUnroller,
    pytest.param(functools.partial(AsyncUnroller, num_workers=1, mode="lockstep"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_transform_may_make_a_number_of_a_vector_reward(tmp_path, unroller):
    trainer = trained(tmp_path, "APPO", transforms=[Total], unroller=unroller)
    policy = trainer.policy()
    observation = np.zeros(2, np.float32)
    first = policy.act(observation)
    assert policy.act(observation, reward=np.float32([-1, -2])) == pytest.approx(first)


def test_rewards_may_be_normalized_each_by_its_own_spread(tmp_path):
    trainer = trained(tmp_path, "PPO", transforms=[RewardNormalizer])
    assert torch.isfinite(parameters(trainer)).all()


@pytest.mark.parametrize(("listener", "words"), [
    (ScheduledWeights([1.0]), r"has 1 entries, but the reward has 2 \(0, 1\); it must have one weight for each"),
    (LagrangianWeights({"2": 1.0}), "has '2', but the entries of the reward are 0, 1"),
])  # fmt: skip
def test_listeners_that_do_not_fit_the_reward_are_refused(tmp_path, listener, words):
    with pytest.raises(UsageError, match=words):
        make(tmp_path, "PPO", listeners=[listener]).start()


def test_a_run_with_the_rewards_in_another_order_is_not_continued(tmp_path):
    trained(tmp_path, "PPO", listeners=[CheckpointSaver(0)], env_settings=NAMED)
    other = {"rewards": NAMED["rewards"][::-1]}
    with pytest.raises(UsageError, match="trained with the rewards right, left, but here they are left, right; list"):
        make(tmp_path, "PPO", listeners=[CheckpointSaver(0)], env_settings=other, num_iterations=9).start()


def test_lagrangian_weights_need_the_metric_that_they_read(tmp_path):
    settings = {"listeners": [LagrangianWeights({"1": 0.0})], "metrics": [AverageReturn(), AverageReward(name="mean")]}
    with pytest.raises(
        UsageError, match="reads the metric average_reward, but the metrics are average_return, mean; add @"
    ):
        make(tmp_path, "PPO", **settings).start()


def test_a_weight_of_0_and_a_scalar_reward_are_refused_by_listeners(tmp_path):
    algorithm = functools.partial(PPO, reward_weights=[1.0, 0.0])
    with pytest.raises(UsageError, match="multiplies the weight of '1', which is 0; set a positive initial"):
        make(tmp_path / "a", "PPO", algorithm=algorithm, listeners=[LagrangianWeights({"1": 0.0})]).start()
    with pytest.raises(
        UsageError, match="ScheduledWeights changes the weights of a vector reward, but PPO has no weights"
    ):
        make(tmp_path / "b", "PPO", 0, listeners=[ScheduledWeights([1.0])]).start()
    with pytest.raises(
        UsageError, match="ScheduledWeights would have no effect: the reward has one entry, which includes"
    ):
        make(tmp_path / "c", "SAC", 1, listeners=[ScheduledWeights([1.0])]).start()


def test_iql_requires_a_scalar_reward(tmp_path):
    with pytest.raises(UsageError, match="IQL requires a scalar reward, but the environment's reward is a vector of 2"):
        make(tmp_path, "SAC", algorithm=IQL)


@pytest.mark.parametrize("algorithm", [BC, SAC])
def test_recorded_vector_rewards_are_trained_on_and_others_refused(tmp_path, algorithm, capsys):
    trained(tmp_path / "run", "PPO", listeners=[CheckpointSaver(0)], env_settings=NAMED)
    data = tmp_path / "data"
    assert main(["record", f"--root_dir={tmp_path / 'run'}", "--num_episodes=5", f"--output={data}"]) == 0
    batches = functools.partial(OfflineBatches, functools.partial(OfflineBuffer, [f"alfish:{data}"]), batch_size=8)
    settings = {"batches": batches, "num_env_steps": None, "num_updates": 20, "unroll_length": 1}
    algorithm = RECIPES["SAC"] if algorithm is SAC else algorithm
    trainer = trained(tmp_path / "offline", "SAC", algorithm=algorithm, **settings)
    assert torch.isfinite(parameters(trainer)).all()
    if algorithm is RECIPES["SAC"]:
        with pytest.raises(
            UsageError, match="the rewards of .* have 2 entries, but the environment's rewards have 1 entries"
        ):
            trained(tmp_path / "other", "SAC", 1, algorithm=algorithm, **settings)
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={tmp_path / 'run'}", "--num_episodes=2", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["by_objective"]) == {"right", "left"}
