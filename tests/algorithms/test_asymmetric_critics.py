"""Asymmetric critics: leaves that the critic sees and the actor does not."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import alfish
from alfish import nest, specs
from alfish.__main__ import main
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.configuration.opening import open_run
from alfish.data import Experience, StepType, TimeStep
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, DeterministicActor, Encoder, Torso
from alfish.training.evaluator import make_evaluator
from alfish.training.policy import Policy
from alfish.transforms import ObservationNormalizer, Transforms

SMALL = functools.partial(MLP, layers=(8,))
BLIND = functools.partial(Encoder, leaves={"hidden": None})
OBSERVATION = spaces.Dict(
    seen=spaces.Box(-1, 1, (3,)), hidden=spaces.Box(-9, 9, (2,)), kind=spaces.Discrete(3, start=1)
)
ACTION = spaces.Box(-2, 3, (2,))


def network(memory=None, shared=False):
    torso = functools.partial(Torso, mlp=SMALL, memory=memory)
    return functools.partial(
        ActorCritic, actor_torso=functools.partial(torso, encoder=BLIND), critic_torso=torso, shared_torso=shared
    )


MEMORY = functools.partial(GRU, size=4)
CRITIC = functools.partial(CriticEnsemble, layers=(8,))
ALGORITHMS = {
    "ppo": functools.partial(PPO, network=network()),
    "ppo with memory": functools.partial(PPO, network=network(MEMORY)),
    "a2c": functools.partial(A2C, network=network()),
    "appo": functools.partial(APPO, network=network()),
    "sac": functools.partial(SAC, actor_encoder=BLIND, actor_mlp=SMALL, critic=CRITIC),
    "td3": functools.partial(TD3, actor=functools.partial(DeterministicActor, encoder=BLIND, mlp=SMALL), critic=CRITIC),
}
algorithms = pytest.mark.parametrize("name", ALGORITHMS)


def make(name):
    torch.manual_seed(0)
    made = ALGORITHMS[name](specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), specs.reward_spec())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def rows(*shape):
    """Random rows, without an end or a beginning among them."""
    observation = {"seen": torch.randn(*shape, 3), "hidden": torch.randn(*shape, 2), "kind": torch.randint(3, shape)}
    step_type = torch.full(shape, StepType.MID, dtype=torch.int32)
    prev_action = specs.zeros(specs.action_spec(ACTION), shape)
    return TimeStep(step_type, torch.randn(shape), torch.ones(shape), observation, prev_action, step_type)


def with_noise(time_step):
    hidden = torch.randn_like(time_step.observation["hidden"])
    return time_step._replace(observation=time_step.observation | {"hidden": hidden})


@algorithms
def test_actions_do_not_depend_on_a_leaf_that_the_actor_drops(name):
    made = make(name)
    given = rows(5)
    other, state = with_noise(given), made.initial_state(5)
    for hook in (made.rollout_step, made.predict_step):
        actions = []
        for time_step in (given, other):
            torch.manual_seed(1)
            actions.append(hook(time_step, state).output)
        torch.testing.assert_close(*actions, rtol=0, atol=0)
    assert not torch.equal(made.predict_step(rows(5), state).output, actions[0])


@algorithms
def test_values_and_the_critics_loss_depend_on_it(name):
    made = make(name)
    given = rows(3, 5)
    action = nest.map(lambda leaf: leaf + 0.1, given.prev_action)
    losses = []
    for time_step in (given, with_noise(given)):
        torch.manual_seed(1)
        step = made.rollout_step(nest.at(time_step, 0), made.initial_state(5))
        info = nest.map(lambda leaf: leaf.expand(3, *leaf.shape), step.info)
        experience = made.preprocess_experience(Experience(time_step, action, info, made.initial_state(5)))
        if made.on_policy:
            losses.append(made.network.value(time_step, experience.state))
        else:
            losses.append(made.calc_loss(experience, made.train_step(experience, None).info).loss["critic"])
    assert (losses[0] != losses[1]).all()


@algorithms
def test_actions_do_not_change_without_the_dropped_leaf(name):
    made = make(name)
    transforms = Transforms([ObservationNormalizer], specs.observation_spec(OBSERVATION), specs.reward_spec())
    policy = Policy(made, transforms, OBSERVATION, ACTION)
    observations = [OBSERVATION.sample() for _ in range(4)]
    for sample in (False, True):
        found = []
        for dropped in ((), ("hidden",)):
            torch.manual_seed(1)
            policy.reset()
            parts = [{key: leaf for key, leaf in one.items() if key not in dropped} for one in observations]
            found.append([policy.act(part, sample=sample) for part in parts])
        np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)  # a critic's memory of the leaf keeps it in torch
    with pytest.raises(UsageError, match=r"depends on observation\.seen"):
        policy.act({"kind": 1})


def test_an_actor_on_critic_features_cannot_drop_leaves():
    recurrent = functools.partial(RecurrentSAC, memory=MEMORY, actor_mlp=SMALL, critic=CRITIC)
    arguments = specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), specs.reward_spec()
    with pytest.raises(UsageError, match=r"RecurrentSAC.actor_encoder is set, but the actor has no encoder"):
        recurrent(*arguments, actor_encoder=BLIND)
    critic = functools.partial(CRITIC, encoder=BLIND)
    assert recurrent(*arguments, critic=critic).critic.encoder.output_size == 6  # blind both


CONFS = {
    "ppo": """
        import alfish.algorithms.ppo
        Trainer.algorithm = @PPO
        Trainer.batches = @EpochBatches
        ActorCritic.actor_torso = @actor/Torso
        """,
    "sac": """
        import alfish.algorithms.sac
        Trainer.algorithm = @SAC
        Trainer.batches = @ReplayBatches
        ReplayBatches.warmup_env_steps = 16
        ReplayBatches.batch_size = 8
        SAC.actor_encoder = @actor/Encoder
        """,
    "td3": """
        import alfish.algorithms.td3
        Trainer.algorithm = @TD3
        Trainer.batches = @ReplayBatches
        ReplayBatches.warmup_env_steps = 16
        ReplayBatches.batch_size = 8
        DDPG.actor = @actor/DeterministicActor
        """,
}


@pytest.mark.parametrize("name", CONFS)
def test_a_gin_scope_drops_a_leaf_for_the_actor_only(name, tmp_path):
    conf = tmp_path / "run.gin"
    conf.write_text(
        "\n".join(line.strip() for line in CONFS[name].splitlines())
        + """
import alfish.environments.optional_wrappers
Trainer.environment = @make_environment
Trainer.evaluation_environment = @evaluation/make_environment
evaluation/make_environment.wrappers = [
    @SplitObservation, ['gymnasium.wrappers:FilterObservation', {'filter_keys': ['angle']}]
]
Trainer.learner = @Learner
Trainer.num_env_steps = 64
Trainer.unroll_length = 8
Trainer.transforms = [@ObservationNormalizer]
make_environment.env_id = 'Pendulum-v1'
make_environment.env_kwargs = {'max_episode_steps': 20}
make_environment.num_envs = 2
make_environment.wrappers = [@SplitObservation]
SplitObservation.sizes = {'angle': 2, 'velocity': 1}
actor/Encoder.leaves = {'velocity': None}
MLP.layers = (8,)
"""
    )
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}"]) == 0
    with open_run(tmp_path / "run") as trainer:
        trainer.load_policy()
        evaluator = trainer.evaluator(2)
        assert set(evaluator.environment.observation_spec) == {"angle"}
        seeing = make_evaluator(make_environment, trainer.algorithm, trainer.transforms, 2)
        assert set(seeing.environment.observation_spec) == {"angle", "velocity"}
        assert evaluator.evaluate(2) == seeing.evaluate(2)
        evaluator.close()
        seeing.close()
    policy = alfish.load(tmp_path / "run")
    angle = np.array([0.6, 0.8], np.float32)
    action = policy.act({"angle": angle})
    for velocity in (-8.0, 5.0):
        np.testing.assert_array_equal(policy.act({"angle": angle, "velocity": [velocity]}), action)
    with pytest.raises(UsageError, match=r"depends on observation\.angle"):
        policy.act({"velocity": [1.0]})


def test_an_environment_without_a_leaf_that_the_policy_needs_cannot_evaluate_it():
    trained = make_environment(Parts)
    transforms = Transforms([], trained.observation_spec, trained.reward_spec)
    made = PPO(trained.observation_spec, trained.action_spec, trained.reward_spec, network=network())
    less = functools.partial(
        make_environment,
        Parts,
        wrappers=[["gymnasium.wrappers:FilterObservation", {"filter_keys": ["hidden", "kind"]}]],
    )
    with pytest.raises(UsageError, match=r"the policy's action depends on observation\.seen, which was not given"):
        make_evaluator(less, made, transforms, 1).evaluate(1)


class Parts(gymnasium.Env):
    observation_space, action_space = OBSERVATION, ACTION

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return OBSERVATION.sample(), {}

    def step(self, action):
        return OBSERVATION.sample(), 0.0, True, False, {}
