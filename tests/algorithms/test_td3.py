"""TD3 and DDPG: who moves when, what noise does, and targets worked by hand."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys import Bandit

from alfish import nest
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.td3 import TD3
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble, DeterministicActor
from alfish.parameters.schedules import Linear
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
NESTED = {"arm": BOX, "hand": (spaces.Box(-1, 1, (1,), np.float32),)}


def make(algorithm=TD3, action=BOX, observation=OBSERVATION, seed=0, **settings):
    torch.manual_seed(seed)
    mlp = functools.partial(MLP, layers=(8,))
    actor = functools.partial(DeterministicActor, mlp=mlp, gain=1.0)
    size = 1 if algorithm is DDPG else 2
    critic = functools.partial(CriticEnsemble, layers=(8,), ensemble_size=size)
    settings = {"actor": actor, "critic": critic, "gamma": 0.5, **settings}
    made = algorithm(observation, action, REWARD, **settings)
    with torch.no_grad():
        for target in (made.target_critic, made.target_actor):
            for parameter in target.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def rows(num_windows=6, step_type=(FIRST, MID), discount=(1.0, 1.0), seed=1):
    torch.manual_seed(seed)
    shape = (len(step_type), num_windows)
    kinds = torch.tensor(step_type, dtype=torch.int32)[:, None].expand(shape)
    action = torch.rand(*shape, 2) * 2 - 1
    discounts = torch.tensor(discount)[:, None].expand(shape)
    time_step = TimeStep(kinds, torch.randn(shape), discounts, torch.randn(*shape, 3), action, kinds)
    return Experience(time_step, action, None, None)


def updates(algorithm, num_updates, **learner_settings):
    """Trains, and yields copies of all tensors after each update."""
    learner = Learner(algorithm, **learner_settings)
    yield snapshot(algorithm)
    for update in range(num_updates):
        experience = rows(seed=10 + update)
        learner.train(
            [Minibatches(Batch(experience, trainable(experience.time_step.step_type)), torch.arange(6)[None])]
        )
        yield snapshot(algorithm)


def snapshot(algorithm):
    return {name: tensor.detach().clone() for name, tensor in algorithm.named_parameters()}


def moved(before, after, prefix):
    """Whether all tensors of a module moved; some but not all is a failure."""
    verdicts = {not torch.equal(before[name], after[name]) for name in before if name.startswith(prefix)}
    assert len(verdicts) == 1, prefix
    return verdicts.pop()


def constant_actor(algorithm, value):
    """The actor and its target always do tanh(value)."""
    with torch.no_grad():
        for actor in (algorithm.actor, algorithm.target_actor.network):
            actor.linear.weight.zero_()
            actor.linear.bias.fill_(value)


# Who moves when.


@pytest.mark.parametrize(("settings", "period"), [({}, 2), ({"actor_period": 3}, 3), ({"actor_period": 1}, 1)])
def test_actor_and_targets_change_only_at_every_second_update(settings, period):
    states = list(updates(make(**settings), 7))
    for update, (before, after) in enumerate(zip(states, states[1:]), 1):
        assert moved(before, after, "critic.")
        for prefix in ("actor.", "target_actor.", "target_critic."):
            assert moved(before, after, prefix) == (update % period == 0), (update, prefix)


def test_ddpg_moves_all_of_them_at_every_update():
    states = list(updates(make(DDPG), 4))
    for before, after in zip(states, states[1:]):
        for prefix in ("critic.", "actor.", "target_actor.", "target_critic."):
            assert moved(before, after, prefix)


def test_actor_and_critic_losses_train_only_their_own_parameters():
    for still, other in (("critic", "actor"), ("actor", "critic")):
        states = list(updates(make(actor_period=1), 2, learning_rate={still: 0.0, other: 0.1}))
        assert moved(states[1], states[2], f"{other}.") and not moved(states[1], states[2], f"{still}.")


def test_the_actor_climbs_the_first_critic():
    algorithm, experience = make(actor_period=1), rows()
    loss = algorithm.calc_loss(experience, algorithm.train_step(experience, None).info).loss["actor"]
    observation = experience.time_step.observation[:1]
    q = algorithm.critic(observation, algorithm.actor(observation))
    torch.testing.assert_close(loss, -q[0])
    gradients = torch.autograd.grad(loss.sum(), list(algorithm.actor.parameters()))
    expected = torch.autograd.grad(-q[0].sum(), list(algorithm.actor.parameters()))
    assert all(torch.equal(a, b) and a.count_nonzero() for a, b in zip(gradients, expected))


def test_without_its_turn_the_actor_has_no_loss():
    algorithm, experience = make(), rows()
    info = algorithm.train_step(experience, None).info
    assert info.policy_q is None and set(algorithm.calc_loss(experience, info).loss) == {"critic"}
    algorithm.num_updates = 1
    assert set(algorithm.calc_loss(experience, algorithm.train_step(experience, None).info).loss) == {"critic", "actor"}


def test_targets_follow_by_their_rate():
    algorithm = make(target_rate=0.25)
    constant_actor(algorithm, 0.0)
    with torch.no_grad():
        algorithm.actor.linear.bias.fill_(16.0)
    for expected in (0.0, 4.0, 4.0, 7.0):
        algorithm.after_update()
        algorithm.num_updates += 1
        assert float(algorithm.target_actor.network.linear.bias[0]) == expected


@pytest.mark.parametrize("seed", range(5))
def test_first_actor_step_keeps_actions_of_observations_distinct(seed):
    """A critic that knows nothing pushes all actions one way; Adam's first step is as long as the learning rate."""
    torch.manual_seed(seed)
    space = spaces.Box(-np.inf, np.inf, (17,), np.float32)
    actor = DeterministicActor(space, 6, mlp=functools.partial(MLP, layers=(256, 256), activation="relu"))
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    observation = torch.randn(512, 17)
    before = actor(observation)
    assert before.abs().max() < 0.99  # none is saturated
    (-before.sum(-1).mean()).backward()
    optimizer.step()
    shift = (actor(observation) - before).mean(0)
    assert (shift > 0).all() and (shift < before.std(0) / 2).all()


# Targets.


def target_by_hand(algorithm, experience, action):
    step = experience.time_step
    with torch.no_grad():
        q = algorithm.target_critic(step.observation[1:], action)
    return step.reward[1] + 0.5 * step.discount[1] * q.amin(0)[0]


def targets(algorithm, experience):
    info = algorithm.train_step(experience, None).info
    assert not info.next_value.requires_grad
    loss = algorithm.calc_loss(experience, info).loss["critic"]
    [gradient] = torch.autograd.grad(loss.sum(), [info.q])  # q - target
    return (info.q - gradient).detach()[:, 0]


@pytest.mark.parametrize(("step_type", "discount"), [((FIRST, MID), 1.0), ((MID, LAST), 1.0), ((MID, LAST), 0.0)])
def test_targets_are_the_smaller_target_critic_of_the_smoothed_target_action(step_type, discount):
    algorithm, experience = make(), rows(step_type=step_type, discount=(1.0, discount))
    with torch.no_grad():
        action = algorithm.target_actor(experience.time_step.observation[1:])
    torch.manual_seed(3)
    noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
    expected = target_by_hand(algorithm, experience, (action + noise).clamp(-1, 1))
    torch.manual_seed(3)
    found = targets(algorithm, experience)
    for e in range(2):
        torch.testing.assert_close(found[e], expected)


def test_ddpg_has_one_critic_and_takes_the_target_action_as_it_is():
    algorithm, experience = make(DDPG), rows()
    with torch.no_grad():
        action = algorithm.target_actor(experience.time_step.observation[1:])
    found = targets(algorithm, experience)
    torch.testing.assert_close(found, target_by_hand(algorithm, experience, action)[None])
    torch.testing.assert_close(targets(algorithm, experience), found)  # nothing is drawn


def test_by_default_ddpg_has_one_critic_and_td3_two():
    assert DDPG(OBSERVATION, BOX, REWARD).critic.ensemble_size == 1
    assert TD3(OBSERVATION, BOX, REWARD).critic.ensemble_size == 2


def test_smoothing_is_clipped_and_so_is_the_smoothed_action():
    algorithm = make(smoothing_std=0.2, smoothing_clip=0.3)
    constant_actor(algorithm, 0.0)
    torch.manual_seed(0)
    with torch.no_grad():
        noise = algorithm.target_action(torch.zeros(1, 20_000, 3))
        assert noise.abs().max() == pytest.approx(0.3)
        clipped = (noise.abs() > 0.2999).float().mean()
        assert abs(clipped - 0.1336) < 0.01  # P(|N(0, 0.2)| > 0.3)
        inside = noise[noise.abs() < 0.2999]
        assert abs(inside.mean()) < 0.005 and noise.unique().numel() > 10_000
        constant_actor(algorithm, 10.0)
        action = algorithm.target_action(torch.zeros(1, 1000, 3))
        assert action.max() == 1 and action.min() >= 0.7 - 1e-6 and (action < 1).any()


# Exploration.


def act(algorithm, batch_size, state=None, name="rollout_step"):
    with torch.no_grad():
        return getattr(algorithm, name)(TimeStep(None, None, None, torch.zeros(batch_size, 3), None, None), state)


def test_white_noise_has_its_deviation_and_evaluation_has_none():
    algorithm = make(noise_std=0.1)
    constant_actor(algorithm, 0.0)
    assert algorithm.initial_state(3) is None and not algorithm.has_state
    torch.manual_seed(0)
    noise = act(algorithm, 10_000).output
    assert abs(noise.std() - 0.1) < 0.003 and abs(noise.mean()) < 0.003
    assert act(algorithm, 5, name="predict_step").output.eq(0).all()


def test_noisy_actions_stay_within_bounds_and_noise_runs_on_progress():
    algorithm = make(noise_std=Linear(3.0, 0.0))
    constant_actor(algorithm, 0.0)
    assert act(algorithm, 100).output.abs().max() == 1
    algorithm.progress.fill_(1.0)
    assert act(algorithm, 100).output.eq(0).all()


def test_noise_is_correlated_only_within_an_episode():
    torch.manual_seed(0)
    rho, num_envs, length = 0.9, 400, 8
    environment = make_environment(Bandit, num_envs, env_kwargs={"action": "box", "length": length})
    specs = environment.observation_spec, environment.action_spec
    algorithm = make(action=specs[1], observation=specs[0], noise_std=0.1, noise_correlation=rho)
    constant_actor(algorithm, 0.0)
    assert algorithm.has_state
    unroller = SyncUnroller(environment, algorithm, Transforms([], specs[0], environment.reward_spec))
    unrolls = [nest.tensors(unroller.unroll(count)) for count in (5, 1, 12, 9)]
    noise = torch.cat([unroll.action for unroll in unrolls])[..., 0] / 0.1
    step_type = torch.cat([unroll.time_step.step_type for unroll in unrolls])[:, 0]
    assert step_type.tolist() == ([FIRST] + [MID] * (length - 1) + [LAST]) * 3
    fresh = (1 - rho**2) ** 0.5
    for t in range(1, len(noise)):
        correlation = (noise[t] * noise[t - 1]).mean() / noise[t - 1].square().mean()
        if step_type[t] == FIRST:
            assert abs(correlation) < 0.15 and abs(noise[t].std() - fresh) < 0.06
        else:
            assert abs(correlation - rho) < 0.1
            assert abs((noise[t] - rho * noise[t - 1]).std() - fresh) < 0.06
    assert noise[step_type == MID].std() > 0.6  # it grows to 1


# Specs and state.


def test_a_nested_action_goes_through_the_critics_in_one_vector():
    algorithm = make(action=NESTED)
    output = act(algorithm, 4).output
    assert output["arm"].shape == (4, 2) and output["hand"][0].shape == (4, 1)
    with torch.no_grad():
        together = algorithm.actor(torch.zeros(4, 3))
    assert torch.equal(torch.cat(nest.leaves(act(algorithm, 4, name="predict_step").output), -1), together)


@pytest.mark.parametrize("algorithm", [TD3, DDPG])
@pytest.mark.parametrize(("action", "name"), [
    (spaces.Discrete(3), "the action is Discrete"),
    (spaces.Box(-np.inf, np.inf, (2,)), "the action has no bounds"),
    ({"a": BOX, "b": spaces.MultiDiscrete([2])}, "the action.b is MultiDiscrete"),
])  # fmt: skip
def test_only_bounded_boxes_are_taken(algorithm, action, name):
    with pytest.raises(UsageError, match=f"{algorithm.__name__} requires bounded Box actions, but {name}"):
        algorithm(OBSERVATION, action, REWARD)


def test_the_actors_turn_is_saved_with_the_learner():
    algorithm, other = make(), make()
    learner, fresh = Learner(algorithm, compile=False), Learner(other, compile=False)
    learner.updates = 1
    assert not other.trains("actor")
    fresh.load_state_dict(learner.state_dict())
    assert other.trains("actor")


@pytest.mark.parametrize("algorithm", [TD3, DDPG])
def test_state_value_is_the_smallest_critic_of_the_noiseless_action(algorithm):
    made, step = make(algorithm, noise_correlation=0.5), nest.at(rows(num_windows=20).time_step, 0)
    q = made.critic(step.observation, made.actor(step.observation))
    torch.testing.assert_close(made.state_value(step, torch.ones(20, 2)), q.min(0).values)


def test_noise_that_would_never_leave_zero_is_refused():
    with pytest.raises(UsageError, match=r"DDPG.noise_correlation is 1.0; it must be a number in \[0, 1\)"):
        make(DDPG, noise_correlation=1.0)
