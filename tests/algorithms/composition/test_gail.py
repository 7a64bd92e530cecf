"""GAIL: a discriminator between recorded steps of an expert and steps of the policy, as a reward."""

import functools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from absl import logging
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.composition import GAIL, Composed, NormalizedObservation, Transitions
from alfish.algorithms.composition.gail import REWARDS
from alfish.algorithms.composition.learned_reward import Demonstrations
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.ppo import PPO
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.learner.optimizers import Adam
from alfish.learner.updates import Updates
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.runs.loading import load_model

OBSERVATION, ACTION = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32)
DISCRETE = spaces.Discrete(3, start=5)


def episode(length, action=ACTION, seed=0, terminates=True):
    random = np.random.default_rng(seed)
    actions = (
        random.uniform(-2, 2, (length, 2)).astype(np.float32) if action is ACTION else random.integers(5, 8, length)
    )
    ends = np.zeros((2, length), bool)
    ends[0 if terminates else 1, -1] = True
    return Episode(str(seed), random.normal(1, 2, (length + 1, 3)).astype(np.float32), actions,
                   random.normal(size=length).astype(np.float32), *ends)  # fmt: skip


def data(lengths=(5, 5), action=ACTION, **settings):
    episodes = [episode(length, action, seed) for seed, length in enumerate(lengths)]
    return functools.partial(OfflineBuffer, [Arrays(episodes, Spaces(OBSERVATION, action))], num_columns=2)


def make(action=ACTION, lengths=(5, 5), seed=0, **settings):
    torch.manual_seed(seed)
    settings = {"layers": (8,), "normalize_reward": False, **settings}
    return GAIL(
        specs.observation_spec(OBSERVATION), specs.action_spec(action), demonstrations=data(lengths, action), **settings
    )


def steps(*shape, action=ACTION, seed=0):
    torch.manual_seed(seed)
    count = math.prod(shape)
    taken = nest.map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), specs.sample(specs.action_spec(action), count))
    return Transitions(torch.randn(*shape, 3), taken, torch.randn(*shape, 3), torch.ones(shape))


# Demonstrations.


def test_demonstrations_are_all_recorded_steps_in_the_algorithms_units():
    found = make().demonstrations.steps
    episodes = [episode(5, seed=0), episode(5, seed=1)]
    order = np.argsort(found.observation[:, 0].numpy())
    recorded = [
        np.concatenate([each.observations[:-1] for each in episodes]),
        np.concatenate([each.actions for each in episodes]) / 2,
        np.concatenate([each.observations[1:] for each in episodes]),
    ]
    expected = np.argsort(recorded[0][:, 0])
    for leaf, each in zip(found[:3], recorded, strict=True):
        np.testing.assert_allclose(leaf.numpy()[order], each[expected], atol=1e-6)
    assert found.next_discount.sum() == 8, "both episodes terminated at their last step"


def test_steps_are_drawn_uniformly_from_torchs_generator():
    demonstrations = make(lengths=(3, 2)).demonstrations
    torch.manual_seed(0)
    drawn = demonstrations(torch.Size((4, 1000)))
    torch.manual_seed(0)
    assert torch.equal(demonstrations(torch.Size((4, 1000))).observation, drawn.observation)
    assert drawn.observation.shape == (4, 1000, 3)
    _, counts = drawn.observation[..., 0].unique(return_counts=True)
    assert len(counts) == 5 and (counts - 800).abs().max() < 120


def test_a_checkpoint_has_the_checksum_of_the_data_only():
    part = make()
    state = part.state_dict()
    assert [key for key in state if key.startswith("demonstrations")] == ["demonstrations._extra_state"]
    load_model(make(seed=1), state, "the same data")
    with pytest.raises(UsageError, match="has changed since this run was saved"):
        load_model(make(lengths=(5, 6)), state, "other data")
    with opened_to_act():
        absent = GAIL(specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), layers=(8,),
                      normalize_reward=False, demonstrations=functools.partial(pytest.fail, "read"))  # fmt: skip
    load_model(absent, state, "a policy that only acts")
    assert torch.equal(absent.normalizer._moments[1].mean, part.normalizer._moments[1].mean)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (
            spaces.Box(-9, 9, (4,)),
            ACTION,
            r"the observations of .* are .*\(3,\).*, but GAIL.* compares them with .* \(4,\)",
        ),
        (spaces.Box(-10, 10, (3,)), ACTION, "leave out transforms of observations"),
        (OBSERVATION, spaces.Discrete(3), r"the actions of .* are .*Box.*Discrete\(3\)"),
    ],
)
def test_data_of_other_spaces_are_refused(observation, action, message):
    with pytest.raises(UsageError, match=message):
        GAIL(specs.observation_spec(observation), specs.action_spec(action), demonstrations=data())


def test_data_with_other_action_units_are_refused_at_training_start():
    make().demonstrations.start(OBSERVATION, ACTION)
    with pytest.raises(UsageError, match=r"the actions of .* are Box\(-2.*, but the environment's are Box\(-1"):
        make().demonstrations.start(OBSERVATION, spaces.Box(-1, 1, (2,), np.float32))


def test_what_is_not_a_data_set_is_refused():
    with pytest.raises(
        UsageError, match="GAIL.demonstrations made a Demonstrations; it must be a class, or a function"
    ):
        GAIL(
            specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), demonstrations=lambda: make().demonstrations
        )
    assert isinstance(make().demonstrations, Demonstrations)


@pytest.mark.parametrize("reward", ["softplus", "log_ratio", "negative"])
def test_episode_lengths_are_reported_if_reward_signs_matter(reward, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *arguments: warnings.append(text % arguments))
    make(reward=reward)
    assert not warnings
    make(reward=reward, lengths=(5, 9))
    told = {"softplus": "longer", "negative": "shorter"}.get(reward)
    assert len(warnings) == (told is not None)
    assert told is None or f"have 5 to 9 steps, but GAIL.reward = {reward!r} favours {told} episodes" in warnings[0]


# Reward and loss.


def logit_of(part, transitions):
    """By hand, from the moments that the part has."""
    action, observation = part.normalizer._moments
    inputs = [(leaf - each.shift) * each.scale for leaf, each in zip(transitions[1::-1], (action, observation))]
    return part.discriminator(torch.cat(inputs, -1).clamp(-10, 10)).squeeze(-1)


@pytest.mark.parametrize("reward", ["softplus", "log_ratio", "negative"])
def test_the_reward_is_a_function_of_the_logit(reward):
    part, transitions = make(reward=reward), steps(4, 6)
    with torch.no_grad():
        probability = logit_of(part, transitions).sigmoid()
        found = part.reward(transitions)
    expected = {"softplus": -(1 - probability).log(), "negative": probability.log()}
    expected["log_ratio"] = expected["softplus"] + expected["negative"]
    torch.testing.assert_close(found, expected[reward], atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_of_equally_many_steps_of_both_kinds():
    part, transitions = make(), steps(4, 6)
    torch.manual_seed(5)
    found = part.loss(transitions)
    torch.manual_seed(5)
    expert = part.demonstrations(torch.Size((4, 6)))
    of_policy, of_expert = logit_of(part, transitions), logit_of(part, expert)
    assert of_policy.numel() == of_expert.numel()
    expected = [F.binary_cross_entropy_with_logits(logit, torch.full((4, 6), label), reduction="none")
                for logit, label in ((of_policy, 0.0), (of_expert, 1.0))]  # fmt: skip
    torch.testing.assert_close(found.loss, sum(expected) / 2)
    accuracy = ((of_policy < 0).float() + (of_expert > 0).float()) / 2
    assert torch.equal(found.extra["accuracy"], accuracy) and "gradient_penalty" not in found.extra


def test_the_gradient_penalty_pulls_the_slope_of_the_logit_to_1():
    part = make(gradient_penalty=10.0)
    part.discriminator = nn.Linear(5, 1)
    with torch.no_grad():
        part.discriminator.weight[:] = torch.tensor([[3.0, 0.0, 4.0, 0.0, 0.0]])
    transitions = steps(4, 6)
    torch.manual_seed(5)
    found = part.loss(transitions)
    torch.testing.assert_close(found.extra["gradient_penalty"], torch.full((4, 6), 16.0), rtol=1e-4, atol=0)
    part._gradient_penalty = 0.0
    torch.manual_seed(5)
    torch.testing.assert_close(found.loss - part.loss(transitions).loss, torch.full((4, 6), 160.0), rtol=1e-4, atol=0)
    optimizer = torch.optim.Adam(part.discriminator.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        part._penalty(*(torch.randn(1, 8, 5) for _ in range(2))).mean().backward()
        optimizer.step()
    assert abs(part.discriminator.weight.norm() - 1) < 0.05


@pytest.mark.parametrize("action", [ACTION, DISCRETE])
def test_steps_of_the_expert_get_the_higher_reward(action):
    part = make(action)
    optimizer = torch.optim.Adam(part.discriminator.parameters(), 0.02)
    for k in range(300):
        optimizer.zero_grad()
        part.loss(steps(1, 16, action=action, seed=k)).loss.mean().backward()
        optimizer.step()
    with torch.no_grad():
        expert = part.reward(part.demonstrations(torch.Size((1, 500)))).mean()
        assert expert > 2 * part.reward(steps(1, 500, action=action, seed=999)).mean()


def rows(length, size, seed=0, action=ACTION):
    torch.manual_seed(seed)
    kinds = torch.full((length, size), StepType.MID, dtype=torch.int32)
    kinds[0, 0], kinds[3, 1], kinds[4, 1] = StepType.FIRST, StepType.LAST, StepType.FIRST
    zeros = specs.zeros(specs.action_spec(action), (length, size))
    taken = 3 * torch.randn_like(zeros)  # sampled, beyond the bounds
    env_id = torch.arange(size, dtype=torch.int32).expand(length, size)
    time_step = TimeStep(
        kinds, torch.randn(length, size), torch.ones(length, size), torch.randn(length, size, 3), zeros, env_id
    )
    return Experience(time_step, taken, None, None)


@pytest.mark.parametrize("num_seen", [0, 1])
def test_inputs_are_normalized_by_the_moments_of_both_kinds_of_steps(num_seen):
    part, experience = make(), rows(6, 2)
    _, moments = part.normalizer._moments
    assert moments.count == 10, "all demonstrations, before the first step of the policy"
    recorded = part.demonstrations.steps.observation
    torch.testing.assert_close(moments.mean.float(), recorded.mean(0))
    torch.manual_seed(3)
    with torch.no_grad():
        part.after_iteration(experience, num_seen)
    torch.manual_seed(3)
    count = 6 - num_seen
    acts = (experience.time_step.step_type <= StepType.MID)[:count]
    drawn = part.demonstrations(acts.shape).observation[acts]
    own = experience.time_step.observation[:count][acts]
    assert len(own) == len(drawn) == 2 * count - 1, "the row that ends an episode does not act"
    for k, (all_rows, found) in enumerate(
        [(torch.cat([recorded, own, drawn]), moments), (None, part.normalizer._moments[0])]
    ):
        assert found.count == 10 + 2 * (2 * count - 1)
        if k == 0:
            torch.testing.assert_close(found.mean.float(), all_rows.mean(0))
            torch.testing.assert_close(found.scale, all_rows.std(0, unbiased=False).reciprocal(), rtol=1e-4, atol=1e-5)
    assert part.normalizer._moments[0].mean.abs().max() < 1, "actions count as they are executed, within their bounds"


def test_overlapping_rows_count_once_even_in_shorter_columns():
    part, experience = make(normalize_reward=True), rows(6, 2)
    step_type = torch.full((6, 2), StepType.MID, dtype=torch.int32)
    step_type[4:, 1] = StepType.PAD  # row 3 acts again
    before = float(part.normalizer._moments[1].count)
    with torch.no_grad():
        part.after_iteration(experience._replace(time_step=experience.time_step._replace(step_type=step_type)), 1)
    assert part.normalizer._moments[1].count - before == 2 * (5 + 3)
    assert part.scale._moments.count == 5 + 3


def test_rewards_are_divided_by_the_deviation_of_their_discounted_returns():
    part = make(normalize_reward=True, gamma=0.9)
    with torch.no_grad():
        for k in range(30):
            part.after_iteration(rows(6, 2, seed=k), 1)
        transitions = steps(4, 6)
        raw = F.softplus(part._logit(part._features(transitions.observation, transitions.action)))
        torch.testing.assert_close(part.reward(transitions), raw * part.scale._moments.scale)
    assert part.scale._moments.count > 0 and part.scale._moments.scale != 1


def test_an_episode_that_ends_in_the_first_row_is_counted():
    def scaled(*kinds):
        """The scale after an unroll within an episode and one of these kinds of rows."""
        part = make(normalize_reward=True, gamma=0.9)
        for k, own in enumerate(([StepType.MID] * 6, kinds)):
            experience = rows(6, 2, seed=k)
            step_type = torch.tensor(own, dtype=torch.int32).unsqueeze(1).expand(6, 2)
            step = experience.time_step._replace(step_type=step_type)
            with torch.no_grad():
                part.after_iteration(experience._replace(time_step=step), 0)
        return part.scale

    mid = [StepType.MID] * 4
    begun, ended = scaled(StepType.FIRST, StepType.FIRST, *mid), scaled(StepType.LAST, StepType.FIRST, *mid)
    assert torch.equal(begun._moments.mean, ended._moments.mean) and begun._moments.count == ended._moments.count == 20
    assert torch.equal(begun._return, ended._return)


# Composed.


def compose(**settings):
    torch.manual_seed(0)
    part = functools.partial(GAIL, demonstrations=data(), layers=(8,))
    return Composed(
        specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), specs.reward_spec(),
        algorithm=PPO, rewards=[part], representation=NormalizedObservation, extrinsic_coef=0.0, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("garbage", [1e6, float("nan")])
def test_training_never_reads_the_environments_reward(garbage):
    found = []
    for reward in (0.0, garbage):
        algorithm, experience = compose(), rows(6, 2)
        experience = experience._replace(time_step=experience.time_step._replace(reward=torch.full((6, 2), reward)))
        with torch.no_grad():
            step = algorithm.rollout_step(nest.merge_leading(experience.time_step), None)
            info = nest.map(lambda leaf: leaf[0].view(6, 2, *leaf.shape[2:]), step.info)
            prepared = algorithm.preprocess_experience(experience._replace(info=info))
            algorithm.after_iteration(experience)
        found.append(nest.leaves((prepared.info, dict(algorithm.named_buffers()))))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_only_the_discriminator_is_a_parameter_group():
    updates = Updates(compose(), Adam, None)
    assert set(updates.groups) == {"all", "gail"}


def test_only_the_algorithm_sees_normalized_observations():
    algorithm, experience = compose(), rows(6, 2)
    seen = algorithm._seen(experience.time_step).observation
    assert torch.equal(seen, experience.time_step.observation), "nothing was observed yet"
    with torch.no_grad():
        algorithm.after_iteration(experience)
    seen = algorithm._seen(experience.time_step).observation[1:]
    torch.testing.assert_close(seen.flatten(0, 1).mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.flatten(0, 1).std(0, unbiased=False), torch.ones(3), atol=1e-4, rtol=0)
    transitions = algorithm._compose(experience._replace(info=None))[1]
    assert torch.equal(transitions.observation, experience.time_step.observation[:-1])


@pytest.mark.parametrize("name", REWARDS)
def test_each_function_of_the_reward_can_be_sent_to_workers(name):
    logit = torch.tensor([-1.0, 0.0, 2.0])
    assert torch.equal(pickle.loads(pickle.dumps(REWARDS[name]))(logit), REWARDS[name](logit))
