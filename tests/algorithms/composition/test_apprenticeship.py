"""Apprenticeship learning: expectations of features, projections, and the reward, by hand."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import specs
from alfish.algorithms.composition import ApprenticeshipLearning, SigmoidFeatures, Transitions
from alfish.algorithms.imitation.external import opened_to_act
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.runs.loading import load_model

OBSERVATION, ACTION = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)


class Plain(nn.Module):
    """Features that are the normalized observation."""

    output_size = 2

    def forward(self, observation):
        return observation


def episode(observations, terminates=True):
    length = len(observations) - 1
    ends = np.zeros((2, length), bool)
    ends[0 if terminates else 1, -1] = True
    rows = np.array(observations, np.float32)
    return Episode(str(length), rows, np.zeros(length, np.int64), np.zeros(length, np.float32), *ends)


# Arrived at: (1, -1), (-1, 1) and (1, 1), (-1, -1), with mean 0 and deviation 1.
EPISODES = [episode([(5, 5), (1, -1), (-1, 1)]), episode([(7, 7), (1, 1), (-1, -1)], terminates=False)]


def make(features=lambda spec: Plain(), gamma=0.5):
    data = functools.partial(OfflineBuffer, [Arrays(list(EPISODES), Spaces(OBSERVATION, ACTION))], num_columns=1)
    return ApprenticeshipLearning(
        specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), demonstrations=data, features=features,
        gamma=gamma,
    )  # fmt: skip


def test_the_expectation_is_the_mean_of_discounted_next_features():
    part = make()
    # Episodes: (1, -1) + 0.5 (-1, 1) = (0.5, -0.5) and (1, 1) + 0.5 (-1, -1) = (0.5, 0.5)
    torch.testing.assert_close(part.expert, torch.tensor([0.5, 0.0], dtype=torch.float64))
    found = part.expectation(torch.tensor([[2.0, 0.0], [4.0, 2.0], [0.0, 6.0]]), [2, 1])
    # (2, 0) + 0.5 (4, 2) = (4, 1) and (0, 6)
    torch.testing.assert_close(found, torch.tensor([2.0, 3.5], dtype=torch.float64))


def test_rounds_project_the_expert_onto_the_segment_to_the_new_policy():
    part = make()
    part.expert.copy_(torch.tensor([4.0, 3.0]))
    rounds = [
        # expectation, mixture after it, distances of policy and mixture from the expert
        ((0.0, 0.0), (0.0, 0.0), (5.0, 5.0)),
        ((8.0, 0.0), (4.0, 0.0), (5.0, 3.0)),  # B = (8, 0), C = (4, 3): share 32 / 64
        ((4.0, -2.0), (4.0, 0.0), (5.0, 3.0)),  # B.C < 0: nothing is nearer
        ((4.0, 2.0), (4.0, 2.0), (1.0, 1.0)),  # B.C / B.B = 6 / 4: the end of the segment
        ((4.0, 2.0), (4.0, 2.0), (1.0, 1.0)),  # B = 0
    ]
    for number, (found, mixture, distances) in enumerate(rounds, 1):
        assert part.close_round(torch.tensor(found, dtype=torch.float64)) == pytest.approx(distances)
        torch.testing.assert_close(part.mixture, torch.tensor(mixture, dtype=torch.float64))
        left = part.expert - part.mixture
        torch.testing.assert_close(part.weights, (left / distances[1]).float())
        assert part.num_rounds == number


def test_the_reward_reads_the_next_observation():
    part = make()
    part.weights.copy_(torch.tensor([0.6, 0.8]))
    now, later = torch.full((1, 2, 2), 9.0), torch.tensor([[[1.0, 0.0], [2.0, -1.0]]])
    reward = part.reward(Transitions(now, torch.zeros(1, 2, dtype=torch.int64), later, torch.ones(1, 2)))
    torch.testing.assert_close(reward, torch.tensor([[0.6, 0.4]]))


def test_the_default_features_are_logistic_functions_and_a_constant():
    features = SigmoidFeatures(specs.observation_spec(OBSERVATION))
    found = features(torch.tensor([0.0, float(np.log(3))]))
    torch.testing.assert_close(found, torch.tensor([0.5, 0.75, 1.0]))
    assert features.output_size == 3


def test_acting_policies_load_expectations_without_data():
    part = make()
    part.close_round(torch.tensor([1.0, 2.0], dtype=torch.float64))
    with opened_to_act():
        absent = ApprenticeshipLearning(
            specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), features=lambda spec: Plain(),
            demonstrations=functools.partial(pytest.fail, "read"),
        )  # fmt: skip
    load_model(absent, part.state_dict(), "a policy that only acts")
    assert torch.equal(absent.weights, part.weights) and torch.equal(absent.expert, part.expert)
