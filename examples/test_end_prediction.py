"""A test of an auxiliary loss on a batch made by hand: python -m pytest examples/test_end_prediction.py."""

import math

import torch

from alfish.algorithms.composition import FeatureRows, Transitions
from examples.end_prediction import EndPrediction


def test_an_undecided_prediction_costs_log_two_and_a_right_one_little():
    part = EndPrediction(None, None, feature_size=2)
    with torch.no_grad():
        part.linear.weight.copy_(torch.tensor([[10.0, 0.0]]))
        part.linear.bias.zero_()
    features = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # [1, 2, 2]
    discount = torch.tensor([[1.0, 0.0]])  # the second step terminates
    rows = FeatureRows(features, step_type=None, transitions=Transitions(None, None, None, discount))
    loss = part.feature_loss(rows).loss
    assert loss.shape == (1, 2)
    torch.testing.assert_close(loss, torch.tensor([[math.log(2), math.log(1 + math.exp(-10))]]))
